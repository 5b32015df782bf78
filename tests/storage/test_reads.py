"""Reads that share a transaction: each sees what was committed before it was asked for."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed
from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.commits.combiner import Inline
from core.commits.pending import Pending
from core.processes import outbox
from core.service import Service
from core.service.reads import ReadService, SharedReads
from core.storage import statements, tables
from core.storage.database import Database
from tests.mutants import mutant
from tests.support import plans, templates

UNSEEN = 10**9
SIZE = 64
KINDS: dict[str, Callable[[ReadService], SharedReads[Any, Any]]] = {
    "batches": lambda reads: reads.batches,
    "watermarks": lambda reads: reads.watermarks,
    "pages": lambda reads: reads.pages,
}


class Read:
    """A question, and what its receiver gets."""

    def __init__(self, question: Any) -> None:
        self.question = question
        self.value: Any = None
        self.error: Exception | None = None

    def receive(self, pending: Pending[Any]) -> None:
        self.value, self.error = pending.answer, pending.error


class Reader:
    """A `ReadService` whose transactions stop after they have read, until `go_on` is set."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch, kind: str, **options: Any) -> None:
        self.transactions: queue.SimpleQueue[set[Any]] = queue.SimpleQueue()
        self.go_on = threading.Event()
        self.results: queue.SimpleQueue[Read] = queue.SimpleQueue()
        self.service = ReadService(database, **options)
        self.kind = KINDS[kind](self.service)
        answer = self.kind._answers

        def answer_and_wait(questions: Collection[Any]) -> Any:
            values = answer(questions)
            self.transactions.put(set(questions))
            assert self.go_on.wait(60)
            return values

        monkeypatch.setattr(self.kind, "_answers", answer_and_wait)

    def read(self, question: Any) -> Read:
        read = Read(question)

        def receive(pending: Pending[Any]) -> None:
            read.receive(pending)
            self.results.put(read)

        self.kind.submit(question, receive)
        return read


@mutant(
    "a-read-is-answered-by-an-earlier-statement",
    "core.service.reads:SharedReads._serve",
    "deliver(reads)",
    """
        with self.wake:
            late, self._waiting = (self._waiting, [])
        for read in late:
            read.answer = reads[0].answer
        deliver(reads + late)
    """,
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_read_is_not_answered_by_a_transaction_that_began_before_it(
    database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    writer = Service(database, combiner=Inline)
    batch = writer.batches.open(Opening(items=8)).batch.id
    head = writer.feed.head()
    if kind == "pages":
        question, missing, error = feed.Span(head, 9), feed.Span(UNSEEN, 9), errors.InvalidRequest
    else:
        question, missing, error = batch, UNSEEN, errors.BatchNotFound  # type: ignore[assignment]
    reader = Reader(database, monkeypatch, kind)
    first = reader.read(question)
    assert reader.transactions.get(timeout=60) == {question}
    writer.batches.extend(batch, 5)
    writer.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])).result()
    writer.feed.append([feed.NewEvent("new", "t")])
    second, third, fourth = reader.read(question), reader.read(missing), reader.read(question)
    reader.go_on.set()
    reader.service.stop()
    assert {reader.results.get(timeout=60) for _ in range(4)} == {first, second, third, fourth}
    assert reader.transactions.get(timeout=60) == {question, missing}
    assert isinstance(third.error, error)
    assert second.value is fourth.value
    assert first.value is not None
    assert second.value is not None
    facts: Callable[[Any], Any] = {
        "batches": lambda batch: (batch.items, batch.acked),
        "watermarks": lambda result: (result[0].items, result[1]),
        "pages": lambda page: ([event.id for event in page.events], page.next - head, page.last - head),
    }[kind]
    assert (facts(first.value), facts(second.value)) == {
        "batches": ((8, 0), (13, 1)),
        "watermarks": ((8, 0), (13, 1)),
        "pages": (([], 0, 0), (["new"], 1, 1)),
    }[kind]


def test_reads_beyond_the_bound_are_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(database, monkeypatch, "batches", max_waiting=2)
    reader.read(UNSEEN)
    reader.transactions.get(timeout=60)
    reader.read(UNSEEN)
    reader.read(UNSEEN)
    with pytest.raises(errors.Overloaded, match="too many requests are waiting"):
        reader.read(UNSEEN)
    reader.go_on.set()
    reader.service.stop()
    with pytest.raises(errors.Unavailable, match="stopping"):
        reader.read(UNSEEN)


def test_no_more_pages_than_the_bound_share_a_transaction(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.service.reads.PAGES", 3)
    Service(database, combiner=Inline).feed.append([feed.NewEvent(f"e{number}", "t") for number in range(10)])
    reader = Reader(database, monkeypatch, "pages")
    reader.read(feed.Span(0, 1))
    reader.transactions.get(timeout=60)
    for after in range(5):
        reader.read(feed.Span(after, 1))
    reader.go_on.set()
    reader.service.stop()
    assert [len(reader.transactions.get(timeout=60)) for _ in range(2)] == [3, 2]
    assert {reader.results.get(timeout=60).error for _ in range(6)} == {None}


@mutant("readers-share-one-error", "core.service.reads:SharedReads._serve", "errors.copy_of(error)", "error")
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_transaction_fails_the_reads_that_share_it(
    database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each has an error object of its own, as each caller raises it. The thread goes on: the next read is served."""
    writer = Service(database)
    question: Any = writer.batches.open(Opening()).batch.id
    if kind == "pages":
        question = feed.Span(0, 1)
    reader = Reader(database, monkeypatch, kind)
    reader.read(question)
    reader.transactions.get(timeout=60)
    answer = reader.kind._answers

    def fail(questions: Collection[Any]) -> Any:
        monkeypatch.setattr(reader.kind, "_answers", answer)
        raise errors.Unavailable("gone")

    monkeypatch.setattr(reader.kind, "_answers", fail)
    failing = [reader.read(question) for _ in range(2)]
    reader.go_on.set()
    assert reader.results.get(timeout=60).error is None
    assert {reader.results.get(timeout=60) for _ in range(2)} == set(failing)
    mine, other = (read.error for read in failing)
    assert type(mine) is type(other) is errors.Unavailable
    assert str(mine) == str(other) == "gone"
    assert mine is not other
    reader.read(question)
    assert reader.results.get(timeout=60).error is None
    reader.service.stop()


@mutant("a-receiver-that-raises-ends-the-reads", "core.commits.pending:call_receiver", "Exception", "KeyError")
def test_a_receiver_that_raises_costs_no_other_read_its_answer(database: Database) -> None:
    def fail(_: Pending[Any]) -> None:
        raise ZeroDivisionError

    service = ReadService(database)
    results: queue.SimpleQueue[Pending[Any]] = queue.SimpleQueue()
    service.batches.submit(UNSEEN, fail)
    service.batches.submit(UNSEEN, results.put)
    assert isinstance(results.get(timeout=30).error, errors.BatchNotFound)
    service.stop()


@mutant(
    "a-damaged-row-fails-the-reads-of-its-neighbours",
    "core.commits.apart:attempt",
    "len(keys) == 1",
    "True",
)
@pytest.mark.parametrize("kind", ["batches", "watermarks"])
def test_a_damaged_row_fails_only_the_reads_of_its_batch(
    database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    writer = Service(database)
    batches = [writer.batches.open(Opening()).batch.id for _ in range(5)]
    damaged = batches[2]
    database.write(lambda tx: tx.execute(sa.text(f"UPDATE batches SET labels = 'no JSON' WHERE id = {damaged}")))
    reader = Reader(database, monkeypatch, kind)
    reader.read(batches[0])
    reader.transactions.get(timeout=60)
    shared = [reader.read(batch) for batch in batches * 2]
    reader.go_on.set()
    for _ in range(11):
        reader.results.get(timeout=60)
    assert [read.question for read in shared if read.error is not None] == [damaged] * 2
    assert all(read.value is not None for read in shared if read.question != damaged)
    reader.service.stop()


@pytest.mark.parametrize(
    "error",
    [
        errors.BatchNotFound(7),
        errors.InvalidRequest("query.after", "expected 1"),
        errors.PositionTrimmed(1, 2),
        OSError(28, "No space left on device"),
        KeyError("k"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_copy_of_an_error_equals_it(error: Exception) -> None:
    copy = errors.copy_of(error)
    assert copy is not error
    assert (type(copy), str(copy), copy.args, vars(copy)) == (type(error), str(error), error.args, vars(error))
    assert copy.__cause__ is error


@mutant(
    "a-shared-page-begins-where-its-neighbour-does",
    "core.feed:pages",
    "(bisect.bisect_right(events, place, key=_position) for place in (start, end))",
    "(bisect.bisect_right(events, place, key=_position) for place in (joined[0][0], end))",
)
def test_pages_that_share_a_transaction_are_those_that_are_read_alone(database: Database) -> None:
    """Ranges that overlap, touch, repeat, are apart, end with the feed, begin beyond it or before its first event."""
    service = Service(database, combiner=Inline)
    large = '"' + "x" * 3000 + '"'
    start = service.feed.head()
    service.feed.append([feed.NewEvent(f"e{n}", "t", f"k{n}" if n % 2 else None, large) for n in range(60)])
    end = service.feed.head()
    afters = [None, *range(start, start + 8), start + 30, start + 38, end - 3, end - 1, end, end + 1, UNSEEN]
    spans = [feed.Span(after, limit) for after in afters for limit in (1, 4, feed.FIRST)]
    for trimmed in (False, True):
        if trimmed:
            feed.trim(database, timedelta(0), needed=lambda tx, below: start + 5)
        pages = database.read(feed.pages, spans)
        for span in spans:
            page = pages[span]
            if isinstance(page, errors.CoreError):
                with pytest.raises(type(page), match=re.escape(str(page))):
                    database.snapshot(feed.read, *span)
            else:
                assert page == database.snapshot(feed.read, *span)


def test_a_shared_page_ends_at_the_bound_of_bytes(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.storage.limits.BYTES", 100)
    service = Service(database, combiner=Inline)
    start = service.feed.head()
    service.feed.append([feed.NewEvent(f"e{n}", "t", None, '"' + "x" * 40 + '"') for n in range(6)])
    spans = [feed.Span(start, 5), feed.Span(start + 1, 1), feed.Span(start + 4, 5)]
    pages = database.read(feed.pages, spans)
    assert [page == database.snapshot(feed.read, *span) for span, page in pages.items()] == [True] * 3
    assert [page.next - start for page in pages.values() if isinstance(page, feed.EventPage)] == [2, 2, 6]


@mutant(
    "shared-pages-are-read-without-a-snapshot",
    "core.feed:pages",
    "begin = [text] if (text := dialects.of(tx).begin_snapshot) else []",
    "begin: list[str] = []",
)
def test_a_page_trimmed_while_it_is_read_is_read_completely(database: Database) -> None:
    """Between the statement that reads the head, as the page begins before all events, and the one that reads them."""
    service = Service(database, combiner=Inline)
    start = service.feed.head()
    feed.trim(database, timedelta(0))
    service.feed.append([feed.NewEvent(f"e{n}", "t") for n in range(5)])
    trimmed = False

    def trim(*arguments: Any) -> None:
        nonlocal trimmed
        if not trimmed and "FROM feed " in str(arguments[2]):
            trimmed = True
            with Database(database.url.render_as_string(hide_password=False)) as other:
                feed.trim(other, timedelta(0))

    sa.event.listen(database.engine, "before_cursor_execute", trim)
    page = service.feed.read(None, 5)
    assert trimmed
    assert [event.id for event in page.events] == [f"e{n}" for n in range(5)]
    with pytest.raises(errors.PositionTrimmed):
        service.feed.read(start, 5)


FILTERS: dict[str, tuple[dict[str, Any], dict[str, str], int]] = {
    "type": ({"types": ["never"]}, {"sqlite": "(rowid>? AND rowid<?)", "postgresql": "feed_pkey"}, 110),
    "prefix": ({"prefix": "never"}, {"sqlite": "(rowid>? AND rowid<?)", "postgresql": "feed_pkey"}, 110),
    "batch": ({"batch": 1, "types": ["never"]}, {"sqlite": "feed_batch", "postgresql": "feed_batch"}, 10),
}
"""Arguments of a read that finds nothing, a part of its plan, and the rows that it may read."""


@mutant("a-filtered-page-reads-the-whole-feed", "core.feed:read", "min(position, start + EXAMINED)", "position")
@pytest.mark.parametrize("name", FILTERS)
def test_a_filtered_page_examines_a_bounded_part_of_the_feed(
    database: Database, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By the server's count of rows. Only one of a batch reads to the end, as it reads no other events."""
    monkeypatch.setattr(feed, "EXAMINED", 100)
    arguments, plan, most_rows = FILTERS[name]
    service = Service(database, combiner=Inline)
    assert service.batches.open(Opening(items=1)).batch.id == 1
    for part in range(3):
        service.feed.append([feed.NewEvent(f"{part}-{n}", "t", f"k{n}") for n in range(1000)])
    end = service.feed.head()
    plans.analyze(database, "feed")
    with plans.executions(database) as executions:
        page = service.feed.read(0, 1000, **arguments)
    assert page == feed.EventPage([], end if name == "batch" else 100, end)
    plans.finds_nothing_by(
        database, plan.get(database.url.get_backend_name(), ""), *executions[-1], most_rows=most_rows
    )


@mutant(
    "a-page-of-commands-reads-the-whole-feed", "core.processes.outbox:read", "min(last, begin + feed.EXAMINED)", "last"
)
def test_a_filtered_page_of_commands_examines_a_bounded_part_of_the_feed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "EXAMINED", 100)
    service = Service(database, combiner=Inline)
    ids = [f"{n}" for n in range(1000)]
    for part in range(3):
        service.feed.append([feed.NewEvent(f"{part}-{id}", "command.t") for id in ids])
    end = service.feed.head()

    def issue(tx: Connection) -> None:
        command = {"name": "p", "instance": "i", "step": "s", "type": "t"}
        now = tables.clock(tx)
        rows = [{**command, "command_id": f"{n}", "position": n, "created_at": now} for n in range(1, end + 1)]
        tx.execute(sa.insert(tables.outbox), rows)

    database.write(issue)
    plans.analyze(database, "outbox")
    for arguments in ({"types": ["never"]}, {"process": "never"}):
        with plans.executions(database) as executions:
            page = service.processes.commands(0, 1000, **arguments)  # type: ignore[arg-type]
        assert page == outbox.CommandPage([], 100, end)
        plans.finds_nothing_by(database, "outbox_", *executions[-1], most_rows=110)


@mutant(
    "a-filtered-page-claims-the-whole-feed",
    "core.feed:read",
    "events[-1].position if has_more else end",
    "events[-1].position if has_more else position",
)
def test_filtered_pages_continue_where_the_earlier_one_ended(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matching event is on one page, also if pages end by their number of events."""
    monkeypatch.setattr(feed, "EXAMINED", 7)
    with Database(sqlite_url) as database:
        templates.migrate(database)
        service = Service(database, combiner=Inline)
        names = "aabbbbbbbbbbbbbbbbbbbbabbbbbbbaaaaaaaaaaabbbbbbb"
        service.feed.append([feed.NewEvent(f"{n}", name, f"{name}{n}") for n, name in enumerate(names)])
        wanted = [n for n, name in enumerate(names) if name == "a"]
        for arguments, limit in (({"types": ["a"]}, 1000), ({"types": ["a"]}, 2), ({"prefix": "a"}, 3)):
            found: list[int] = []
            after = 0
            while after < len(names):
                page = service.feed.read(after, limit, **arguments)  # type: ignore[arg-type]
                assert after < page.next <= after + 7
                assert page.last == len(names)
                found += [int(event.id) for event in page.events]
                after = page.next
            assert found == wanted


@mutant(
    "the-watermark-forgets-the-journal-of-the-first-groups",
    "core.batches.ranges:_pieces",
    "_touched(first_recent, first_rows, start)",
    "_touched({}, first_rows, start)",
)
def test_watermarks_of_many_batches_are_those_of_each(database: Database) -> None:
    """Nothing acked, a hole in the first or a later group, full groups before the hint moves, complete, journaled."""
    service = Service(database, combiner=Inline)
    acked: list[set[int]] = [
        set(),
        set(range(5)),
        {1, 2, 3},
        set(range(3 * SIZE)) - {2 * SIZE + 7},
        set(range(9 * SIZE)),
        set(range(40 * SIZE)) - {39 * SIZE},
        {number for number in range(40 * SIZE) if number % SIZE != 9},
        set(range(40 * SIZE + 10)),
    ]
    expected = {}
    for numbers in acked:
        batch = service.batches.open(Opening(group_size=SIZE, items=40 * SIZE + 10)).batch.id
        items = [(batch, number // SIZE, number % SIZE) for number in sorted(numbers)]
        service.acks.ack(Call.of(Verb.ACK, items)).result()
        expected[batch] = min(set(range(40 * SIZE + 10)) - numbers, default=40 * SIZE + 10)
    wide = service.batches.open(Opening(group_size=2048, items=50 * 2048)).batch.id
    for number in range(3):
        items = [(wide, group, number) for group in range(50) if (group, number) != (0, 2)]
        service.acks.ack(Call.of(Verb.ACK, items)).result()
    assert service.batches.get(wide).journal_next
    expected[wide] = 2
    reads = ReadService(database)
    results = reads.watermarks._answers({*expected, UNSEEN})
    assert isinstance(results.pop(UNSEEN), errors.BatchNotFound)
    assert {id: result[1] for id, result in results.items() if isinstance(result, tuple)} == expected
    assert all(reads.watermarks.get(id)[1] == number for id, number in expected.items())


def test_a_transaction_that_is_finished_has_ended_on_the_server(mariadb_database: Database) -> None:
    """Without a ROLLBACK from the client. One that was not finished ends by the ROLLBACK."""

    def is_open(tx: sa.Connection) -> int:
        [[state]] = statements.run(tx, "SELECT @@in_transaction")[0]
        return int(state)

    def finish(tx: sa.Connection) -> int:
        statements.finish(tx, "SELECT id FROM batches")
        return is_open(tx)

    def leave_open(tx: sa.Connection) -> int:
        statements.finish(tx, "SELECT id FROM batches")
        statements.run(tx, "SELECT id FROM batches")
        return is_open(tx)

    for read in (mariadb_database.read, mariadb_database.snapshot):
        assert [read(work) for work in (finish, leave_open, is_open)] == [0, 1, 0]
