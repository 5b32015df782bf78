"""Group commit: calls that arrive during a transaction share the next one, with one fsync, and an outcome each.

`combiner` queues the units of calls and commits them in flushes; `lanes` selects the units of the next flush, and
`aside` keeps batches apart that make others wait or fail. `admission` limits how long calls may wait; `shedding` is its
rule for when to refuse, and that of any load control. `operation` says what a call must offer, `kind` what the
operations of one kind do in a transaction, and `pending` brings the answer to the caller. `apart` tries again what
failed when it was merged: flushes, shared reads and payments to parents.

Nothing here knows what a call does: acks, the writing verbs (`core.writes`) and the dispatcher have a combiner each.
"""
