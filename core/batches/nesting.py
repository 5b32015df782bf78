"""Nested batches: a batch that is one item of another one, at any depth.

A child's end *owes* its parent something: succeeded acks the parent's item, completed with failures fails it (and a
later redrive to succeeded acks it), expired or cancelled fails it. The debt, `parent_due`, is written in the child's
own transaction, by whoever ends it. It is paid after that commit, before the call is answered, as an ordinary ack in a
transaction of its own (`parents`): within the child's one it would lock a group after a batch (lock order: item_groups
→ batches). A crash in between leaves the debt in the row, and a sweep pays it. Paying twice is a repeat, and changes
nothing.

Paying may end the parent, which is then in debt to its own parent; so payment goes on, level by level.

*A late payment of an old debt.* A child completes with failures, and is redriven to succeeded while somebody still pays
the failure. An ack wins over a failure, in whichever order they come; and a debt is struck out only as the one that was
paid, so the ack stays due until it is paid itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, tables
from core.batches.lifecycle import LIVE, State, Verb, judge
from core.bits import bitfield, journal
from lastbit.ids import ItemId

PAGE: Final = 500
"""Debts that are paid at a time: each is a group to lock."""
_PLACE: Final = "body.parent"

_batches = tables.batches.c
_groups = tables.item_groups.c


class Due(NamedTuple):
    """What the end of `child` owes to an item of its parent; `verb` is that of the ack."""

    child: int
    state: str
    item: ItemId
    verb: Verb


def owed(state: State, failed: int) -> Verb:
    """What a batch that ended so owes its parent."""
    return Verb.ACK if state is State.COMPLETE and failed == 0 else Verb.FAIL


def lock_parent(tx: Connection, item: ItemId) -> Any:
    """The row of the item's batch, locked; None where it is unknown. Until the commit the batch doesn't end, no ack of
    its items is committed, and nobody else opens a child of it."""
    query = sa.select(_batches.state, _batches.group_size, _batches["items"], _batches.journal_next)
    row = tx.execute(query.where(_batches.id == item.batch).with_for_update()).first()
    return None if row is None or row.state == State.DELETING else row


def adopt(tx: Connection, item: ItemId, parent: Any) -> dict[str, Any]:
    """The columns of a child that is `item` of its parent; `parent` is what `lock_parent` returned. The bits are read
    under that lock; read before, an ack could be committed in between.

    Raises `errors.InvalidRequest` (unknown, resolved, or somebody else's), `errors.BatchEnded`.
    """
    if parent is None:
        raise errors.InvalidRequest(_PLACE, f"there is no batch {item.batch}")
    judge("nesting", item.batch, State(parent.state))
    number = item.group * parent.group_size + item.index
    if item.index >= parent.group_size or number >= parent.items:
        raise errors.InvalidRequest(
            _PLACE, f"item {item} was never issued: batch {item.batch} has {parent.items} items"
        )
    recent = journal.recent(tx, item.batch, parent.group_size).get(item.group, ()) if parent.journal_next else ()
    resolved = item.index in recent
    bits = tx.execute(
        sa.select(_groups.resolved, _groups.resolved_count).where(
            _groups.batch_id == item.batch, _groups.group_no == item.group
        )
    ).first()
    if bits is not None:
        group = bitfield.Group.load(bits.resolved, None, bits.resolved_count, 0, parent.group_size)
        resolved |= bool(group.resolved[item.index])
    if resolved:
        raise errors.InvalidRequest(_PLACE, f"item {item} is resolved already")
    taken = tx.scalar(
        sa.select(_batches.id).where(_batches.parent_batch == item.batch, _batches.parent_number == number)
    )
    if taken is not None:
        raise errors.InvalidRequest(_PLACE, f"item {item} is batch {taken} already; an item has one child")
    return {"parent_batch": item.batch, "parent_number": number, "parent_group_size": parent.group_size}


def has_live_children(tx: Connection, batch: int) -> bool:
    """Whether a child of the batch is live, or has ended and not paid yet."""
    query = sa.select(_batches.id).where(
        _batches.parent_batch == batch, sa.or_(_batches.state.in_(LIVE), _batches.parent_due.is_not(None))
    )
    return tx.execute(query.limit(1)).first() is not None


def debts(
    tx: Connection, children: Sequence[int] | None = None, after: int = 0, without: Collection[int] = ()
) -> list[Due]:
    """What is due, ascending by child: of these children, or of any above `after`, at most a page; nothing that is due
    to the parents `without`."""
    query = (
        sa.select(
            *(_batches.id, _batches.state, _batches.parent_batch, _batches.parent_number, _batches.parent_group_size),
            _batches.parent_due,
        )
        .where(_batches.parent_due.is_not(None), _batches.id > after)
        .order_by(_batches.id)
        .limit(PAGE)
    )
    if children is not None:
        query = query.where(_batches.id.in_(children))
    if without:
        query = query.where(_batches.parent_batch.not_in(without))
    return [
        Due(
            row.id,
            row.state,
            ItemId(row.parent_batch, *divmod(row.parent_number, row.parent_group_size)),
            Verb(row.parent_due),
        )
        for row in tx.execute(query)
    ]


def strike_out(tx: Connection, paid: Sequence[Due], *, skip_locked: bool = False) -> None:
    """Strike out debts that were paid; with `skip_locked`, but for those of children whose rows are locked at the
    moment. What is left is paid again by a sweep, which changes nothing."""
    for verb in Verb:
        children = sorted(due.child for due in paid if due.verb is verb)
        if children:
            # In the order of their ids, as batch rows are locked everywhere.
            wanted = sa.select(_batches.id).where(_batches.id.in_(children)).order_by(_batches.id)
            children = list(tx.scalars(wanted.with_for_update(skip_locked=skip_locked)))
        if children:
            tx.execute(
                sa.update(tables.batches)
                .where(_batches.id.in_(children), _batches.parent_due == verb)
                .values(parent_due=None)
            )
