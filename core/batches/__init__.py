"""The batch: its row, its states, and what is computed from its bits.

`lifecycle` has the rules without a database, `batch` the verbs that write the batch's row, `nesting` the link between a
batch and its parent. `ranges` and `group_counts` read bits, `verify` and `repair` compare and restore them, `purge`
removes a batch.

A new verb of a batch goes into `batch`, its rule into `lifecycle`, and a new way to read its items gets a module of its
own.
"""
