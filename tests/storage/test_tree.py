"""The sums of a batch and its descendants, on each database."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.acks.call import Call
from core.batches import tree
from core.batches.batch import Opening
from core.batches.lifecycle import State, Verb
from core.batches.tree import Progress
from core.bits import journal
from core.service import Service
from core.storage import tables
from lastbit.ids import MIN_GROUP_SIZE, ItemId, item_id
from tests.mutants import mutant
from tests.support import plans


def open_batch(service: Service, items: int, parent: ItemId | None = None, **facts: object) -> int:
    opening = Opening(items=items, group_size=MIN_GROUP_SIZE, parent=parent, **facts)  # type: ignore[arg-type]
    return service.batches.open(opening).batch.id


def item(batch: int, number: int) -> ItemId:
    return ItemId.parse(item_id(batch, number, MIN_GROUP_SIZE))


def resolve(service: Service, verb: Verb, batch: int, *numbers: int) -> None:
    resolve_all(service, verb, [(batch, number) for number in numbers])


def resolve_all(service: Service, verb: Verb, places: Sequence[tuple[int, int]]) -> None:
    service.acks.ack(Call.of(verb, [item(*place) for place in places])).result()


def test_a_batch_alone_is_its_own_sum(service: Service) -> None:
    batch = open_batch(service, 100)
    resolve(service, Verb.ACK, batch, 0, 70, 99)
    resolve(service, Verb.FAIL, batch, 1, 71)
    assert service.batches.progress(batch) == Progress(100, 3, 2, 0, 95, states(open=1), truncated=False)
    with pytest.raises(errors.BatchNotFound):
        service.batches.progress(batch + 1)


def states(**counts: int) -> dict[State, int]:
    return {state: counts.get(str(state), 0) for state in State if state is not State.DELETING}


@mutant("a-held-item-is-counted-twice", "core.batches.tree:progress", "len(nodes) - 1", "0")
@mutant(
    "an-acked-item-with-a-child-is-counted",
    "core.batches.tree:progress",
    "acked = sum(node.acked for node in nodes.values()) - held_items.acked",
    "acked = sum(node.acked for node in nodes.values())",
)
@mutant(
    "a-failed-item-with-a-child-is-counted",
    "core.batches.tree:progress",
    "failed = sum(node.failed for node in nodes.values()) - held_items.failed",
    "failed = sum(node.failed for node in nodes.values())",
)
def test_an_item_with_a_child_counts_as_the_items_of_the_child(service: Service) -> None:
    """Before and after the child's end; only the tree below a batch counts."""
    root = open_batch(service, 130)
    children = [open_batch(service, 10, item(root, number), sealed=True) for number in (0, 1, 129)]
    grandchild = open_batch(service, 5, item(children[0], 9))
    resolve(service, Verb.ACK, root, 2, 3)
    resolve(service, Verb.ACK, children[1], *range(10))
    resolve(service, Verb.FAIL, children[2], 0)
    resolve(service, Verb.ACK, children[2], *range(1, 10))
    batch = service.batches.get(root)
    assert (batch.acked, batch.failed) == (3, 1)
    # 127 of the root, 9 + 5, 10, 10; of which 2, 10 and 9 are acked, and 1 has failed.
    assert service.batches.progress(root) == Progress(
        161, 21, 1, 0, 139, states(open=2, sealed=1, complete=2), truncated=False
    )
    assert service.batches.progress(children[0]) == Progress(14, 0, 0, 0, 14, states(open=1, sealed=1), truncated=False)
    service.batches.cancel(grandchild)
    assert service.batches.progress(children[0]) == Progress(
        14, 0, 0, 0, 14, states(sealed=1, cancelled=1), truncated=False
    )


def test_a_cancelled_parent_counts_what_its_bits_say(service: Service) -> None:
    """A child that ends after its parent leaves its item pending; one that ended before has resolved it."""
    root = open_batch(service, 3)
    before, after = (open_batch(service, 2, item(root, number), sealed=True) for number in (0, 1))
    resolve(service, Verb.ACK, before, 0, 1)
    service.batches.cancel(root)
    resolve(service, Verb.ACK, after, 0, 1)
    assert service.batches.progress(root) == Progress(5, 4, 0, 0, 1, states(complete=2, cancelled=1), truncated=False)


@mutant("sums-without-the-journal", "core.batches.tree:_groups", "nodes[id].journal_next", "0")
def test_items_whose_bits_are_in_the_journal_are_found(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "WIDE", MIN_GROUP_SIZE)
    monkeypatch.setattr(journal, "SCATTERED", 4)
    root = open_batch(service, 640)
    child = open_batch(service, 1, item(root, 70), sealed=True)
    numbers = [*range(0, 640, 64), *range(1, 640, 64)]
    for part in (numbers[:10], numbers[10:]):
        resolve(service, Verb.ACK, root, *part)
    assert service.batches.get(root).journal_next
    resolve(service, Verb.ACK, child, 0)
    assert service.batches.get(root).acked == len(numbers) + 1
    assert service.batches.progress(root) == Progress(
        640, len(numbers) + 1, 0, 0, 639 - len(numbers), states(open=1, complete=1), truncated=False
    )


def test_the_sums_of_random_trees_are_those_of_their_leaves(service: Service) -> None:
    rng = random.Random(4)
    for _ in range(5):
        root = open_batch(service, 2000)
        leaves: Counter[str] = Counter()
        pending_items = [(root, number) for number in range(2000)]
        depth = {root: 1}
        for _ in range(12):
            batch, number = pending_items.pop(rng.randrange(len(pending_items)))
            if depth[batch] > 3:
                pending_items.append((batch, number))
                continue
            child = open_batch(service, 300, item(batch, number))
            depth[child] = depth[batch] + 1
            pending_items += [(child, number) for number in range(300)]
        rng.shuffle(pending_items)
        for start in range(0, 1200, 200):
            for verb in Verb:
                batch_items = [
                    pending_items[place] for place in range(start, start + 200) if place % 4 == (verb is Verb.FAIL)
                ]
                leaves[verb] += len(batch_items)
                resolve_all(service, verb, batch_items)
        progress = service.batches.progress(root)
        counts = len(pending_items), leaves[Verb.ACK], leaves[Verb.FAIL]
        assert (progress.items, progress.acked, progress.failed) == counts
        assert sum(progress.batches.values()) == len(depth)


@mutant("a-tree-without-an-end", "core.batches.tree:progress", "children[: MOST - 1]", "children")
def test_a_tree_that_is_too_large_is_truncated(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are those of the upper levels; an item whose child was not read counts like others."""
    root = open_batch(service, 4)
    child = open_batch(service, 3, item(root, 0))
    open_batch(service, 7, item(child, 0))
    monkeypatch.setattr(tree, "MOST", 3)
    assert service.batches.progress(root) == Progress(12, 0, 0, 0, 12, states(open=3), truncated=False)
    monkeypatch.setattr(tree, "MOST", 2)
    assert service.batches.progress(root) == Progress(6, 0, 0, 0, 6, states(open=2), truncated=True)


def test_ten_thousand_batches_are_summed_in_few_statements(service: Service) -> None:
    """In levels of 1, 99 and 9,900."""
    root = open_batch(service, 99)

    def copies(tx: Connection, parents: Sequence[int], children_count: int) -> None:
        row = dict(tx.execute(sa.select(tables.batches).where(tables.batches.c.id == root)).mappings().one())
        del row["id"]
        facts = row | {"items": 100, "parent_group_size": MIN_GROUP_SIZE}
        children = [
            facts | {"parent_batch": parent, "parent_number": number}
            for parent in parents
            for number in range(children_count)
        ]
        tx.execute(sa.insert(tables.batches), children)

    service.database.write(copies, [root], 99)
    with service.database.engine.connect() as tx:
        parents = list(tx.scalars(sa.select(tables.batches.c.id).where(tables.batches.c.parent_batch == root)))
    service.database.write(copies, parents, 100)
    with plans.executions(service.database) as executions:
        progress = service.batches.progress(root)
    assert (progress.items, progress.truncated) == (100 * 9900, False)
    assert 20 < len(executions) < 100
