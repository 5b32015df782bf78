"""The batch: its row, its states, and the reading and repairing of its bits.

The rules without a database are in `lifecycle`, `tolerance` and `settle`, which judges the end of a batch. `batch` has
its columns, and reads, locks and cancels it. `writing` opens, extends and seals many batches in one transaction.
`update`, `redrive` and `callbacks` have a verb or a part of a batch each; `once` makes a verb safe to repeat. `nesting`
is the link between a batch and its parent, whose items `core.acks.parents` resolves; `descendants` ends the batches
below one that has ended.

`search` finds batches. `ranges`, `group_counts` and `failures` read the items of one. `verify` compares counts with
bits, and `repair` restores the counts. `expiry` selects the batches that expire or are removed, and `purge` removes
one.

A new verb gets its own module, and its rule goes into `lifecycle`. So does a new way to read the items.
"""
