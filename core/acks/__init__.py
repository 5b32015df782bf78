"""Acks and failures, from a call to the commit of its bits.

A call (`call`) is queued and merged with others by the combiner (see `commits`). `flush` is the transaction: it flips
bits (`apply`) and completes batches (`completion`). `commit` runs it, and `parents` resolves the items that nested
batches stand for.

A new rule about when an item may be acked goes into `apply`. A rule that doesn't need the flush belongs to `batches`.
"""
