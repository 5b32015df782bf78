"""Nested batches: a batch that stands for one item of another batch, at any depth.

A child that has ended *owes* its parent an ack or a failure of that item. A child that succeeded owes an ack. One that
completed with failures owes a failure, and later an ack if a redrive makes it succeed. One that expired or was
cancelled owes a failure. The transaction that ends the child writes the debt to its row (`parent_due`). The debt is
paid after that commit and before the response, as an ordinary ack in a separate transaction (`core.acks.parents`): in
the child's transaction, the payment would lock a group after a batch (see `lock_order`). A
crash in between leaves the debt in the row, and a sweep pays it. A second payment is a repeat, and changes nothing.

*An ack of the item while the child runs* would resolve it too early: the parent could complete before its child. Each
adapter sends such an ack when the handler that opened the child returns. So from the open until the debt is paid the
item is *held*: calls for it are rejected, but for the payment. `batches.children` counts the children that
were ever opened under a batch's items. Both the count and the child are written under the lock of the parent's row, and
a flush decides under it (`core.acks.flush`), which asks for children only if the count isn't 0. A debt that is paid but
still in the child's row holds nothing that it wouldn't change.

A payment may end the parent, which then owes its own parent. So payments continue, level by level.

*A late payment of an old debt.* A child completes with failures, and a redrive makes it succeed while another process
still pays the failure. An ack wins over a failure, in either order. And removing the paid failure from the child's row
doesn't remove a debt that has become an ack, so the ack stays due until it is paid.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.batches.lifecycle import LIVE, State, Verb, judge
from core.bits import items
from core.storage import dialects, faults, statements, tables
from core.storage.statements import LIST, Pipeline, chunks
from lastbit.ids import ItemId

PAGE: Final = 500
"""The maximum number of debts in one payment. Each debt locks a group."""
_CONDITIONS: Final = 50
"""The maximum number of lists and ranges in one look for children."""
_PLACE: Final = "body.parent"

_batches = tables.batches.c
_groups = tables.item_groups.c


class Due(NamedTuple):
    """A debt: `child`, which has ended in `state`, owes `verb` to an item of its parent."""

    child: int
    state: str
    item: ItemId
    verb: Verb


def lock_parent(tx: Connection, item: ItemId) -> Any:
    """Lock the group of the item and the row of its batch; None if there is no such batch. Until this transaction
    commits, the batch doesn't end, no ack of the item is committed, and no other transaction opens a child of the
    batch. A transaction of a caller acks without the lock of the batch's row (see `core.enlisted`), so the group's is
    needed as well; a group that had no row may have got one for such a transaction since."""
    group = sa.select(_groups.group_no).where(_groups.batch_id == item.batch, _groups.group_no == item.group)
    has_group = tx.execute(group.with_for_update()).first() is not None
    query = sa.select(
        _batches.state, _batches.group_size, _batches["items"], _batches.journal_next, _batches.no_journal
    )
    row = tx.execute(query.where(_batches.id == item.batch).with_for_update()).first()
    if row is None or row.state == State.DELETING:
        return None
    if row.no_journal and not has_group and tx.execute(group).first() is not None:
        raise faults.BeginAgain
    return row


def adopt(tx: Connection, item: ItemId, parent: Any) -> dict[str, Any]:
    """The columns of a child that stands for `item`. `parent` is the result of `lock_parent`. This reads the item's
    bits under that lock: otherwise an ack could be committed between the read and the lock.

    Raises `errors.InvalidRequest` (unknown, resolved, or another batch's item), `errors.BatchEnded`.
    """
    if parent is None:
        raise errors.InvalidRequest(_PLACE, f"there is no batch {item.batch}")
    judge("nesting", item.batch, State(parent.state))
    number = item.group * parent.group_size + item.index
    if item.index >= parent.group_size or number >= parent.items:
        raise errors.InvalidRequest(
            _PLACE, f"item {item} was never issued: batch {item.batch} has {parent.items} items"
        )
    pipeline = Pipeline(tx)
    if items.resolved(pipeline, items.ask(pipeline, [item]), {item.batch: parent}, [item]):
        raise errors.InvalidRequest(_PLACE, f"item {item} is already resolved")
    child = tx.scalar(
        sa.select(_batches.id).where(_batches.parent_batch == item.batch, _batches.parent_number == number)
    )
    if child is not None:
        raise errors.InvalidRequest(_PLACE, f"batch {child} already stands for item {item}; an item has one child")
    return {"parent_batch": item.batch, "parent_number": number, "parent_group_size": parent.group_size}


def counted(parent_batch: int) -> str:
    """The statement that counts a new child of a batch whose row is locked. It isn't a change that ends the idleness of
    the parent."""
    return f"UPDATE batches SET children = children + 1 WHERE id = {parent_batch}"  # noqa: S608


def holders(
    tx: Connection, numbers: Mapping[int, Iterable[int]], ranges: Iterable[tuple[int, int, int]]
) -> list[Sequence[Any]]:
    """(batch, number, holder) of the items that a child holds, among those with these numbers, by batch, and those in
    these ranges (batch, first, end). The holder is the state of a live child, or the debt of one that has ended."""
    holder = "COALESCE(parent_due, state)"
    held = ",".join(f"'{value}'" for value in (*sorted(LIVE), *Verb))
    conditions = [
        f"(parent_batch = {batch} AND parent_number IN ({','.join(map(str, part))}))"
        for batch, items in numbers.items()
        for part in chunks(sorted(items), LIST)
    ]
    conditions += [
        f"(parent_batch = {batch} AND parent_number >= {first} AND parent_number < {end})"
        for batch, first, end in sorted(ranges)
    ]
    table = dialects.of(tx).name(tx, "batches")
    texts = [
        f"SELECT parent_batch, parent_number, {holder} FROM {table} "  # noqa: S608
        f"WHERE ({' OR '.join(part)}) AND {holder} IN ({held})"
        for part in chunks(conditions, _CONDITIONS)
    ]
    return [row for rows in statements.run(tx, *texts) for row in rows]


def has_live_children(tx: Connection, batch: int) -> bool:
    """Whether a child of the batch is live, or has ended and still has a debt."""
    query = sa.select(_batches.id).where(
        _batches.parent_batch == batch, sa.or_(_batches.state.in_(LIVE), _batches.parent_due.is_not(None))
    )
    return tx.execute(query.limit(1)).first() is not None


def debts(
    tx: Connection, children: Sequence[int] | None = None, after: int = 0, excluded_parents: Collection[int] = ()
) -> list[Due]:
    """At most a page of debts of children above `after`, ascending by child. With `children`, only their debts. Without
    debts to `excluded_parents`."""
    # Debts are few, and must not be looked for along all ids. For "is not NULL" SQLite would not use their index.
    child = tables.without_index(_batches.id)
    query = (
        sa.select(
            _batches.id,
            _batches.state,
            _batches.parent_batch,
            _batches.parent_number,
            _batches.parent_group_size,
            _batches.parent_due,
        )
        .where(_batches.parent_due > "", child > after)
        .order_by(child)
        .limit(PAGE)
    )
    if children is not None:
        query = query.where(_batches.id.in_(children))
    if excluded_parents:
        query = query.where(_batches.parent_batch.not_in(excluded_parents))
    return [
        Due(
            row.id,
            row.state,
            ItemId(row.parent_batch, *divmod(row.parent_number, row.parent_group_size)),
            Verb(row.parent_due),
        )
        for row in tx.execute(query)
    ]


def strike_out(tx: Connection, debts: Sequence[Due], *, skip_locked: bool = False) -> None:
    """Remove paid debts from the children's rows. With `skip_locked`, rows that are locked now are skipped. A sweep
    then pays their debts a second time, which changes nothing."""
    query = sa.select(_batches.id).where(_batches.id.in_({due.child for due in debts})).order_by(_batches.id)
    locked = set(tx.scalars(query.with_for_update(skip_locked=skip_locked)))
    for verb in Verb:
        children = sorted(locked.intersection(due.child for due in debts if due.verb is verb))
        if children:
            tx.execute(
                sa.update(tables.batches)
                .where(_batches.id.in_(children), _batches.parent_due == verb)
                .values(parent_due=None)
            )
