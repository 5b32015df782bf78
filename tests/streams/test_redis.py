"""Redis Streams itself, over a connection that is cut, even between an answer and its reader."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as client

from lastbit import MissingExtra
from lastbit.streams.sources.redis_streams import PAGE, Entry, RedisStream
from tests.streams import crash, poison
from tests.support.brokers import RedisServer, Wire

STREAM = "orders"
GROUP = "billing"


@pytest.fixture
def commands(redis: RedisServer) -> Iterator[Any]:
    """A client to add and read entries, on an emptied database."""
    with client.Redis.from_url(redis.url(), decode_responses=True) as connection:
        connection.flushall()
        yield connection


@pytest.fixture
def wire(redis: RedisServer) -> Iterator[Wire]:
    wire = Wire(redis.port)
    yield wire
    wire.close()


def add(commands: Any, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        commands.xadd(STREAM, {"number": number})


def take(source: RedisStream, count: int) -> dict[int, Entry]:
    """The next entries by their numbers; they are outstanding."""
    entries = dict(itertools.islice(filter(None, source), count))
    for number in entries:
        source.window.track(number)
    return entries


def numbers(entries: dict[int, Entry]) -> list[int]:
    return [int(entry.fields["number"]) for entry in entries.values()]


def over(wire: Wire) -> str:
    return f"redis://127.0.0.1:{wire.port}/0"


def test_acked_messages_are_not_redelivered(redis: RedisServer, commands: Any) -> None:
    """The next reader gets the outstanding entries, in order, and then the new ones."""
    add(commands, 10)
    with RedisStream(redis.url(), STREAM, GROUP) as orders:
        assert numbers(take(orders, 10)) == list(range(10))
        for acked_numbers in ((5, 2, 7), (0, 1)):
            for number in acked_numbers:
                orders.window.ack(number)
            orders.commit(orders.window.floor)
        assert orders.window.floor == 2
        assert commands.xpending(STREAM, GROUP)["pending"] == 5
    add(commands, 2, first=10)
    with RedisStream(redis.url(), STREAM, GROUP) as orders:
        redelivered = take(orders, 7)
        assert numbers(redelivered) == [3, 4, 6, 8, 9, 10, 11]
        for number in redelivered:
            orders.window.ack(number)
        orders.commit(6)
    assert commands.xpending(STREAM, GROUP)["pending"] == 0


def test_a_floor_can_be_committed_without_a_window(redis: RedisServer, commands: Any) -> None:
    """If the reader has its own window; a repeated commit changes nothing."""
    add(commands, 5)
    with RedisStream(redis.url(), STREAM, GROUP) as orders:
        assert [number for number, _ in itertools.islice(filter(None, orders), 5)] == [0, 1, 2, 3, 4]
        orders.commit(-1)
        orders.commit(2)
        orders.commit(2)
    with RedisStream(redis.url(), STREAM, GROUP) as orders:
        assert numbers(take(orders, 2)) == [3, 4]


def test_more_than_a_page_can_be_outstanding(redis: RedisServer, commands: Any) -> None:
    """Pending entries are read and acked page by page."""
    count = 2 * PAGE + 3
    with commands.pipeline() as pipeline:
        add(pipeline, count)
        pipeline.execute()
    for _ in range(2):
        with RedisStream(redis.url(), STREAM, GROUP) as orders:
            entries = take(orders, count)
            assert numbers(entries) == list(range(count))
    with RedisStream(redis.url(), STREAM, GROUP) as orders:
        for number in take(orders, count):
            orders.window.ack(number)
        orders.commit(count - 1)
    assert commands.xpending(STREAM, GROUP)["pending"] == 0


def test_entries_of_a_lost_answer_are_read_in_order(redis: RedisServer, commands: Any, wire: Wire) -> None:
    """Redis has delivered the entries, but no client has received them. They come before all new ones: if the command
    were simply repeated, they would come after them, at the next restart."""
    add(commands, 2)
    with RedisStream(over(wire), STREAM, GROUP) as orders:
        reading = filter(None, orders)
        assert [next(reading)[0], next(reading)[0]] == [0, 1]
        orders.commit(1)
        add(commands, 2, first=2)
        wire.cut_at_the_next_answer()
        with pytest.raises(client.ConnectionError):
            next(reading)
        assert commands.xpending(STREAM, GROUP)["pending"] == 2
    wire.cut()
    add(commands, 2, first=4)
    with RedisStream(over(wire), STREAM, GROUP) as orders:
        assert numbers(take(orders, 4)) == [2, 3, 4, 5]


def test_a_commit_whose_answer_was_lost_can_be_repeated(redis: RedisServer, commands: Any, wire: Wire) -> None:
    """Ids outlive the connection: nothing is refused, nothing is lost, and only handled entries are acked."""
    add(commands, 3)
    with RedisStream(over(wire), STREAM, GROUP) as orders:
        for number in take(orders, 3):
            orders.window.ack(number)
        wire.cut_at_the_next_answer()
        with pytest.raises(client.ConnectionError):
            orders.commit(1)
        wire.cut()
        orders.commit(2)
    assert commands.xpending(STREAM, GROUP)["pending"] == 0


def test_entries_that_were_trimmed_do_not_block(
    redis: RedisServer, commands: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """They are pending but can't be read any more: they are counted, logged by id, and acked."""
    add(commands, 4)
    with RedisStream(redis.url(), STREAM, GROUP) as orders:
        ids = [entry.id for entry in take(orders, 4).values()]
    commands.xtrim(STREAM, maxlen=2, approximate=False)
    with caplog.at_level(logging.WARNING), RedisStream(redis.url(), STREAM, GROUP) as orders:
        assert numbers(take(orders, 2)) == [2, 3]
        assert orders.trimmed == 2
    assert all(f"{id} was trimmed" in caplog.text for id in ids[:2])
    assert commands.xpending(STREAM, GROUP)["pending"] == 2


def test_a_group_starts_at_the_given_position(redis: RedisServer, commands: Any) -> None:
    """With the first entry or with new ones; an existing group continues at its position."""
    add(commands, 2)
    with RedisStream(redis.url(), STREAM, "later", start="$") as orders:
        add(commands, 1, first=2)
        assert numbers(take(orders, 1)) == [2]
    add(commands, 1, first=3)
    with RedisStream(redis.url(), STREAM, "later", start="0") as orders:
        assert numbers(take(orders, 2)) == [2, 3]


def test_bytes_stay_bytes(redis: RedisServer, commands: Any) -> None:
    """For payloads that are not text."""
    commands.xadd(STREAM, {"body": b"\xff\x00"})
    with RedisStream(redis.url(), STREAM, GROUP, decode_responses=False) as orders:
        ((number, entry),) = take(orders, 1).items()
        assert entry.fields == {b"body": b"\xff\x00"}
        orders.window.ack(number)
        orders.commit(number)
    assert commands.xpending(STREAM, GROUP)["pending"] == 0


def test_reading_stops_on_request(redis: RedisServer, commands: Any) -> None:
    """In the middle of a page."""
    add(commands, 3)
    with RedisStream(redis.url(), STREAM, GROUP) as orders:
        entries = []
        for number, _ in filter(None, orders):
            entries.append(number)
            orders.stop()
    assert entries == [0]


def test_a_poison_record_becomes_a_dead_letter_while_others_go_on(redis: RedisServer, commands: Any) -> None:
    """And it is acked: no entry is pending in the end."""
    add(commands, 20)
    with RedisStream(redis.url(), STREAM, GROUP) as orders:
        poison.check_dead_letter(
            orders,
            20,
            key=lambda entry: int(entry.fields["number"]) % 5,
            is_poison=lambda entry: entry.fields["number"] == "3",
        )
    assert commands.xpending(STREAM, GROUP)["pending"] == 0


def test_another_consumer_resumes_after_a_killed_one(redis: RedisServer, commands: Any, tmp_path: Path) -> None:
    """SIGKILL in the middle of handling."""
    published = crash.records()
    for key, number in published:
        commands.xadd(STREAM, {"key": key, "number": number})
    crash.check_kill_and_resume("redis", redis.url(), STREAM, tmp_path, published)


def test_without_redis_py_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other extras do."""
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtra, match=r"lastbit\[redis\]"):
        RedisStream("redis://127.0.0.1:9", STREAM, GROUP)
