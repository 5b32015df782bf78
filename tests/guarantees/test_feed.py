"""The feed: positions in commit order without a gap, though writers append, hold their transactions and roll back."""

from __future__ import annotations

import random
import threading
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed, janitor
from core.batches import batch as batches
from core.batches import expiry
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from core.storage.statements import Pipeline
from tests.guarantees.drivers.rounds import ROUNDS
from tests.mutants import mutant
from tests.support.exposition import Change

WRITERS = 4


class Regret(errors.CoreError):
    """Raised to roll a transaction back after it has appended."""


@mutant(
    "positions-as-auto-increment-gives-them",
    "core.feed:append",
    "write(pipeline, own, batches={event.batch for event in events if event.batch is not None})",
    """
        rows = [dict(event_id=e.id, type=e.type, batch_id=e.batch, event_key=e.key, data=e.data) for e in events]
        with tx.engine.begin() as other:
            other.exec_driver_sql(f'UPDATE feed_head SET position = position + {len(rows)}')
            last = other.exec_driver_sql('SELECT position FROM feed_head').scalar()
        before = last - len(rows)
        for place, row in enumerate(reversed(rows)):
            row['position'] = last - place
        tx.execute(sa.insert(tables.feed).values(appended_at=tables.utc_now()), rows)
    """,
)
@mutant("the-head-is-not-locked", "core.feed:write", "HEAD + dialects.of(pipeline.tx).for_update()", "HEAD")
@mutant(
    "the-feed-is-read-without-a-snapshot",
    "core.service.feed:FeedService.read",
    "self._database.snapshot",
    "self._database.read",
)
@pytest.mark.mariadb
@pytest.mark.timeout(7200)
def test_a_reader_sees_every_position_in_order_whatever_the_writers_do(server_database: Database) -> None:
    """Writers append, hold their transactions and roll back at random. A reader that follows never sees a gap, and
    nothing is ever added below the positions it has read. Writers wait for each other, and none has to begin again."""
    url = server_database.url.render_as_string(hide_password=False)
    start = Service(server_database).feed.head()
    commits: list[set[str]] = [set() for _ in range(WRITERS)]
    stop = threading.Event()
    trouble: list[BaseException] = []

    def write(writer: int) -> None:
        dice = random.Random(writer)
        with Database(url) as database:
            for number in range(ROUNDS // WRITERS):
                ids = [f"{writer}-{number}-{place}" for place in range(dice.choice((1, 1, 2, 5)))]
                holds, regrets, own_transaction = dice.randrange(12), dice.random() < 0.2, dice.random() < 0.2

                def work(
                    tx: Connection,
                    ids: list[str] = ids,
                    holds: int = holds,
                    regrets: bool = regrets,
                    own_transaction: bool = own_transaction,
                ) -> None:
                    new = [feed.NewEvent(id, "test.event") for id in ids]
                    pipeline = Pipeline(tx)
                    if own_transaction:
                        feed.write(pipeline, lambda _, new=new: new)
                    else:
                        feed.append(tx, new)
                    for _ in range(holds):
                        tx.exec_driver_sql("SELECT 1")
                    if regrets:
                        raise Regret
                    pipeline.finish()

                try:
                    database.write(work)
                    commits[writer].update(ids)
                except Regret:
                    pass

    def follow(read: dict[int, str], limit: int) -> None:
        with Database(url) as database:
            service, after = Service(database), start
            while True:
                last = stop.is_set()
                page = service.feed.read(after, limit)
                for event in page.events:
                    assert event.position == after + 1, f"{event.position} came after {after}"
                    after = event.position
                    read[after] = event.id
                assert page.next == after
                if last and not page.events:
                    return

    def guarded(run: object, *arguments: object) -> None:
        try:
            run(*arguments)  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001  # raised again in the test's own thread
            trouble.append(error)

    reads: list[dict[int, str]] = [{}, {}]
    # Pages that share their reads, and larger ones, which don't.
    limits = (feed.FIRST, feed.FIRST + 1)
    followers = [threading.Thread(target=guarded, args=(follow, *pair)) for pair in zip(reads, limits, strict=True)]
    writers = [threading.Thread(target=guarded, args=(write, writer)) for writer in range(WRITERS)]
    conflicts = Change("lastbit_retries_total", cause="conflict")
    for thread in (*followers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in followers:
        thread.join()
    assert not trouble, trouble
    assert not conflicts()
    expected = set().union(*commits)
    for read in reads:
        assert set(read.values()) == expected
        assert list(read) == list(range(start + 1, start + 1 + len(expected)))


def _ids(service: Service, after: int = 0) -> list[str]:
    return [event.id for event in service.feed.read(after, 1000).events]


def test_an_id_that_was_appended_before_keeps_its_position(service: Service) -> None:
    """Also within one call, and next to new ids."""
    start = service.feed.head()
    first = service.feed.append(
        [feed.NewEvent("order-1", "order.paid", "o1", '{"a":1}'), feed.NewEvent("order-2", "order.paid")]
    )
    repeat = service.feed.append(
        [feed.NewEvent("order-2", "other"), feed.NewEvent("order-3", "x"), feed.NewEvent("order-3", "y")]
    )
    assert first == [feed.Appended(start + 1, False), feed.Appended(start + 2, False)]
    assert repeat == [feed.Appended(start + 2, True), feed.Appended(start + 3, False), feed.Appended(start + 3, True)]
    assert _ids(service, start) == ["order-1", "order-2", "order-3"]
    event = service.feed.read(start, 1).events[0]
    assert (event.type, event.key, event.data, event.batch) == ("order.paid", "o1", '{"a":1}', None)


def test_ids_are_compared_by_their_bytes(service: Service) -> None:
    """`Job` and `job` are different ids."""
    new = [feed.NewEvent(id, "x") for id in ("Job", "job", "j\u00f6b", "job ")]
    assert [entry.repeated for entry in service.feed.append(new)] == [False] * 4


def test_a_filtered_page_still_reports_how_far_it_has_read(service: Service) -> None:
    """`next` moves past events that the filter leaves out."""
    start = service.feed.head()
    batch = service.batches.open(batches.Opening(items=1)).batch.id
    other = service.batches.open(batches.Opening(sealed=True)).batch.id
    service.batches.seal(batch)
    all_events = service.feed.read(start, 1000)
    assert [event.id for event in all_events.events] == [
        *(f"batch:{batch}:opened", f"batch:{other}:opened", f"batch:{other}:sealed", f"batch:{other}:completed"),
        *(f"batch:{other}:succeeded", f"batch:{batch}:sealed"),
    ]
    batch_events = service.feed.read(start, 1000, batch=batch)
    assert [event.type for event in batch_events.events] == ["batch.opened", "batch.sealed"]
    assert batch_events.next == all_events.next == start + 6
    batch_events = service.feed.read(start, 1, types=["batch.sealed", "batch.completed"])
    assert ([event.batch for event in batch_events.events], batch_events.next) == ([other], start + 3)
    assert service.feed.read(start + 6, 10, batch=batch) == feed.EventPage([], start + 6, start + 6)


def test_a_position_beyond_the_feeds_end_is_refused(service: Service) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"query\.after: expected at most"):
        service.feed.read(service.feed.head() + 1, 10)


@mutant("trimmed-events-are-a-gap", "core.feed:_checked", "after < trimmed", "False")
def test_a_reader_of_trimmed_positions_gets_an_error(service: Service) -> None:
    """Recent events stay, positions go on, and a reader that is past the trimmed positions notices nothing."""
    start = service.feed.head()
    service.feed.append([feed.NewEvent(f"old-{number}", "x") for number in range(5)])
    with service.database.engine.begin() as tx:
        tx.execute(
            sa.update(tables.feed)
            .where(tables.feed.c.position <= start + 3)
            .values(appended_at=datetime(2001, 1, 1, tzinfo=UTC))
        )
    report = janitor.run_once(service.database, expiry.Policy(keep_events=timedelta(days=1)))
    assert report.events == start + 3
    with pytest.raises(errors.PositionTrimmed, match=f"trimmed up to {start + 3}") as exception:
        service.feed.read(start + 2, 10)
    assert exception.value.trimmed == start + 3
    assert _ids(service, start + 3) == ["old-3", "old-4"]
    assert service.feed.append([feed.NewEvent("new", "x")]) == [feed.Appended(start + 6, False)]
    assert janitor.run_once(service.database, expiry.Policy(keep_events=timedelta(days=1))).events == 0


def test_everything_that_no_process_needs_can_be_trimmed(service: Service) -> None:
    """The positions continue where they ended."""
    start = service.feed.head()
    service.feed.append([feed.NewEvent(f"old-{number}", "x") for number in range(5)])
    keep = timedelta(seconds=-60)  # a negative age, so that even an event of the last minute may be trimmed
    assert feed.trim(service.database, keep, needed=lambda tx, below: start + 4) == start + 3
    assert _ids(service, start + 3) == ["old-3", "old-4"]
    assert feed.trim(service.database, keep) == 2
    assert service.feed.read(start + 5, 10).events == []
    assert service.feed.append([feed.NewEvent("new", "x")]) == [feed.Appended(start + 6, False)]


@mutant(
    "the-times-of-needed-events-are-read",
    "core.feed:_first_kept",
    "position + 1 if lowest is None else min(lowest, position + 1)",
    "position + 1",
)
def test_times_are_read_in_chunks_and_up_to_what_is_needed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query for all old events, which a process may have needed for months, would exceed the database's time-outs."""
    start = service.feed.head()
    service.feed.append([feed.NewEvent(f"event-{number}", "x") for number in range(7)])
    with service.database.engine.begin() as tx:
        old = tables.feed.c.position <= start + 5
        tx.execute(sa.update(tables.feed).where(old).values(appended_at=datetime(2001, 1, 1, tzinfo=UTC)))
    read = feed._first_younger
    chunks: list[range] = []

    def recorded(tx: Connection, first: int, end: int, until: datetime) -> int | None:
        chunks.append(range(first, end))
        return read(tx, first, end, until)

    monkeypatch.setattr(feed, "_first_younger", recorded)
    monkeypatch.setattr(feed, "SCAN", 2)
    day = timedelta(days=1)
    assert feed.trim(service.database, day, needed=lambda tx, below: start + 4) == start + 3
    assert [position for chunk in chunks for position in chunk] == list(range(1, start + 4))
    assert feed.trim(service.database, day) == 2
    assert _ids(service, start + 5) == ["event-5", "event-6"]
    assert max(map(len, chunks)) == 2


def test_a_commit_that_appends_notifies_its_process_and_a_rollback_does_not(service: Service) -> None:
    """The listener gets the feed's last position."""
    positions: list[int] = []
    service.feed.on_append(positions.append)
    batch = service.batches.open(batches.Opening(items=2)).batch.id
    service.batches.extend(batch, 1)
    with pytest.raises(errors.BatchNotFound):
        service.batches.seal(batch + 1000)
    service.batches.seal(batch)
    assert positions == [service.feed.head() - 1, service.feed.head()]
