"""Bitfields that stay in memory between transactions: never a wrong one, whoever else was at the row."""

from __future__ import annotations

import random

import pytest
import sqlalchemy as sa

from core import tables
from core.batches import Opening
from core.bitfield import Group
from core.calls import Answer, Call, Verb
from core.combiner import Inline
from core.db import Database
from core.held import Held
from core.journal import Known
from core.service import Service

SIZE = 128


def ack(service: Service, batch: int, *numbers: int, verb: Verb = Verb.ACK) -> Answer:
    return service.ack(Call.of(verb, [(batch, *divmod(number, SIZE)) for number in numbers])).result()


@pytest.mark.usefixtures("some_journaled")
def test_processes_that_take_turns_at_a_group_see_each_others_bits(database: Database) -> None:
    """Each holds what it left itself; the counts of the locked row say that another one was there since, or the entries
    of the journal."""
    processes = [Service(database, combiner=Inline) for _ in range(3)]
    for _ in range(3):
        batch = processes[0].open(Opening(group_size=SIZE, items=4 * SIZE, sealed=True)).batch.id
        dice = random.Random(7)
        acked: set[int] = set()
        failed: set[int] = set()
        while len(acked) < 4 * SIZE:
            service = dice.choice(processes)
            numbers = set(dice.sample(range(4 * SIZE), dice.choice((1, 2, 40))))
            verb = dice.choice((Verb.ACK, Verb.ACK, Verb.FAIL))
            answer = ack(service, batch, *numbers, verb=verb)
            changed = numbers - acked if verb is Verb.ACK else numbers - acked - failed
            assert (answer.applied, answer.repeated) == (len(changed), len(numbers - changed))
            if verb is Verb.ACK:
                acked, failed = acked | numbers, failed - numbers
            else:
                failed |= changed
        assert processes[0].verify(batch).ok
        assert processes[0].get(batch).succeeded


@pytest.mark.usefixtures("some_journaled")
def test_nothing_is_held_that_was_rolled_back(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction fails after its bits were flipped in memory: the next one begins with those of the row."""
    service = Service(database, combiner=Inline)
    for _ in range(3):
        batch = service.open(Opening(group_size=SIZE, items=SIZE)).batch.id
        ack(service, batch, 3, 5)
        with monkeypatch.context() as broken:
            broken.setattr("core.completion.write", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ack(service, batch, 7)
        answer = ack(service, batch, 7, 3)
        assert (answer.applied, answer.repeated) == (1, 1)
        assert service.verify(batch).ok


def test_what_was_held_is_forgotten_when_the_database_was_away(database: Database) -> None:
    """It may come back as it was before, and live on differently: then equal counts name other bits."""
    service = Service(database, combiner=Inline)
    batch = service.open(Opening(group_size=SIZE, items=SIZE)).batch.id
    ack(service, batch, 9)
    database.dispose()
    with database.engine.begin() as restored:
        restored.execute(sa.update(tables.item_groups).values(resolved=b"\x00" * 15 + b"\x80"))
    assert ack(service, batch, 9).applied == 1
    assert ack(service, batch, 127).repeated == 1


def test_a_group_that_grew_keeps_bits_beyond_its_stored_blob(database: Database) -> None:
    """Its blob is as wide as its issued part was; a bit behind its end can't be patched into it."""
    service = Service(database, combiner=Inline)
    batch = service.open(Opening(group_size=SIZE, items=20)).batch.id
    ack(service, batch, 3)
    ack(service, batch, 5)
    service.extend(batch, SIZE)
    assert ack(service, batch, 99).applied == 1
    assert ack(Service(database, combiner=Inline), batch, 99, 5, 3).repeated == 3
    assert service.verify(batch).ok


def test_only_so_many_are_held() -> None:
    """The oldest go first; nothing is put back that was taken before everything was forgotten."""
    held = Held(most=2)
    held.put({(1, n): Group(Group.empty(SIZE).resolved, None, n, 0) for n in range(3)}, held.era)
    assert held.take((1, 0), 0, 0) is None
    assert held.take((1, 1), 7, 0) is None, "its counts are others"
    taken = held.take((1, 2), 2, 0)
    assert taken is not None
    assert held.take((1, 2), 2, 0) is None, "it was taken"
    before = held.era
    held.clear()
    held.put({(1, 2): taken}, before)
    assert held.take((1, 2), 2, 0) is None


class Counted(dict[int, Group]):
    """Counts how often its length is asked for."""

    asked = 0

    def __len__(self) -> int:
        Counted.asked += 1
        return super().__len__()


def test_a_commit_costs_the_same_however_many_batches_are_held() -> None:
    """A commit puts one journaled batch back. It looks at that one and at those that it displaces, not at thousands."""

    def known(next: int, groups: int) -> Known:
        return Known(next, Counted({number: Group.empty(SIZE) for number in range(groups)}))

    held = Held(most=15_000)
    for batch in range(5000):
        held.put({}, held.era, {batch: known(1, 3)})
    Counted.asked = 0
    taken = held.take_known(7)
    assert taken is not None
    taken.groups[3] = Group.empty(SIZE)
    held.put({}, held.era, {7: taken})
    assert Counted.asked < 10
    assert held.take_known(0) is None, "the batch that was put back first made room"
    assert held.journaled(0)
    for batch in range(1, 5000):
        taken = held.take_known(batch)
        assert taken is not None
        assert len(taken.groups) == (4 if batch == 7 else 3)
    held.put({}, held.era, {1: known(1, 15_000), 2: known(2, 1)})
    assert held.take_known(1) is None
    assert held.take_known(2) is not None
    held.put({}, held.era, {3: known(5, 1)})
    held.put({}, held.era, {3: known(4, 1)})
    latest = held.take_known(3)
    assert latest is not None
    assert latest.next == 5, "an older transaction puts its batch back later"
