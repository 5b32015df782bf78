"""Acks and failures, from a call to the commit of its bits.

A call (`call`) is queued and merged with others by the combiner (see `commits`). `flush` is the transaction: it flips
bits (`apply`) and completes batches (`completion`). What transactions of callers have flipped waits in the `outbox`
until it is counted. `commit` runs the flush, and `parents` resolves the items that nested batches stand for.

A new rule about when an item may be acked goes into `apply`. A rule that doesn't need the flush belongs to `batches`.
"""
