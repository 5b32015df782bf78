"""Verbs in a transaction that the caller commits, in the caller's own database.

    with engine.begin() as tx:
        tx.execute(insert(charges), …)        # the caller's effect
        ack the item                          # in the same transaction: both are committed, or none

`acks` flips bits, `writes` opens, extends and seals, both in a `transaction` over the caller's connection. Such a
transaction may last for seconds, so it locks nothing that others need but the rows of its groups. What it changes of
counts, and its events, it leaves in two outboxes: `count_outbox` (see `core.acks.outbox`) and `event_outbox` (see
`core.feed`). After the commit, the `mover` counts and announces.

What could go wrong, and why it can't:

*A batch completes too early or never.* An item counts when it is moved, so what waits is pending to everybody. Each
commit leaves what it has changed, in the same commit, and whoever comes first moves it: the caller's process, or any
service, dispatcher, janitor or other embedded client.

*An item changes again before it counts*: a caller fails it, and a client of a service acks it. Its batch would lose a
failure that it has not counted. Or a caller acks a failed item, and a failure of another one passes the tolerance. So a
flush that changes failed or skipped items, ends a batch, or passes its tolerance, first counts what waits for it, in
the same transaction (see `completion`). And a pass takes the oldest rows first, so that an item's failure comes no
later than the ack that a caller makes of it.

*An item is counted twice.* A row is read, counted and deleted in one transaction, under the lock of the batch's row.

*The events of a batch are out of order.* Each transaction that appends one moves those that wait for the same batch
first, under that lock (see `feed.write`). An event of a batch that was just opened waits there before anybody else can
see the batch.

*Clients of a service ack the same batch*, merged with others and cached. The locks of groups, the counts of their rows
and the lock of the batch's row mean the same to both sides; only the journal doesn't exist (see `acks`).

*A recount during all this*: `verify` adds what waits, in the same snapshot. A `repair` locks all groups first, and then
nothing waits that isn't in the bits.
"""
