"""Ranges: each total is a plain sum of the messages, whoever shares a source, and whatever is lost or repeated."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import sqlalchemy as sa

from core import tallies
from core.commits.combiner import Inline
from core.service import Service
from core.storage import schema
from core.storage.database import Database
from core.storage.statements import Pipeline
from tests.guarantees.models.streams import World
from tests.guarantees.programs.dying import Mortals, mortals
from tests.guarantees.test_tallies import SOAK, totals
from tests.mutants import mutant

numbers = itertools.count()
MESSAGES: Final = 40
WORLDS: Final = 300 * (20 if SOAK else 1)


@pytest.fixture(scope="module")
def dying() -> Iterator[Mortals]:
    with mortals() as server:
        yield server


def deltas(message: int) -> dict[str, int]:
    return {f"k{message % 7}": message, f"k{message * 3 % 5}": 1 - message, "all": 1}


def sums(messages: Sequence[int]) -> dict[str, int]:
    totals_by_key: dict[str, int] = {}
    for message in messages:
        for key, delta in deltas(message).items():
            totals_by_key[key] = totals_by_key.get(key, 0) + delta
    return totals_by_key


def ranged(after: int | None, messages: Sequence[int], partition: int = 0) -> tallies.Range:
    """The range of these messages, whose numbers are their positions."""
    start = None if after is None else str(after)
    return tallies.Range("t", partition, 0, start, str(messages[-1]), sums(messages))


class _Worker:
    """Reads a source from a committed message on, and knows its position only from the service."""

    def __init__(self, dice: random.Random, start: int) -> None:
        self._dice = dice
        self.read = start
        self._position: int | None = None
        self._waiting: list[int] = []

    def step(self, service: Service, tally: str) -> int | None:
        """Read some messages and send them, in ranges of any size. Returns what may be committed."""
        dice = self._dice
        end = min(MESSAGES, self.read + dice.randint(1, 6))
        self._waiting += range(self.read, end)
        self.read = end
        highest = -1 if self._position is None else self._position
        self._waiting = [message for message in self._waiting if message > highest]
        if not self._waiting:
            return highest + 1
        ends = sorted({*dice.sample(range(1, len(self._waiting) + 1), k=dice.randint(1, min(3, len(self._waiting))))})
        ranges, start, after = [], 0, self._position
        for stop in ends:
            messages = self._waiting[start:stop]
            ranges.append(ranged(after, messages))
            start, after = stop, messages[-1]
        if dice.random() < 0.1:
            return None  # the call is lost
        results = service.tallies.apply_ranges(tally, ranges)
        if dice.random() < 0.2:
            return None  # its answer is
        if results[-1].status == "moved":
            position = results[-1].position
            self._position = None if position is None else int(position)
        else:
            self._position = int(ranges[-1].upto)
        return 0 if self._position is None else self._position + 1


@mutant(
    "the-position-stays",
    "core.tallies.ranges:RangesCall.effect",
    "positions[source] = self.ranges[place].upto",
    "pass",
)
@mutant(
    "a-moved-range-is-added-anyway",
    "core.tallies.ranges:RangesCall.effect",
    "position not in chain.points",
    "False",
    ("chain.points.index(position)", "0"),
)
def test_workers_that_share_a_source_count_each_message_once(service: Service) -> None:
    """Each starts at what was committed, beside the others, loses answers, repeats in other groups, and dies."""
    commits = 0
    for seed in range(150):
        dice = random.Random(seed)
        tally = f"shared-{seed}"
        committed = 0
        workers = [_Worker(dice, 0)]
        while committed < MESSAGES:
            worker = dice.choice(workers)
            before = committed
            committed = max(committed, worker.step(service, tally) or 0)
            commits += committed > before
            if dice.random() < 0.1:
                workers.append(_Worker(dice, committed))
            if len(workers) > 1 and dice.random() < 0.1:
                workers.remove(worker)
        assert totals(service, tally) == sums(range(MESSAGES)), seed
    assert commits > 300


class _Direct:
    """Sends the requests of a flow to the service itself."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def call(self, method: str, path: str, *, body: dict[str, Any]) -> Iterator[Any]:
        tally = path.split("/")[3]
        ranges = [tallies.Range(*(span[name] for name in tallies.Range._fields)) for span in body["ranges"]]
        results = self._service.tallies.apply_ranges(tally, ranges)
        return {"results": [result._asdict() for result in results]}
        yield

    def decoded(self, _: str, answer: Any, decode: Any) -> Any:
        return decode(answer)


@mutant(
    "covered-messages-are-sent-again",
    "lastbit.tallies.ranges:Counting._ranges",
    "position_before is None or position > position_before",
    "True",
)
@mutant(
    "a-message-that-came-twice-is-added-twice",
    "lastbit.tallies.ranges:Counting._ranges",
    "deltas.setdefault(source, {})[position, key] = delta",
    "deltas.setdefault(source, {})[position, key, len(deltas[source])] = delta",
    (
        "for (_, key), delta in deltas[source].items():\n    totals[key] = totals.get(key, 0) + delta",
        "for (_, key, _), delta in deltas[source].items():\n    totals[key] = totals.get(key, 0) + delta",
    ),
)
@mutant(
    "siblings-of-a-flat-map-are-one-message",
    "lastbit.tallies.ranges:additions",
    "(offset, child)",
    "(offset, 0)",
)
@mutant("a-republished-source-has-no-path", "lastbit.chains:range_source_of", "root.topic + path", "root.topic")
@pytest.mark.timeout(600)
def test_every_total_matches_the_model_behind_republishers(service: Service) -> None:
    """Flat maps, crashes, replays, partial publishes, recreated topics, lost answers, overlapping consumers."""
    for seed in range(WORLDS):
        world = World(seed, by_range=True)
        for call in world.consumed():
            for request in call:
                with contextlib.suppress(StopIteration):
                    next(request.counting.apply(_Direct(service), world.name, request.additions))
        actual, expected = totals(service, world.name), world.truth()
        wrong = {key for key in {*actual, *expected} if actual.get(key, 0) != expected.get(key, 0)}
        assert not wrong, f"world {seed}: {wrong}"


@mutant(
    "a-call-of-ranges-is-applied-in-parts",
    "core.tallies.rows:store",
    "_insert(pipeline, 'tallies', _PRIMARY_KEY, _VALUES, old, new)",
    "pipeline.later('COMMIT') or _insert(pipeline, 'tallies', _PRIMARY_KEY, _VALUES, old, new)",
)
@pytest.mark.timeout(600)
def test_a_call_that_dies_at_any_point_is_stored_completely_or_not_at_all(database: Database, dying: Mortals) -> None:
    """New and existing rows; then the messages are sent again in other ranges, and each counts once."""
    service = Service(database, combiner=Inline)
    url = database.url.render_as_string(hide_password=False)
    for point in range(100):
        tally = f"dying-{next(numbers)}"
        assert service.tallies.apply_ranges(tally, [ranged(None, range(3))])[0].status == "applied"
        call = [ranged(2, range(3, 9)), ranged(8, range(9, 12)), ranged(None, range(5), 1)]
        death = dying.run(url, {"verb": "ranges", "tally": tally, "ranges": call}, point)
        all_sums = sums([*range(12), *range(5)])
        assert totals(service, tally) in (sums(range(3)), all_sums)
        if death is not None and death.commits:
            assert totals(service, tally) == all_sums
        repeats = [ranged(2, range(3, 12)), ranged(11, range(12, 20)), ranged(None, range(5), 1)]
        statuses = [result.status for result in service.tallies.apply_ranges(tally, repeats)]
        assert statuses in (["applied"] * 3, ["repeated", "applied", "repeated"])
        assert totals(service, tally) == sums([*range(20), *range(5)])
        if death is None:
            assert point > 3
            return
    pytest.fail("the call has no end")


@mutant(
    "a-new-position-overwrites-anothers",
    "core.tallies.rows:_insert",
    "inserts(table, columns, new)",
    "inserts(table, columns, new, upsert)",
)
@pytest.mark.mariadb
def test_of_two_first_ranges_of_a_source_one_is_added(server_url: str) -> None:
    """Neither finds a row to lock. The second insert waits for the first one's commit, and its call starts again."""
    with Database(server_url) as slow, Database(server_url) as fast, ThreadPoolExecutor(1) as pool:
        schema.migrate(slow)
        inserting, may_go_on = threading.Event(), threading.Event()

        @sa.event.listens_for(slow.engine, "before_cursor_execute")
        def wait(_: object, __: object, statement: str, *___: object) -> None:
            if statement.startswith("INSERT INTO tally_sources") and not inserting.is_set():
                inserting.set()
                assert may_go_on.wait(30)

        later_call = pool.submit(Service(slow, combiner=Inline).tallies.apply_ranges, "twice", [ranged(None, range(4))])
        assert inserting.wait(30)
        service = Service(fast, combiner=Inline)
        assert service.tallies.apply_ranges("twice", [ranged(None, range(3))]) == [tallies.Counted("applied")]
        may_go_on.set()
        assert later_call.result(30) == [tallies.Counted("moved", "2")]
        assert totals(service, "twice") == sums(range(3))


@mutant(
    "positions-are-not-locked",
    "core.tallies.rows:_select_positions",
    'dialect.lock_looked_up("tally_sources")',
    "''",
)
@pytest.mark.mariadb
@pytest.mark.timeout(600)
def test_workers_in_several_processes_count_each_message_once(server_database: Database) -> None:
    """Three independent writers of one source, each from its start."""
    url = server_database.url.render_as_string(hide_password=False)
    for round_ in range(6):
        tally, start = f"race-{round_}", threading.Barrier(3)

        def write(writer: int, tally: str = tally, start: Any = start) -> None:
            worker = _Worker(random.Random(f"{tally}-{writer}"), 0)
            with Database(url) as database:
                service = Service(database, combiner=Inline)
                start.wait(60)
                while (worker.step(service, tally) or 0) < MESSAGES:
                    pass

        with ThreadPoolExecutor(3) as pool:
            for finished in [pool.submit(write, writer) for writer in range(3)]:
                finished.result(300)
        assert totals(Service(server_database, combiner=Inline), tally) == sums(range(MESSAGES))


@pytest.mark.mariadb
def test_partitions_do_not_wait_for_each_other(server_database: Database) -> None:
    """Eight partitions add to the same keys, new ones and existing ones, each in a transaction that stays open."""
    service = Service(server_database, combiner=Inline)
    for round_, after in enumerate((None, 2)):
        messages = range(3 * round_, 3 * round_ + 3)
        holders = [server_database.engine.connect().execution_options() for _ in range(8)]
        for partition, holder in enumerate(holders):
            holder.begin()
            pipeline = Pipeline(holder)
            call = tallies.RangesCall.of("apart", [ranged(after, messages, partition)])
            assert tallies.write(pipeline, [call]) == [[tallies.Counted("applied")]]
            pipeline.flush()
        for holder in reversed(holders):
            holder.commit()
            holder.close()
        assert totals(service, "apart") == {key: 8 * total for key, total in sums(range(messages[-1] + 1)).items()}
