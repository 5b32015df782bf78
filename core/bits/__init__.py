"""The bits of the groups, and how they are stored.

`bitfield` is one group in memory, `group_rows` the text of the statements that read and write its row. `journal` holds
acks that arrived out of order until they are folded into the rows (`folding`). `cache` keeps bitfields in memory
between transactions.

A new encoding or a new place for bits goes here. No module here knows the states of a batch.
"""
