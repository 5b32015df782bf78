"""Group commit: calls that arrive during a transaction share the next one, with one fsync, and an outcome each.

`combiner` queues the units of calls and commits them in flushes; `lanes` selects the units of the next flush,
`admission` limits how long calls may wait, and `aside` keeps batches apart that make others wait or fail. `operation`
says what a call must offer.

Nothing here knows what a call does: acks, the writing verbs (`core.writes`) and the dispatcher have a combiner each. A
new kind of load control goes here.
"""
