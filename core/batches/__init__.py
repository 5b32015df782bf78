"""The batch: its row, its states, and the reading and repairing of its bits.

`lifecycle` has the rules without a database, `batch` the verbs that write the batch's row, `nesting` the link between a
batch and its parent. `ranges` and `group_counts` read bits. `verify` compares counts with bits, and `repair` restores
the counts. `expiry` selects the batches that the janitor expires or removes, and `purge` removes a batch.

A new verb of a batch goes into `batch`, and its rule into `lifecycle`. A new way to read the items gets its own module.
"""
