"""Tallies: each key's total is the model's, whatever is replayed, lost or regrouped, and whatever dies on the way."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors, tallies
from core.commits.combiner import Inline
from core.service import Service
from core.storage import schema, tables
from core.storage.database import Database
from core.storage.statements import Pipeline
from lastbit import Client, Retry, ServiceUnreachable, SourceChain
from lastbit.ids import INTEGER_LIMIT
from tests.guarantees.models.service import tally_entry
from tests.guarantees.models.streams import World
from tests.guarantees.programs.dying import Mortals, mortals
from tests.mutants import mutant
from tests.sdk.conftest import scripted_service  # noqa: F401  # a fixture
from tests.support.waits import waits_for_a_lock

SOAK = os.environ.get("LASTBIT_SOAK") == "1"
WORLDS = 1_000 * (20 if SOAK else 1)
TOGETHER = 50
"""Worlds that share a tally and its calls."""
numbers = itertools.count()


@pytest.fixture(scope="module")
def dying() -> Iterator[Mortals]:
    with mortals() as server:
        yield server


def totals(service: Service, tally: str) -> dict[str, int]:
    values: dict[str, int] = {}
    after: str | None = None
    while page := service.tallies.page(tally, "", after, 1000):
        values |= {total.key: total.value for total in page}
        after = page[-1].key
    return values


def truth(worlds: Iterable[World]) -> dict[str, int]:
    return {key: total for world in worlds for key, total in world.truth().items()}


def apply(service: Service, tally: str, entries: Iterable[Mapping[str, Any]]) -> tallies.Applied:
    return service.tallies.apply(tally, [tally_entry(entry) for entry in entries])


def joined_calls(worlds: Iterable[World]) -> Iterator[list[Mapping[str, Any]]]:
    """The worlds' calls, joined: each round takes one call of each consumer."""
    running = [world.consumed() for world in worlds]
    while True:
        calls = [call for consumer in running if (call := next(consumer, None))]
        if not calls:
            return
        yield [entry for call in calls for entry in call]


@mutant("the-guards-message-counts-again", "core.tallies.entries:advance", "position > guard", "position >= guard")
# Without this, two siblings in one call would be refused, and the test would see nothing else.
# Without this, two siblings in one call would be refused, and the test would see nothing else.
@mutant(
    "siblings-of-a-flat-map-are-repeats",
    "core.tallies.entries:advance",
    "offset, child",
    "offset, 0",
    ("deltas[position] != delta", "False"),
)
@mutant(
    "one-guard-for-all-sources",
    "core.tallies.entries:by_counter",
    "(tally, key, topic, partition, generation)",
    '(tally, key, "", 0, 0)',
)
@mutant(
    "a-guard-starts-over-when-the-source-changes",
    "core.tallies.entries:advance",
    "guard = start",
    """
        first = entries[places[0]]
        last = globals().setdefault('last_source_of', {})
        if last.setdefault(first.key, first[2:5]) != first[2:5]:
            start = EMPTY[0]
        last[first.key] = first[2:5]
        guard = start
    """,
)
@mutant(
    "generations-are-one-source",
    "core.tallies.entries:by_counter",
    "(tally, key, topic, partition, generation)",
    "(tally, key, topic, partition, 0)",
)
@mutant(
    "a-buffer-adds-deltas-up",
    "lastbit.tallies.buffer:Gatherer.take",
    "if message.ack is not None:\n    acks.append(message.ack)",
    """
        sums = {}
        for each in entries:
            name = (each['key'], *map(each['source'].get, ('topic', 'partition', 'generation')))
            sums[name] = each | {'delta': each['delta'] + sums.get(name, {'delta': 0})['delta']}
        entries = list(sums.values())
        if message.ack is not None:
            acks.append(message.ack)
    """,
)
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_total_matches_the_model_despite_all_failures(service: Service) -> None:
    """Flat maps, crashes, replays, partial publishes, changed partition counts, recreated topics, lost answers,
    different chunks, consumers that overlap with their successors."""
    for first in range(0, WORLDS, TOGETHER):
        worlds = [World(seed) for seed in range(first, first + TOGETHER)]
        tally = f"worlds-{first}"
        for call in joined_calls(worlds):
            apply(service, tally, call)
        actual, expected_totals = totals(service, tally), truth(worlds)
        wrong = {
            key: (actual.get(key), expected_totals.get(key))
            for key in {*actual, *expected_totals}
            if actual.get(key) != expected_totals.get(key)
        }
        assert not wrong, f"worlds {first} to {first + TOGETHER - 1}: (found, true) {wrong}"


def test_the_worlds_include_every_kind_of_failure() -> None:
    """A generator without failures would prove nothing."""
    replays = siblings = new_generations = alternating = stages = 0
    for seed in range(200):
        world = World(seed)
        entries = [entry for call in world.consumed() for entry in call]
        sources = [(entry["key"], *map(entry["source"].get, ("topic", "partition", "generation"))) for entry in entries]
        places = [
            (*source, entry["source"]["offset"], entry["source"].get("child", 0))
            for source, entry in zip(sources, entries, strict=True)
        ]
        replays += len(places) - len(set(places))
        siblings += len(set(places)) - len({place[:-1] for place in places})
        new_generations += sum(entry["source"].get("generation", 0) > 0 for entry in entries)
        alternating += len({source[:1] for source in sources}) < len(set(sources))
        stages = max(stages, len(world._passes))
    assert stages == 3
    assert min(replays, siblings, new_generations, alternating) > 100, (replays, siblings, new_generations, alternating)


@mutant(
    "a-call-is-applied-in-parts",
    "core.tallies.rows:_insert",
    "pipeline.later(*inserts(table, columns, old, upsert), *inserts(table, columns, new))",
    "pipeline.later(*inserts(table, columns, old, upsert), 'COMMIT', *inserts(table, columns, new))",
)
@pytest.mark.timeout(600)
def test_a_call_that_dies_at_any_point_is_stored_completely_or_not_at_all(database: Database, dying: Mortals) -> None:
    """New and existing rows; then the call is sent again in different chunks, and each entry counts once."""
    service = Service(database, combiner=Inline)
    url = database.url.render_as_string(hide_password=False)
    for point in range(100):
        tally = f"dying-{next(numbers)}"
        before = _run(0, 3)
        apply(service, tally, before)
        first, rest = _run(2, 20), _run(20, 30)
        death = dying.run(url, {"verb": "tally", "tally": tally, "entries": first}, point)
        values = totals(service, tally)
        assert values in (_sums(before), _sums([*before, *first[3:]]))
        if death is not None and death.commits:
            assert values != _sums(before)
        dice = random.Random(point)
        entries = [*first, *rest]
        while entries:
            place = dice.randint(1, len(entries))
            apply(service, tally, entries[:place])
            entries = entries[place:]
        assert totals(service, tally) == _sums(_run(0, 30))
        if death is None:
            assert point > 3
            return
    pytest.fail("the call has no end")


@mutant(
    "a-new-sub-counter-overwrites-anothers",
    "core.tallies.rows:_insert",
    "inserts(table, columns, new)",
    "inserts(table, columns, new, upsert)",
)
@pytest.mark.mariadb
def test_two_calls_that_create_the_same_sub_counter_both_count(server_url: str) -> None:
    """Neither finds a row to lock. The second insert waits for the first one's commit, and its call starts again."""
    with Database(server_url) as slow, Database(server_url) as fast, ThreadPoolExecutor(1) as pool:
        schema.migrate(slow)
        inserting, may_go_on = threading.Event(), threading.Event()

        @sa.event.listens_for(slow.engine, "before_cursor_execute")
        def wait(_: object, __: object, statement: str, *___: object) -> None:
            if statement.startswith("INSERT INTO tallies") and not inserting.is_set():
                inserting.set()
                assert may_go_on.wait(30)

        first, second = _run(0, 1), _run(2, 3)  # both from partition 0, and both with key k2
        later_call = pool.submit(apply, Service(slow, combiner=Inline), "twice", second)
        assert inserting.wait(30)
        apply(Service(fast, combiner=Inline), "twice", first)
        may_go_on.set()
        assert later_call.result(30).applied == len(second)
        assert totals(Service(fast, combiner=Inline), "twice") == _sums([*first, *second])


def _run(start: int, end: int) -> list[dict[str, Any]]:
    """Messages `start` to `end` of a log; each adds to three of seven keys."""
    return [
        {
            "key": f"k{(offset + place) % 7}",
            "delta": offset + place,
            "source": {"topic": "t", "partition": offset % 2, "offset": offset},
        }
        for offset in range(start, end)
        for place in range(3)
    ]


def _sums(entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for entry in entries:
        sums[entry["key"]] = sums.get(entry["key"], 0) + entry["delta"]
    return sums


@mutant(
    "sub-counters-are-not-locked",
    "core.tallies.rows:_select",
    'dialect.look_up(tx, "tallies", _PRIMARY_KEY, rows) + dialect.lock_looked_up("tallies")',
    'dialect.look_up(tx, "tallies", _PRIMARY_KEY, rows)',
)
@pytest.mark.mariadb
@pytest.mark.timeout(7200)
def test_writers_of_the_same_messages_count_each_once_and_meet_no_deadlock(server_database: Database) -> None:
    """Three independent writers replay one log over many keys, each in its own chunks, with existing and new rows."""
    url = server_database.url.render_as_string(hide_password=False)
    trouble: list[BaseException] = []
    rounds = 12 * (20 if SOAK else 1)
    for round_ in range(rounds):
        log = _spread(round_)
        start = threading.Barrier(3)

        def write(writer: int, log: list[dict[str, Any]] = log, round_: int = round_, start: Any = start) -> None:
            dice = random.Random(f"{round_}-{writer}")
            try:
                with Database(url) as database:
                    service = Service(database, combiner=Inline)
                    remaining = list(log)
                    start.wait(60)
                    while remaining:
                        size = dice.choice((30, 100, 200))
                        apply(service, f"race-{round_}", remaining[:size])
                        if dice.random() < 0.9:  # otherwise its answer was lost
                            remaining = remaining[size:]
            except BaseException as error:  # noqa: BLE001  # raised again in the test's own thread
                trouble.append(error)

        writers = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
        for thread in writers:
            thread.start()
        for thread in writers:
            thread.join()
        assert not trouble, trouble
        assert totals(Service(server_database, combiner=Inline), f"race-{round_}") == _sums(log)


@mutant(
    "concurrent-sources-pass-the-limit",
    "core.tallies.limits:_totals",
    'dialect.sum_locked(tx, results, "tallies", condition, "tally_key", names)',
    '[f"SELECT {results} FROM tallies WHERE {condition} GROUP BY tally_key"]',
)
@pytest.mark.mariadb
def test_two_concurrent_calls_bring_no_total_over_the_limit(server_database: Database) -> None:
    """Each call adds to its own row. The later one waits until the earlier one is over, and is refused."""
    earlier, second = (tallies.Entry("r1", INTEGER_LIMIT - 1, topic, 0, 0, 1, 0) for topic in ("screws", "bolts"))
    service = Service(server_database, combiner=Inline)
    with server_database.engine.connect() as holder, ThreadPoolExecutor(1) as pool:
        transaction = holder.begin()
        pipeline = Pipeline(holder)
        tallies.write(pipeline, [tallies.EntriesCall.of("limit", [earlier])])
        pipeline.flush()
        applied = pool.submit(service.tallies.apply, "limit", [second])
        assert waits_for_a_lock(server_database, applied)
        transaction.commit()
        with pytest.raises(errors.InvalidRequest) as refusal:
            applied.result(60)
    assert refusal.value.place == "body.entries[0].delta"
    assert totals(service, "limit") == {"r1": INTEGER_LIMIT - 1}


@mutant(
    "a-total-is-read-as-long-as-others-change-it",
    "core.tallies.writes:write",
    "others.keys() == earlier.keys()",
    "False",
)
@pytest.mark.mariadb
def test_a_total_that_others_keep_changing_does_not_keep_a_transaction_running(server_database: Database) -> None:
    """Each time that a transaction has read the large total, another one adds a sub-counter: what was refused is then
    allowed, or the other way round. The transaction begins again instead of reading it once more."""
    service = Service(server_database, combiner=Inline)
    large = 2 * tallies.LARGE
    service.tallies.apply("rounds", [tallies.Entry("r1", INTEGER_LIMIT - large, "screws", 0, 0, 1, 0)])
    intruders = [
        {"tally": "rounds", "tally_key": "r1", "topic": f"intruder-{place}", "partition_no": 0, "generation": 0,
         "high_offset": 1, "high_child": 0, "value": value}
        for place, value in enumerate((large, -large) * 4)
    ]  # fmt: skip
    reads_by_transaction: list[int] = []
    waiting = iter(intruders)

    @sa.event.listens_for(server_database.engine, "begin")
    def begin(_: object) -> None:
        reads_by_transaction.append(0)

    with Database(server_database.url.render_as_string(hide_password=False)) as other:

        @sa.event.listens_for(server_database.engine, "before_cursor_execute")
        def intrude(_: object, __: object, statement: str, *___: object) -> None:
            if statement.endswith(("GROUP BY tally_key FOR UPDATE", "GROUP BY tally_key")):
                reads_by_transaction[-1] += 1
                if (intruder := next(waiting, None)) is not None:
                    with other.engine.begin() as tx:
                        tx.execute(sa.insert(tables.tallies), intruder)

        assert service.tallies.apply("rounds", [tallies.Entry("r1", 5, "bolts", 0, 0, 1, 0)]) == tallies.Applied(1, 0)
    assert next(waiting, None) is None
    assert max(reads_by_transaction) == 2
    assert totals(service, "rounds") == {"r1": INTEGER_LIMIT - large + 5}


def _spread(seed: int) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    return [
        {
            "key": f"k{dice.randrange(150)}",
            "delta": dice.randrange(1, 9),
            "source": {"topic": "t", "partition": 0, "offset": offset},
        }
        for offset in range(1200)
    ]


@mutant(
    "a-broken-order-is-a-repeat",
    "core.tallies.entries:advance",
    "if position not in deltas:\n    raise errors.OutOfOrder(f'body.entries[{place}]', key, position, guard)",
    """
        if position not in deltas:
            continue
        if False:
            raise errors.OutOfOrder(f'body.entries[{place}]', key, position, guard)
    """,
)
def test_a_message_out_of_order_is_refused(service: Service) -> None:
    """The message was never added and a later one was: nothing of the call is applied."""
    first, second, three = (
        {"key": "k", "delta": 1, "source": {"topic": "t", "partition": 0, "offset": offset}} for offset in (1, 2, 3)
    )
    apply(service, "order", [first])
    with pytest.raises(errors.OutOfOrder, match=r"body\.entries\[2\]: offset 2"):
        apply(service, "order", [first, three, second])
    assert totals(service, "order") == {"k": 1}
    assert apply(service, "order", [second, three, second, first]) == tallies.Applied(2, 2)
    assert totals(service, "order") == {"k": 3}


class _Window:
    """Records the acked offsets, and fails on an ack of an offset that the service doesn't have yet."""

    def __init__(self, applied: Callable[[], int]) -> None:
        self._applied = applied
        self.acked: list[int] = []

    def ack(self, offset: int) -> None:
        assert offset < self._applied(), "acked before it was applied"
        self.acked.append(offset)


@mutant(
    "a-buffer-acks-unanswered-messages",
    "lastbit.tallies.buffer:TallyBuffer._work",
    "if call.entries:\n    self._driver.run(self._apply, self._tally, call.entries)",
    """
        self._ack(call)
        call = call._replace(acks=[])
        if call.entries:
            self._driver.run(self._apply, self._tally, call.entries)
    """,
)
def test_a_buffer_acks_a_message_only_after_its_answer(scripted_service: Any) -> None:  # noqa: F811
    """Also for a message whose first answer was lost; unanswered messages stay unacked, and the buffer reports why."""
    applied = 0
    losses = iter([True, False, False, True, False])

    def reply(request: Any) -> Any:
        nonlocal applied
        offsets = [entry["source"]["offset"] for entry in request.body["entries"]]
        if offsets[-1] >= 40:
            return None
        applied = max(applied, offsets[-1] + 1)
        return None if next(losses, False) else (200, {}, {"applied": len(offsets), "repeated": 0})

    scripted_service.reply = reply
    window = _Window(lambda: applied)
    retry = Retry(attempts=3, base=0.001, cap=0.001)
    with Client(scripted_service.url, retry=retry) as client:
        buffer = client.tally("t").buffer(window, every=60, most=10)
        for offset in range(40):
            buffer.add({"k": 1}, SourceChain().hop("t", 0, offset))
        buffer.flush()
        assert window.acked == list(range(40))
        buffer.add({"k": 1}, SourceChain().hop("t", 0, 40))
        with pytest.raises(ServiceUnreachable):
            buffer.flush()
        with pytest.raises(ServiceUnreachable):
            buffer.add({"k": 1}, SourceChain().hop("t", 0, 41))
        with pytest.raises(ServiceUnreachable):
            buffer.close()
    assert window.acked == list(range(40))
    for request in scripted_service.seen:
        offsets = [entry["source"]["offset"] for entry in request.body["entries"]]
        assert offsets == list(range(offsets[0], offsets[0] + len(offsets)))
        assert all(entry["delta"] == 1 for entry in request.body["entries"])
