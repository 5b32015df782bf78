"""The feed and the explanation through both clients."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest

from core import feed
from core.storage.database import Database
from lastbit import (
    Appended,
    Client,
    InvalidArgument,
    InvalidRequest,
    PositionTrimmed,
    Retry,
    ServiceUnreachable,
    _calls,
)
from lastbit._protocol import Failure, Outcome, Request
from tests.mutants import mutant
from tests.sdk.conftest import Way
from tests.sdk.test_protocol import World, answer, problem, script
from tests.support.servers import running_service

EVENT = {
    "position": 3,
    "id": "x",
    "type": "card.charged",
    "batch": None,
    "key": None,
    "data": {"a": [1]},
    "at": "2026-01-02T03:04:05.000001Z",
}


def page(next: int, *positions: int) -> Outcome:
    events = [{**EVENT, "position": position, "id": str(position)} for position in positions]
    return answer(200, {"events": events, "next": next, "last": next})


# -- against the service


def test_own_events_can_be_appended_and_read(client: Client) -> None:
    """One, or many in a transaction; the same id again is a repeat."""
    before = client.events(limit=1).last
    id = uuid.uuid4().hex
    event = client.append_event(id=id, type="card.charged", key="order-1", data={"cents": 1})
    assert event == Appended(id, before + 1, False)
    repeats = client.append([{"id": id, "type": "card.charged"}, {"id": id + "b", "type": "item.reserved"}])
    assert repeats == (Appended(id, before + 1, True), Appended(id + "b", before + 2, False))
    assert client.append([]) == ()
    page = client.events(after=before)
    assert (page.next, page.last) == (before + 2, before + 2)
    first = page.events[0]
    assert (first.position, first.id, first.type, first.key, first.batch) == (
        before + 1,
        id,
        "card.charged",
        "order-1",
        None,
    )
    assert first.data == {"cents": 1}
    assert first.at.utcoffset() == timedelta(0)
    assert [event.type for event in client.events(after=before, types="item.reserved").events] == ["item.reserved"]
    page = client.events(after=before, types=["card.charged", "item.reserved"], limit=1)
    assert (len(page.events), page.next, page.last) == (1, before + 1, before + 2)


def test_following_gets_new_events_and_resumes_after_a_position(client: Client, service_url: str) -> None:
    """Filtered by type and batch. Every follower gets the end of a batch, whichever client caused it."""
    batch = client.open(key="nightly", items=1, sealed=True)
    start = client.events(limit=1).last
    with ThreadPoolExecutor(1) as pool, Client(service_url) as other:
        follower = other.follow(after=start, types=("batch.completed", "batch.succeeded"), batch=batch.id)
        events = pool.submit(lambda: list(islice(follower, 2)))
        client.append_event(id=uuid.uuid4().hex, type="noise")
        client.ack(batch.ids)
        completed, succeeded = events.result(60)
    assert (completed.id, succeeded.id) == (f"batch:{batch.id}:completed", f"batch:{batch.id}:succeeded")
    assert (completed.batch, completed.key, completed.data["acked"]) == (batch.id, "nightly", 1)
    second_follower = client.follow(after=completed.position, batch=batch.id)
    assert next(second_follower) == succeeded


def test_the_async_client_does_the_same(way: Way) -> None:
    """With await and an async iterator."""

    async def work() -> None:
        async with way.async_client() as client:
            start = (await client.events(limit=1)).last
            ids = [uuid.uuid4().hex for _ in range(5)]

            async def append() -> None:
                for id in ids:
                    await client.append_event(id=id, type="step")

            appending = asyncio.create_task(append())
            ids_read = []
            async for event in client.follow(after=start, types="step"):
                ids_read.append(event.id)
                if len(ids_read) == len(ids):
                    break
            await appending
            assert ids_read == ids
            assert [receipt.repeated for receipt in await client.append([{"id": ids[0], "type": "step"}])] == [True]
            batch = await client.open(items=1)
            assert [reason.code for reason in (await batch.explain()).reasons][:1] == ["not_sealed"]

    asyncio.run(work())


def test_following_continues_after_the_service_was_killed(sqlite_url: str) -> None:
    """Without loss and without repeats, though the service goes away in the middle of a poll."""
    with running_service(sqlite_url) as running:
        under_way = threading.Event()
        with Client(running.url) as client, ThreadPoolExecutor(1) as pool:

            def follow() -> list[int]:
                positions = []
                with Client(running.url, retry=Retry(attempts=1000, cap=0.5)) as follower:
                    for event in follower.follow():
                        positions.append(event.position)
                        if event.position == 3:
                            under_way.set()
                        if event.position == 6:
                            break
                return positions

            future = pool.submit(follow)
            client.append([{"id": str(number), "type": "a"} for number in range(3)])
            assert under_way.wait(30)
            running.stop(9)
            running.start()
            client.append([{"id": str(number), "type": "a"} for number in range(2, 6)])
            assert future.result(60) == [1, 2, 3, 4, 5, 6]


def test_a_trimmed_position_has_its_own_error(sqlite_url: str) -> None:
    """Following from there raises it; without a position it starts with the kept events."""
    with running_service(sqlite_url) as running, Client(running.url) as client:
        client.append([{"id": str(number), "type": "a"} for number in range(4)])
        with Database(sqlite_url) as database:
            assert feed.trim(database, timedelta(0)) == 4
        client.append_event(id="kept", type="a")
        with pytest.raises(PositionTrimmed) as excinfo:
            client.events(after=1)
        assert (excinfo.value.status, excinfo.value.code) == (410, "position_trimmed")
        with pytest.raises(PositionTrimmed):
            next(client.follow(after=0))
        assert next(client.follow()).id == "kept"


def test_a_batch_is_explained(client: Client) -> None:
    """The codes, the sentences, and the facts by name."""
    batch = client.open(items=3)
    client.ack(batch.ids[0])
    explanation = batch.explain()
    assert (explanation.batch, explanation.state, explanation.done) == (batch.id, "open", False)
    assert [reason.code for reason in explanation.reasons] == ["not_sealed", "pending"]
    assert explanation.reasons[1].facts["pending"] == 2
    assert "code" not in explanation.reasons[1].facts
    assert explanation.reasons[1].text.startswith("2 of 3 items are pending")


@pytest.mark.parametrize(
    "events",
    [
        [1],
        ["x"],
        [{"id": "x", "type": "a", "data": {1, 2}}],
        [{"id": "x", "type": "a", "data": float("nan")}],
        [{"id": "\ud800"}],
    ],
    ids=["number", "text", "set", "nan", "surrogate"],
)
def test_events_without_a_json_form_are_refused_by_the_client(client: Client, events: list[Any]) -> None:
    """Before anything is sent."""
    with pytest.raises(InvalidArgument, match="JSON"):
        client.append(events)


def test_reserved_names_are_refused_by_the_service(client: Client) -> None:
    """With their location."""
    with pytest.raises(InvalidRequest) as excinfo:
        client.append_event(id="batch:7:completed", type="a")
    assert excinfo.value.errors[0]["place"] == "body.events[0].id"


# -- without a socket


def first_positions(world: World, count: int, **filters: Any) -> list[int]:
    """The positions of a follower's first events."""
    flow = _calls.follow(world.service(), filters.get("after"), filters.get("types", ()), filters.get("batch"))

    class Enough(Exception):
        pass

    class Some(list[Any]):
        def append(self, event: Any) -> None:
            super().append(event.position)
            if len(self) == count:
                raise Enough

    world.emitted = Some()
    with pytest.raises(Enough):
        world.run(flow)
    return world.emitted


def test_each_poll_starts_where_the_previous_one_ended() -> None:
    """This also holds if a filter excluded every event; a failed poll is repeated unchanged."""
    world = World(
        script(
            page(7, 2, 7), page(9), Failure("connection reset"), problem(503, "unavailable"), page(11, 11), page(12, 12)
        )
    )
    assert first_positions(world, 4, types=["a", "b"], batch=7) == [2, 7, 11, 12]
    positions = [dict(request.params).get("after") for request in world.requests]
    assert positions == [None, "7", "9", "9", "9", "11"]
    for request in world.requests:
        assert ("type", "a") in request.params
        assert ("type", "b") in request.params
        assert ("batch", "7") in request.params
        assert ("wait", "30") in request.params
        assert request.timeout == 60


def test_polls_answered_at_once_are_sent_once_a_second() -> None:
    """A service that is stopping answers at once; the client then polls once a second."""
    world = World(script(page(1), page(1), page(1), page(2, 2)))
    first_positions(world, 1, after=1)
    assert world.pauses == [1.0, 1.0, 1.0]


@mutant(
    "a-poll-behind-is-followed-by-a-pause",
    "lastbit._calls:poll_forever",
    "not elements and not (start != after < last) and rest > 0",
    "not elements  and rest > 0",
)
def test_a_poll_that_ended_before_the_end_of_the_feed_is_continued_at_once() -> None:
    """Its page is empty, as a filter excluded all the events that it examined."""

    def behind(next: int) -> Outcome:
        return answer(200, {"events": [], "next": next, "last": 9})

    world = World(script(behind(3), behind(6), behind(6), page(9), page(9, 9)))
    assert first_positions(world, 1, after=0) == [9]
    assert [dict(request.params)["after"] for request in world.requests] == ["0", "3", "6", "6", "9"]
    assert world.pauses == [1.0, 1.0]  # after the page that had made no progress, and at the end


def test_a_refusal_ends_following() -> None:
    """The caller must handle a trimmed position."""
    world = World(script(page(3, 3), problem(410, "position_trimmed")))
    with pytest.raises(PositionTrimmed):
        world.run(_calls.follow(world.service(), None, (), None))


def test_a_long_poll_that_breaks_at_its_end_has_the_whole_deadline_left() -> None:
    """The time that the service holds a poll does not count as failure, so even a short patience allows a retry."""
    answers = iter([Failure("connection reset"), Failure("connection refused"), page(5, 5)])

    def reply(request: Request) -> Outcome:
        outcome = next(answers)
        if isinstance(outcome, Failure) and "reset" in outcome.cause:
            world.clock += 30
        return outcome

    world = World(reply)
    impatient = world.service(retry=Retry(attempts=5, deadline=20))
    answer_page = world.run(_calls.events(impatient, 4, (), None, wait=30))
    assert answer_page.events[0].position == 5
    assert answer_page.events[0].data == json.loads(json.dumps(EVENT["data"]))


def test_the_deadline_of_a_long_poll_ends_too() -> None:
    """The deadline counts from the first failure."""
    world = World(lambda _: Failure("connection refused"))
    with pytest.raises(ServiceUnreachable):
        world.run(_calls.events(world.service(retry=Retry(attempts=1000, deadline=20, cap=4)), 4, (), None, wait=30))
    assert 15 < sum(world.pauses) < 20
