"""The bits of the groups, and their storage.

`bitfield` is one group in memory, and `group_rows` builds the statements that read and write its row. `journal` holds
acks that arrived out of order, and folds them into the rows, a portion at a time; `folding` folds all of them when a
seal completes the batch. `cache` keeps bitfields in memory between transactions. `items` reads single bits.

A new encoding or a new place for bits goes here. No module here depends on the states of a batch.
"""
