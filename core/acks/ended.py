"""Calls for batches that are cancelled or expired.

Such a batch takes no more acks, so its pending items are rejected, with its state as the reason. An item that was
resolved before the batch ended is a repeat, as it was a moment earlier: a consumer that gets the item once more, or a
client that repeats a call whose answer was lost, learns that it was applied. So does the call whose failures cancelled
the batch, and each call that was merged with it.

The bits are read after the batch's state, without a lock. They don't change any more: whatever flips a bit locks the
batch's row, and finds the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitarray import bitarray
from sqlalchemy.engine import Connection

from core.acks.apply import Seen
from core.acks.call import Outcome, Rejected, Unit
from core.batches.lifecycle import Verb
from core.bits import bitfield, journal
from core.bits.bitfield import Group
from lastbit.ids import ItemId


def judge(tx: Connection, batch: int, look: Seen, units: Sequence[Unit]) -> dict[Unit, Outcome]:
    """The outcomes of units of one batch, which has ended: each item is a repeat or is rejected."""
    numbers = {number for unit in units for number in unit.groups()}
    unread = None if look.journal_next else ()
    recent = journal.catch_up(tx, batch, look.group_size, None, look.journal_next, unread)
    journal.fetch(tx, batch, look.group_size, recent, numbers)
    return {unit: outcome(unit, look, recent.groups) for unit in units}


def outcome(unit: Unit, look: Seen, groups: Mapping[int, Group]) -> Outcome:
    """The outcome of a unit of a batch that has ended, whose groups are given."""
    outcome = Outcome()
    reason, group_size = str(look.state), look.group_size
    settled = {number: _settled(groups[number], unit.verb) for number in unit.groups()}
    for number, index in unit.ids():
        if index < group_size and settled[number][index]:
            outcome.repeated += 1
        else:
            outcome.rejected.append(Rejected(reason, item=ItemId(unit.batch, number, index)))
    for number, mask in unit.masks.items():
        repeated = (bitfield.widen(mask.tobytes(), group_size)[:group_size] & settled[number]).count()
        outcome.repeated += repeated
        if excess := mask.count() - repeated:
            outcome.rejected.append(Rejected(reason, group=(unit.batch, number), count=excess))
    return outcome


def _settled(group: Group, verb: Verb) -> bitarray:
    """The items of the group that a call with this verb would not have changed."""
    if verb is Verb.ACK:
        return group.acked()
    if verb is Verb.FAIL or group.failed is None:
        return group.resolved
    return group.resolved & ~group.failed
