"""Bitfields kept in memory between transactions: never a wrong one, whichever process changed the row in between."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import pytest
import sqlalchemy as sa

from core.acks.call import AckResult, Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.bits.bitfield import Group
from core.bits.cache import BitfieldCache
from core.bits.journal import JournalState
from core.commits.combiner import Inline
from core.service import Service
from core.storage import schema, tables
from core.storage.database import Database
from tests.conftest import Server
from tests.mutants import mutant
from tests.support import plans
from tests.support.proxies import proxied

SIZE = 128


def ack(service: Service, batch: int, *numbers: int, verb: Verb = Verb.ACK) -> AckResult:
    return service.acks.ack(Call.of(verb, [(batch, *divmod(number, SIZE)) for number in numbers])).result()


@mutant(
    "entries-of-other-processes-are-not-applied",
    "core.bits.journal:JournalState.take_in",
    "bits.ack_one(index)",
    "pass",
)
@mutant(
    "entries-that-are-missing-are-overlooked", "core.bits.journal:catch_up", "len(entries) == next - state.next", "True"
)
@mutant(
    "groups-written-by-others-are-not-read-again",
    "core.bits.journal:JournalState.take_in",
    "self.groups.pop(group, None)",
    "pass",
)
@mutant(
    "a-cached-bitfield-is-used-without-the-rows-counts",
    "core.bits.cache:BitfieldCache.take",
    "group is None or group.version != version",
    "group is None",
)
@mutant("another-byte-is-patched", "core.bits.bitfield:Group.ack_one", "index >> 3", "0")
@pytest.mark.usefixtures("some_journaled")
def test_processes_that_alternate_on_a_group_see_each_others_bits(database: Database) -> None:
    """Each process caches the bits that it wrote. The counts of the locked row, or the journal's entries, show that
    another process has changed them since."""
    processes = [Service(database, combiner=Inline) for _ in range(3)]
    for _ in range(3):
        batch = processes[0].batches.open(Opening(group_size=SIZE, items=4 * SIZE, sealed=True)).batch.id
        dice = random.Random(7)
        acked: set[int] = set()
        failed: set[int] = set()
        while len(acked) < 4 * SIZE:
            service = dice.choice(processes)
            numbers = set(dice.sample(range(4 * SIZE), dice.choice((1, 2, 40))))
            verb = dice.choice((Verb.ACK, Verb.ACK, Verb.FAIL))
            answer = ack(service, batch, *numbers, verb=verb)
            news = numbers - acked if verb is Verb.ACK else numbers - acked - failed
            assert (answer.applied, answer.repeated) == (len(news), len(numbers - news))
            if verb is Verb.ACK:
                acked, failed = acked | numbers, failed - numbers
            else:
                failed |= news
        assert processes[0].batches.verify(batch).ok
        assert processes[0].batches.get(batch).succeeded


@pytest.mark.usefixtures("some_journaled")
def test_bits_of_a_rolled_back_transaction_are_not_cached(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction fails after it changed bits in memory; the next one starts with the row's bits."""
    service = Service(database, combiner=Inline)
    for _ in range(3):
        batch = service.batches.open(Opening(group_size=SIZE, items=SIZE)).batch.id
        ack(service, batch, 3, 5)
        with monkeypatch.context() as patches:
            patches.setattr("core.acks.completion.write", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ack(service, batch, 7)
        answer = ack(service, batch, 7, 3)
        assert (answer.applied, answer.repeated) == (1, 1)
        assert service.batches.verify(batch).ok


OTHER = b"\x00" * 15 + b"\x80"
"""The bits of a group in which only item 127 is acked."""


def other_bits(url: str) -> None:
    """Change the group's row as another history of the database could: same counts, other bits. On a connection of its
    own."""
    with Database(url) as database, database.engine.begin() as tx:
        tx.execute(sa.update(tables.item_groups).values(resolved=OTHER))


def one_acked(service: Service) -> int:
    """Create a batch in which only item 9 is acked, and whose group is in the cache."""
    batch = service.batches.open(Opening(group_size=SIZE, items=SIZE)).batch.id
    assert ack(service, batch, 9).applied == 1
    return batch


def assert_forgotten(service: Service, batch: int) -> None:
    assert ack(service, batch, 9).applied == 1
    assert ack(service, batch, 127).repeated == 1


def url_of(database: Database) -> str:
    return database.url.render_as_string(hide_password=False)


def crowd(database: Database, size: int = 30) -> None:
    """Use `size` connections at the same moment."""
    with contextlib.ExitStack() as stack:
        for _ in range(size):
            stack.enter_context(database.engine.connect()).exec_driver_sql("SELECT 1")


@mutant("each-new-connection-drops-the-cache", "core.storage.continuity:watch", "origin != last", "True")
@mutant(
    "connections-of-a-crowd-are-thrown-away",
    "core.storage.engines:pool",
    '{"pool_size": connections, "max_overflow": 0, "pool_timeout": 10, "pool_use_lifo": True}',
    '{"pool_size": 10, "max_overflow": connections - 10, "pool_timeout": 10, "pool_use_lifo": True}',
)
def test_many_concurrent_readers_drop_no_cached_bitfield_and_reuse_their_connections(database: Database) -> None:
    """More connections are opened as needed, and stay open. None of them makes the process drop its cache."""
    service = Service(database, combiner=Inline)
    batch = one_acked(service)
    connections: list[object] = []
    sa.event.listen(database.engine, "connect", lambda *_: connections.append(None))
    with plans.executions(database) as executions:
        for item in (10, 11, 12):
            crowd(database)
            assert ack(service, batch, 9, item).applied == 1
    assert len(connections) == 29
    assert not any("resolved, failed FROM item_groups" in text for text, _ in executions), "its blob was read again"
    assert service.batches.verify(batch).ok


@mutant("held-bitfields-outlive-the-database", "core.bits.cache:BitfieldCache.clear", "self._groups.clear()", "pass")
@mutant(
    "a-broken-connection-keeps-the-cache",
    "core.storage.continuity:watch",
    "not isinstance(error, sa.exc.DisconnectionError)",
    "False",
)
@pytest.mark.mariadb
def test_the_cache_is_dropped_when_a_connection_breaks(server: Server, server_database: Database) -> None:
    """A lost connection is expected after any change to the database; here a table was restored while the server kept
    running."""
    service = Service(server_database, combiner=Inline)
    batch = one_acked(service)
    other_bits(url_of(server_database))
    assert server.end_sessions(url_of(server_database))
    assert_forgotten(service, batch)


@mutant(
    "a-restart-keeps-the-cache",
    "core.storage.dialects.mariadb:MariaDB.origin",
    "*(variables.get(name) for name in _IDENTITY), now - uptime",
    "*(variables.get(name) for name in _IDENTITY),",
    only="mariadb",
)
@pytest.mark.mariadb
def test_the_cache_is_dropped_when_the_server_restarts(mortal_server: Server) -> None:
    """Also if no broken connection is noticed, because all were too old and are replaced."""
    with Database(mortal_server.new_database()) as database:
        schema.migrate(database)
        service = Service(database, combiner=Inline)
        batch = one_acked(service)
        database.dispose()
        crowd(database)
        second = before = int(time.time())
        while second == before:  # a restart takes less than a second here
            mortal_server.stop()
            second = int(time.time())
            mortal_server.start()
        other_bits(url_of(database))
        database.dispose()
        assert_forgotten(service, batch)


@mutant("no-new-connection-drops-the-cache", "core.storage.continuity:watch", "origin != last", "False")
@pytest.mark.mariadb
def test_the_cache_is_dropped_when_a_proxy_leads_to_another_server(
    server: Server, mortal_server: Server, server_url: str
) -> None:
    """The other server has the same batch, and was behind when it took over."""
    with Database(server_url) as database:
        schema.migrate(database)
    other = mortal_server.new_database(server_url.rpartition("/")[2])
    with Database(other) as database:
        schema.migrate(database)
        assert one_acked(Service(database, combiner=Inline)) == 1
    other_bits(other)
    with (
        proxied(server.port) as proxy,
        Database(server_url.replace(f":{server.port}/", f":{proxy.port}/")) as database,
    ):
        service = Service(database, combiner=Inline)
        batch = one_acked(service)
        proxy.target = mortal_server.port
        with database.engine.connect():  # the old connection
            assert_forgotten(service, batch)


@mutant("whose-a-batch-is-stays-in-the-cache", "core.service.batch_facts:BatchFacts._clear", "self._facts = {}", "pass")
@mutant(
    "whose-a-batch-was-is-put-into-the-cache",
    "core.service.batch_facts:BatchFacts.get",
    "cache |= rows",
    "self._facts |= rows",
)
@pytest.mark.mariadb
@pytest.mark.parametrize("during_a_read", [False, True])
def test_whose_a_batch_is_is_read_again_when_a_connection_breaks(
    server: Server, server_database: Database, monkeypatch: pytest.MonkeyPatch, during_a_read: bool
) -> None:
    """An older state of the database may issue its id again, to another tenant. Also if it was just being read."""
    service = Service(server_database, combiner=Inline)
    url = url_of(server_database)
    batch = service.batches.open(Opening(key="mine/1", items=1)).batch.id

    def withheld(prefix: str) -> bool:
        call = Call.of(Verb.ACK, [(batch, 0, 0)])
        service.acks.check(call, [], prefix=prefix)
        return call.withheld == {batch}

    def lose_the_connection() -> None:
        with Database(url) as database, database.engine.begin() as tx:
            tx.execute(sa.update(tables.batches).values(batch_key="theirs/1"))
        assert server.end_sessions(url)
        service.check_ready()

    if during_a_read:
        read = server_database.read

        def interrupted(*args: Any) -> Any:
            facts = read(*args)
            monkeypatch.undo()
            lose_the_connection()
            return facts

        monkeypatch.setattr(server_database, "read", interrupted)
    assert not withheld("mine/")
    if not during_a_read:
        lose_the_connection()
    assert withheld("mine/")
    assert not withheld("theirs/")


@mutant(
    "a-patch-reaches-beyond-its-blob",
    "core.bits.bitfield:Group.patches",
    "self.stored != -(-issued // 8)",
    "self.stored is None",
)
def test_a_group_that_grew_keeps_bits_beyond_its_stored_blob(database: Database) -> None:
    """Its blob is as wide as the issued part was; a bit beyond its end can't be patched into it."""
    service = Service(database, combiner=Inline)
    batch = service.batches.open(Opening(group_size=SIZE, items=20)).batch.id
    ack(service, batch, 3)
    ack(service, batch, 5)
    service.batches.extend(batch, SIZE)
    assert ack(service, batch, 99).applied == 1
    assert ack(Service(database, combiner=Inline), batch, 99, 5, 3).repeated == 3
    assert service.batches.verify(batch).ok


def test_the_number_of_cached_groups_is_bounded() -> None:
    """The oldest go first, and a group taken before the cache was cleared is not put back."""
    cache = BitfieldCache(capacity=2)
    cache.put({(1, n): Group(Group.empty(SIZE).resolved, None, n, 0) for n in range(3)}, cache.era)
    assert cache.take((1, 0), (0, 0, 0)) is None
    assert cache.take((1, 1), (7, 0, 0)) is None, "its counts differ"
    groups = cache.take((1, 2), (2, 0, 0))
    assert groups is not None
    assert cache.take((1, 2), (2, 0, 0)) is None, "it was taken already"
    before = cache.era
    cache.clear()
    cache.put({(1, 2): groups}, before)
    assert cache.take((1, 2), (2, 0, 0)) is None


class Counted(dict[int, Group]):
    """A dictionary that counts how often its length is read."""

    asked = 0

    def __len__(self) -> int:
        Counted.asked += 1
        return super().__len__()


@mutant(
    "the-number-of-held-groups-only-grows",
    "core.bits.cache:BitfieldCache._drop",
    "self._state_groups -= len(state.groups)",
    "pass",
)
def test_a_commit_costs_the_same_however_many_batches_are_cached() -> None:
    """A commit puts one journaled batch back. It reads that batch and the ones it displaces, not thousands."""

    def journal_state(next: int, groups: int) -> JournalState:
        return JournalState(next, Counted({number: Group.empty(SIZE) for number in range(groups)}))

    cache = BitfieldCache(capacity=15_000)
    for batch in range(5000):
        cache.put({}, cache.era, {batch: journal_state(1, 3)})
    Counted.asked = 0
    taken_groups = cache.take_state(7)
    assert taken_groups is not None
    taken_groups.groups[3] = Group.empty(SIZE)
    cache.put({}, cache.era, {7: taken_groups})
    assert Counted.asked < 10
    assert cache.take_state(0) is None, "the batch that was put back first made room"
    assert cache.is_journaled(0)
    for batch in range(1, 5000):
        taken_groups = cache.take_state(batch)
        assert taken_groups is not None
        assert len(taken_groups.groups) == (4 if batch == 7 else 3)
    cache.put({}, cache.era, {1: journal_state(1, 15_000), 2: journal_state(2, 1)})
    assert cache.take_state(1) is None
    assert cache.take_state(2) is not None
    cache.put({}, cache.era, {3: journal_state(5, 1)})
    cache.put({}, cache.era, {3: journal_state(4, 1)})
    latest = cache.take_state(3)
    assert latest is not None
    assert latest.next == 5, "a state from an older transaction must not replace a newer one"
