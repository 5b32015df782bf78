"""Tallies: sums over events that may be replayed, in which each event counts once.

A sum is not idempotent, and queues redeliver messages. So the total of a key is a sum of sub-counters, one for each
source (topic, partition, generation). There are two ways to count a source, and each source has one of them.

*By ranges* (`ranges`). A range has the sums of all messages between two positions of its source, and is added only if
it begins at the position that the source has reached. That is one row, locked before the sub-counters and written with
them. So of the ranges that begin at a position, one is added, and none is added twice. Positions are only compared for
equality: which messages a position covers, the client knows.

*By entries* (`entries`), for messages that can't be read in the order of their source. Each sub-counter has a guard:
the position (offset, child) of the last message that it counted. A message at or below the guard is a repeat.

The guard of a sub-counter tells which way its source has. If a message were counted both ways, its sub-counter would be
the same one, so whichever came later is refused (`errors.SourceConflict`), without a look at the source's other keys.

Possible failures of entries, and why they can't happen:

*The same message counts twice.* A message at the guard is a repeat too. Ignoring only messages with `offset < guard`
would count the guard's own message again.

*The siblings of a flat map are dropped.* All messages that a republisher derives from one message have its offset, so
the order is (offset, child).

*Two sources alternate.* If one guard were reset whenever the source changes, all replays of the other source would
count again. So each source has its own guard. A topic that was deleted and created again starts at 0, so it gets a new
generation.

*A message is applied in part.* All entries of a call are applied in one transaction, and one statement changes both
guard and value.

*The response is lost, and the retry groups the entries differently.* Each entry belongs to one message and is compared
with the guard separately, so the grouping doesn't matter. A delta summed over several messages would have no position
of its own, and could count twice.

*Messages arrive out of order.* All this is exact only if the messages of one source reach a key in order. Otherwise a
late message looks like a replay. Within one call this is detected and refused (`errors.OutOfOrder`): the message is
above the guard from before the call, so it was never added, but a later one precedes it in the call. Across calls it
can't be detected.

*A total leaves the range of integers.* Sub-counters are locked separately, and reading all of them at each change would
cost more than the change. So the total is read when one of them is new, has doubled, becomes zero, changes its sign
or is large. The amount by which the others may grow without such a check is reserved. The total is read after the
write, and again with its rows locked if it is large: if two calls reach the limit at once, one of them then sees the
other's change.

*Calls share a transaction, and one is refused.* The rows of all calls are locked first. The calls are then applied in
memory, one after the other, each to the rows as the accepted ones before it left them. If the totals that are read
after the write show that a call must be refused, the write is undone (to a savepoint, so all locks are kept), and the
calls are applied again with these totals.

*These rounds never end.* A refusal may change which totals must be read, so the next round may refuse other calls. The
rows of all totals that were read stay locked, and are read again in each round. So a round either reads the total of
one more key, which can happen only once per key, or decides as the one before it. If it decides otherwise, another
transaction has inserted a sub-counter in the meantime, and the transaction begins again, like after any conflict.

*Deadlocks.* Rows are locked in primary-key order, and written in it. The rows of a large total are locked afterwards; a
deadlock there is retried (see `lock_order`).
"""

from __future__ import annotations

from core.tallies.entries import EntriesCall
from core.tallies.limits import LARGE
from core.tallies.model import BY_RANGES, LONGEST, Applied, Entry, Source, Value
from core.tallies.ranges import LONGEST_POSITION, Counted, Range, RangesCall
from core.tallies.writes import Additions, Apply, ApplyRanges, write

__all__ = [
    "BY_RANGES",
    "LARGE",
    "LONGEST",
    "LONGEST_POSITION",
    "Additions",
    "Applied",
    "Apply",
    "ApplyRanges",
    "Counted",
    "EntriesCall",
    "Entry",
    "Range",
    "RangesCall",
    "Source",
    "Value",
    "write",
]
