"""Requests, retries, paging, splitting and waiting, without a socket and with a test clock."""

from __future__ import annotations

import base64
import json
import math
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastbit import _arguments, _calls, _masks, errors, groups
from lastbit._protocol import Answer, Emit, Failure, Flow, Outcome, Pause, Request, Service, base_url
from lastbit.ids import ItemId, ItemIds, item_id
from lastbit.models import OpenOptions
from lastbit.retry import Retry, retry_after_seconds
from lastbit.search import query
from lastbit.streams._membership import Held, Membership, Sync
from lastbit.streams.group import beat
from lastbit.tallies import calls as tallies
from tests.mutants import mutant

BATCH = {
    "id": 7,
    "key": None,
    "labels": {},
    "state": "open",
    "group_size": 64,
    "items": 10,
    "acked": 0,
    "failed": 0,
    "pending": 10,
    "complete": False,
    "succeeded": False,
    "parent": None,
    "expires_in": None,
    "deadline": None,
    "tolerated_failures": None,
    "tolerated_failure_percentage": None,
    "on_exceeded": "continue",
    "exceeded": False,
    "created_at": "2026-01-02T03:04:05Z",
    "updated_at": "2026-01-02T03:04:05Z",
    "sealed_at": None,
    "ended_at": None,
}


@dataclass
class World:
    """Drives a flow: `reply` returns the outcome of each request, and pauses and long polls move the clock."""

    reply: Callable[[Request], Outcome]
    clock: float = 0.0
    requests: list[Request] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    emitted: list[Any] = field(default_factory=list)

    def service(self, **options: Any) -> Service:
        return Service("http://service", now=lambda: self.clock, chance=lambda: 0.5, **options)

    def run(self, flow: Flow[Any]) -> Any:
        outcome: Outcome = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as end:
                return end.value
            outcome = None
            if isinstance(step, Request):
                # A copy: a request changed for its retry must not change the record.
                self.requests.append(replace(step, headers=dict(step.headers)))
                outcome = self.reply(step)
            elif isinstance(step, Pause):
                self.pauses.append(step.seconds)
                self.clock += step.seconds
            else:
                assert isinstance(step, Emit)
                self.emitted.append(step.value)


def answer(status: int, body: Any = None, **headers: str) -> Answer:
    header_fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, header_fields, b"" if body is None else json.dumps(body).encode())


def script(*outcomes: Outcome) -> Callable[[Request], Outcome]:
    remaining_outcomes = iter(outcomes)
    return lambda _: next(remaining_outcomes)


def problem(status: int, code: str, **headers: str) -> Answer:
    return answer(status, {"code": code, "detail": f"{code} happened", "status": status}, **headers)


PASSING: list[Outcome] = [
    Failure("connection refused"),
    problem(429, "rate_limited"),
    answer(502),
    problem(503, "unavailable"),
    answer(504),
]


@pytest.mark.parametrize("call", [_calls.seal, lambda *of: _calls.update(*of, {"deadline": None}, None)])
@pytest.mark.parametrize("trouble", PASSING, ids=str)
def test_a_temporary_error_is_retried_with_the_same_key(trouble: Outcome, call: Callable[..., Any]) -> None:
    """Each POST and PATCH has an Idempotency-Key, and its retries have the same one and the same body."""
    world = World(script(trouble, trouble, answer(200, {**BATCH, "newly": False, "newly_succeeded": False})))
    batch = world.run(call(world.service(), 7))
    assert batch.id == 7
    assert len(world.requests) == 3
    assert len({request.headers["idempotency-key"] for request in world.requests}) == 1
    assert world.requests[0] == world.requests[2]
    assert world.pauses == [0.05, 0.1]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (401, "unauthorized"),
        (403, "forbidden"),
        (404, "batch_not_found"),
        (409, "batch_sealed"),
        (422, "invalid_request"),
    ],
)
def test_a_refusal_is_not_retried(status: int, code: str) -> None:
    """It would be refused again; the error has the code."""
    world = World(script(problem(status, code)))
    with pytest.raises(errors.ServiceError) as excinfo:
        world.run(_calls.extend(world.service(), 7, 5, None))
    assert (excinfo.value.status, excinfo.value.code) == (status, code)
    assert "happened" in str(excinfo.value)


def test_two_calls_have_two_keys() -> None:
    """A key stands for one intention, and two calls are two."""
    world = World(lambda _: answer(200, {**BATCH, "newly": False, "newly_succeeded": False}))
    world.run(_calls.seal(world.service(), 7))
    world.run(_calls.seal(world.service(), 7))
    assert world.requests[0].headers["idempotency-key"] != world.requests[1].headers["idempotency-key"]


def test_the_callers_key_is_sent() -> None:
    """Unchanged."""
    world = World(lambda _: answer(201, {"batch": 7, "group_size": 64, "start": 0, "count": 5, "items": 5}))
    world.run(_calls.extend(world.service(), 7, 5, "chunk-1"))
    assert world.requests[0].headers["idempotency-key"] == "chunk-1"


@pytest.mark.parametrize(
    ("call", "batch"),
    [
        (lambda service: _calls.get(service, 7), "7"),
        (lambda service: _calls.extend(service, 7, 5, None), "7"),
        (lambda service: _calls.resolve(service, "acks", _masks.pieces(["7:0:1", "8:0:1"]), None), "7"),
        (lambda service: _calls.resolve(service, "failures", _masks.pieces("7:0:1"), "reason"), "7"),
        (lambda service: _calls.resolve(service, "skips", _masks.pieces(ItemIds(7, 64, range(9))), None), "7"),
        (lambda service: _calls.open_batch(service, OpenOptions(items=9, parent="7:0:1"), None), "7"),
        (lambda service: _calls.events(service, None, (), 7), "7"),
        (lambda service: _calls.open_batch(service, OpenOptions(items=9), None), None),
        (lambda service: _calls.events(service, None, (), None), None),
        (lambda service: _calls.counts(service, []), None),
        (lambda service: _calls.append(service, [{"id": "one", "type": "test"}]), None),
    ],
)
def test_a_call_names_its_batch_for_proxies(call: Callable[[Service], Flow[Any]], batch: str | None) -> None:
    """The first of several."""
    world = World(script(problem(422, "invalid_request")))
    with pytest.raises(errors.InvalidRequest):
        world.run(call(world.service()))
    assert world.requests[0].headers.get("lastbit-batch") == batch


@pytest.mark.parametrize("key", ["", "x" * 256, "with blank", "line\nfeed", "ключ"])
def test_a_key_that_fits_no_header_is_refused_before_anything_is_sent(key: str) -> None:
    """1 to 255 visible ASCII characters."""
    world = World(script())
    with pytest.raises(errors.InvalidArgument, match="visible ASCII"):
        world.run(_calls.extend(world.service(), 7, 5, key))


def test_a_call_gives_up_after_its_attempts() -> None:
    """And the error names the address, the cause and the number of attempts."""
    world = World(lambda _: Failure("connection refused"))
    with pytest.raises(errors.ServiceUnreachable, match="http://service") as excinfo:
        world.run(_calls.get(world.service(retry=Retry(attempts=3)), 7))
    assert excinfo.value.attempts == len(world.requests) == 3
    assert "connection refused" in str(excinfo.value)
    assert "GET /v1/batches/7" in str(excinfo.value)


@pytest.mark.parametrize("key", [None, "mine"])
@pytest.mark.parametrize("sent", [True, False])
def test_only_a_repeat_that_can_have_no_second_effect_is_called_safe(key: str | None, sent: bool) -> None:
    """Each call without a key has a new one. Nothing has happened if no attempt got a connection."""
    for flow, is_repeatable in (
        (lambda service: _calls.extend(service, 7, 5, key), key is not None),
        (lambda service: _calls.redrive(service, 7, None, None, None, False, None, key), key is not None),
        (lambda service: _calls.seal(service, 7), True),
    ):
        world = World(script(Failure("no connection", sent=False), Failure("no response", sent=sent)))
        with pytest.raises(errors.ServiceUnreachable) as caught:
            world.run(flow(world.service(retry=Retry(attempts=2))))
        assert (caught.value.sent, caught.value.repeatable) == (sent, is_repeatable or not sent)
        assert ("may have been carried out" in str(caught.value)) == (not caught.value.repeatable)


def test_a_permanent_failure_is_not_retried() -> None:
    """Such as an untrusted certificate."""
    world = World(lambda _: Failure("bad certificate", lasting=True))
    with pytest.raises(errors.ServiceUnreachable):
        world.run(_calls.get(world.service(), 7))
    assert len(world.requests) == 1


def test_a_call_gives_up_before_a_pause_beyond_the_deadline() -> None:
    """Waiting first would gain nothing; the error has Retry-After for callers with more time."""
    world = World(lambda _: problem(503, "unavailable", retry_after="120"))
    with pytest.raises(errors.Unavailable) as excinfo:
        world.run(_calls.get(world.service(retry=Retry(deadline=60)), 7))
    assert excinfo.value.retry_after == 120
    assert world.pauses == []


def test_retry_after_is_a_lower_bound_of_the_pause() -> None:
    """In seconds or as a date."""
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    retry_date = format_datetime(now + timedelta(seconds=7), usegmt=True)
    outcomes = [
        problem(503, "unavailable", retry_after="3"),
        problem(429, "rate_limited", retry_after=retry_date, date=format_datetime(now, usegmt=True)),
        answer(200, BATCH),
    ]
    world = World(script(*outcomes))
    world.run(_calls.get(world.service(), 7))
    assert world.pauses == [3.05, 7.1]  # with the usual jitter on top


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "0"}, 0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Fri, 02 Jan 2026 03:04:15 GMT"}, 10),
        ({"retry-after": "Fri, 02 Jan 2026 03:04:15 GMT", "date": "Fri, 02 Jan 2026 03:04:14 GMT"}, 1),
        ({"retry-after": "Fri, 02 Jan 2026 03:04:00 GMT"}, 0),
        ({"retry-after": "Fri, 99 Jan 2026 03:04:00 GMT"}, None),
        ({"retry-after": "9" * 400}, None),
    ],
)
def test_a_retry_after_is_read_or_ignored(headers: dict[str, str], seconds: float | None) -> None:
    """A date counts from the answer's own Date, so that clocks need not agree."""
    assert retry_after_seconds(headers, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) == seconds


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_pauses_are_bounded(attempt: int, chance: float) -> None:
    """For any number of attempts."""
    pause = Retry(attempts=20_000, deadline=1e9).pause(attempt, 0, None, chance)
    assert pause is not None
    assert 0 <= pause <= 10


def test_a_delete_whose_answer_was_lost_succeeds() -> None:
    """A batch that the retry no longer finds was deleted by the first attempt; without a retry that is an error."""
    world = World(script(Failure("connection reset"), problem(404, "batch_not_found")))
    world.run(_calls.delete(world.service(), 7))
    world = World(script(problem(404, "batch_not_found")))
    with pytest.raises(errors.BatchNotFound):
        world.run(_calls.delete(world.service(), 7))


def test_an_answer_of_another_service_is_reported_as_such() -> None:
    """A web page, a redirect, a document of another service."""
    nested = Answer(200, {}, b"[" * 100_000)
    for answer_ in (Answer(200, {}, b"<html>"), answer(200, {"hello": "world"}), answer(200, [1]), answer(302), nested):
        world = World(script(answer_))
        with pytest.raises(errors.UnexpectedAnswer, match="Is this the address of a Lastbit service"):
            world.run(_calls.get(world.service(), 7))
    for page in (b"<html>", b"[" * 100_000):
        world = World(script(Answer(404, {}, page)))
        with pytest.raises(errors.NotFound, match="without the error document") as excinfo:
            world.run(_calls.get(world.service(), 7))
        assert excinfo.value.code == "http_404"


@mutant(
    "a-worker-reports-drained-partitions-without-an-epoch",
    "lastbit.streams.group:beat",
    "step.drained",
    "[partition for partition, _ in step.drained]",
)
def test_a_worker_reports_the_epoch_that_it_has_drained() -> None:
    """A sync that arrives late must not drain a later epoch."""
    body = {"ttl": 10.0, "assigned": [], "release": [], "release_within": 30.0}
    world = World(script(answer(200, body), answer(200, body)))
    membership: Membership[Held] = Membership(
        lambda grant, lease: pytest.fail("nothing was granted"), lambda: 0.0, lambda: 0.5, "g"
    )
    step = Sync(drained=((3, 7), (4, 1)), limit=None, sent=0.0, timeout=5.0)
    world.run(beat(world.service(), "g", "w", None, membership, step))
    world.run(groups.sync(world.service(), "g", "w", "s", [5, (6, 2)], None))
    assert [json.loads(sent_request.body or b"")["drained"] for sent_request in world.requests] == [
        [{"partition": 3, "epoch": 7}, {"partition": 4, "epoch": 1}],
        [5, {"partition": 6, "epoch": 2}],
    ]
    for bad_entry in ((1,), (1, 2, 3), None, "x"):
        with pytest.raises(errors.InvalidArgument, match="a partition and its epoch"):
            world.run(groups.sync(world.service(), "g", "w", "s", [bad_entry], None))  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("capacity", "limit", "sent"), [(None, None, None), (3, None, 3), (None, 2, 2), (3, 2, 2), (1, 2, 1), (3, 0, 0)]
)
def test_a_worker_that_stops_requests_no_more_than_it_keeps(
    capacity: int | None, limit: int | None, sent: int | None
) -> None:
    body = {"ttl": 10.0, "assigned": [], "release": [], "release_within": 30.0}
    world = World(script(answer(200, body)))
    membership: Membership[Held] = Membership(
        lambda grant, lease: pytest.fail("nothing was granted"), lambda: 0.0, lambda: 0.5, "g"
    )
    step = Sync(drained=(), limit=limit, sent=0.0, timeout=5.0)
    world.run(beat(world.service(), "g", "w", capacity, membership, step))
    assert json.loads(world.requests[0].body or b"").get("capacity") == sent


def test_the_token_is_sent_as_bearer_and_printed_nowhere() -> None:
    """Not even in the service's repr, which may be logged."""
    world = World(script(answer(200, BATCH)))
    service = world.service(token="s3cret")
    world.run(_calls.get(service, 7))
    assert world.requests[0].headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(service)


@pytest.mark.parametrize(
    "token",
    ["lastbit_s3cret ", "lastbit_s3cret\n", "token  lastbit_s3cret", "s3cret" * 2000],
    ids=["blank", "line end", "with the word before it", "long"],
)
def test_a_token_that_cannot_be_sent_is_refused_and_not_printed(token: str) -> None:
    """Errors get into logs. A token from a file or a variable often has a blank or a line end after it."""
    with pytest.raises(errors.InvalidArgument, match="without blanks") as refused:
        Service.named(None, token, 30, None)
    assert "s3cret" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x/?a=1", "//x"])
def test_an_invalid_address_is_refused(url: str) -> None:
    """Before anything is sent, with an example of a valid address."""
    with pytest.raises(errors.InvalidArgument, match="expected a URL like"):
        base_url(url)


def test_an_address_may_have_a_path() -> None:
    """For a service behind a gateway; trailing slashes make no difference."""
    assert base_url("https://x.example/lastbit/") == "https://x.example/lastbit"


@pytest.mark.parametrize("batch", [-1, "7", 7.0, True, None])
def test_a_batch_id_is_a_whole_number(batch: Any) -> None:
    """Anything else would be another path."""
    world = World(script())
    with pytest.raises(errors.InvalidArgument, match="batch id"):
        world.run(_calls.get(world.service(), batch))


def test_only_given_arguments_are_sent() -> None:
    """The service has the defaults."""
    body = {**BATCH, "start": 0, "count": 0, "newly": False}
    world = World(lambda _: answer(201, body))
    world.run(_calls.open_batch(world.service(), {"key": None}, None))
    week = timedelta(days=7)
    deadline = datetime(2026, 1, 2, 5, tzinfo=timezone(timedelta(hours=2)))
    options: OpenOptions = {
        "key": "k",
        "labels": {"a": "b"},
        "group_size": 64,
        "items": 3,
        "sealed": True,
        "parent": ItemId(6, 0, 1),
        "expires_in": week,
        "tolerated_failures": 3,
        "tolerated_failure_percentage": 2,
        "on_exceeded": "cancel",
        "deadline": deadline,
    }
    world.run(_calls.open_batch(world.service(), options, None))
    bodies = [json.loads(request.body or b"null") for request in world.requests]
    assert bodies[0] == {}
    assert bodies[1] == {
        "key": "k",
        "labels": {"a": "b"},
        "group_size": 64,
        "items": 3,
        "sealed": True,
        "parent": "6:0:1",
        "expires_in": 604800,
        "tolerated_failures": 3,
        "tolerated_failure_percentage": 2,
        "on_exceeded": "cancel",
        "deadline": "2026-01-02T03:00:00+00:00",
    }


def test_a_deadline_is_a_moment_or_a_time_from_now() -> None:
    """A naive datetime would be another moment on each machine, so it is refused before anything is sent."""
    assert _arguments.deadline(datetime(2026, 1, 2, 3, tzinfo=UTC)) == "2026-01-02T03:00:00+00:00"
    before = datetime.now(UTC)
    after_an_hour = datetime.fromisoformat(_arguments.deadline(timedelta(hours=1)))
    assert before + timedelta(hours=1) <= after_an_hour <= datetime.now(UTC) + timedelta(hours=1)
    with pytest.raises(errors.InvalidArgument, match="time zone"):
        _arguments.deadline(datetime(2026, 1, 2, 3))  # noqa: DTZ001


# -- paging


def test_all_pages_are_read_including_empty_ones() -> None:
    """Only a page without `next` is the last."""
    ranges = [{"start": n, "end": n + 1, "first": f"7:0:{n}", "last": f"7:0:{n}"} for n in range(3)]
    pages = [
        answer(200, {"ranges": ranges[:1], "next": "a"}),
        answer(200, {"ranges": [], "next": "b"}),
        answer(200, {"ranges": ranges[1:], "next": None}),
    ]
    world = World(script(*pages))
    world.run(_calls.pending(world.service(), 7, 2))
    assert [item_range.start for item_range in world.emitted] == [0, 1, 2]
    assert [dict(request.params).get("cursor") for request in world.requests] == [None, "a", "b"]
    assert {dict(request.params)["limit"] for request in world.requests} == {"2"}


def test_labels_are_sent_one_by_one() -> None:
    """Several labels must all match."""
    world = World(script(answer(200, {"batches": [BATCH], "next": None})))
    world.run(_calls.batches(world.service(), query({"key": "k", "labels": {"a": "b", "c": "d:e"}}, "open"), 100))
    assert world.requests[0].params == (
        ("state", "open"),
        ("key", "k"),
        ("label", "a:b"),
        ("label", "c:d:e"),
        ("limit", "100"),
    )


# -- waiting


def held(world: World, ends_at: float) -> Callable[[Request], Outcome]:
    """A service that holds its answer for the requested wait or until the batch completes."""

    def reply(request: Request) -> Outcome:
        seconds = float(dict(request.params).get("wait", 0))
        world.clock = max(world.clock, min(world.clock + seconds, ends_at))
        complete = world.clock >= ends_at
        return answer(200, {**BATCH, "state": "complete" if complete else "open"})

    return reply


def test_a_wait_lasts_as_long_as_the_batch_takes() -> None:
    """By long polls, one after the other, each with enough time for its answer."""
    world = World(script())
    world.reply = held(world, 70)
    world.run(_calls.wait(world.service(timeout=5), 7, None))
    assert world.emitted[-1].state == "complete"
    assert [dict(request.params)["wait"] for request in world.requests] == ["30", "30", "30"]
    assert world.requests[0].timeout == 35
    assert world.pauses == []
    assert world.clock == 70


@pytest.mark.parametrize("timeout", [0, 0.5, 2.5, 31, 65.25])
def test_a_wait_ends_in_time(timeout: float) -> None:
    """With an error that has the batch in its last known state."""
    world = World(script())
    world.reply = held(world, 1000)
    with pytest.raises(errors.WaitTimeout) as excinfo:
        world.run(_calls.wait(world.service(), 7, timeout))
    assert world.clock == pytest.approx(timeout)
    assert excinfo.value.batch.state == "open"
    assert isinstance(excinfo.value, TimeoutError)


def test_a_service_that_answers_polls_at_once_is_polled_once_a_second() -> None:
    """A wait never floods the service."""
    world = World(lambda _: answer(200, BATCH))
    with pytest.raises(errors.WaitTimeout):
        world.run(_calls.wait(world.service(), 7, 10))
    assert len(world.requests) <= 12
    assert max(world.pauses) <= 1


class Reached(Exception):
    """The poll after the outage was answered."""


@pytest.mark.parametrize("outage", [40, 70])
@pytest.mark.parametrize(
    "polls",
    [partial(_calls.wait, batch=7, timeout=None), partial(_calls.follow, after=0, types=(), batch=None)],
    ids=["wait", "follow"],
)
def test_polls_go_on_after_an_outage_of_less_than_a_minute(
    polls: Callable[[Service], Flow[Any]], outage: float
) -> None:
    """However many attempts that takes: a service that has answered is restarting. Without any answer, the address may
    be wrong, so the first poll gives up after eight attempts, within seconds."""
    world = World(script())
    is_answered = False

    def reply(request: Request) -> Outcome:
        nonlocal is_answered
        if is_answered and world.clock < outage:
            return Failure("connection refused")
        if is_answered:
            raise Reached
        is_answered = True
        return answer(200, BATCH if "batches" in request.url else {"events": [], "next": 0, "last": 0})

    world.reply = reply
    with pytest.raises(Reached if outage < 60 else errors.ServiceUnreachable):
        world.run(polls(world.service()))
    assert len(world.requests) > 9
    unreachable = World(lambda _: Failure("connection refused"))
    with pytest.raises(errors.ServiceUnreachable):
        unreachable.run(polls(unreachable.service()))
    assert len(unreachable.requests) == 8


def test_a_short_wait_does_not_retry_for_a_minute() -> None:
    """The caller's time is shorter than the policy's."""
    world = World(lambda _: Failure("connection refused"))
    with pytest.raises(errors.ServiceUnreachable):
        world.run(_calls.wait(world.service(retry=Retry(attempts=1000)), 7, 2))
    assert world.clock <= 2


# -- the requests of a call with ids


def sent_items(ids: Any) -> list[str]:
    return [item for piece in _masks.pieces(ids) for item in piece["items"]]


def expanded(pieces: Iterator[_masks.Piece], group_size: int) -> list[str]:
    items = []
    for piece in pieces:
        for mask in piece["groups"]:
            bits = base64.b64decode(mask["bits"], validate=True)
            assert 1 <= len(bits) <= group_size // 8
            items += [
                f"{mask['batch']}:{mask['group']}:{index}"
                for index in range(8 * len(bits))
                if bits[index // 8] >> (index % 8) & 1
            ]
    return items


@pytest.mark.parametrize("ids", ["7:0:1", ItemId(7, 0, 1), ["7:0:1"], (ItemId(7, 0, 1),), {"7:0:1"}])
def test_one_id_or_many_are_accepted(ids: Any) -> None:
    """As text or as parts, alone or in any collection."""
    assert sent_items(ids) == ["7:0:1"]


def test_without_ids_nothing_is_sent() -> None:
    """No request, and the answer is empty."""
    world = World(script())
    for no_items in ([], iter([]), ItemIds(7, 64, range(0))):
        result = world.run(_calls.resolve(world.service(), "acks", _masks.pieces(no_items), None))  # type: ignore[arg-type]
        assert (result.applied, result.completed) == (0, ())


def test_a_large_collection_is_split_and_each_id_is_sent_once() -> None:
    """At most 10,000 a request; duplicates would be counted as repeats."""
    ids = [item_id(7, number) for number in range(25_000)]
    pieces = list(_masks.pieces(ids + ids[:5000]))
    assert [len(piece["items"]) for piece in pieces] == [10_000, 10_000, 5_000]
    assert [item for piece in pieces for item in piece["items"]] == ids


def test_the_answers_of_a_split_call_are_merged() -> None:
    """And an error in between has the answers before it."""
    completion = {"batch": 7, "key": None, "newly": True, "succeeded": True, "newly_succeeded": True}
    first = {"applied": 9_999, "repeated": 1, "completed": [], "rejected": []}
    second = {"applied": 5_000, "repeated": 0, "completed": [completion], "rejected": []}
    ids = [item_id(7, number) for number in range(15_000)]
    world = World(script(answer(200, first), answer(200, second)))
    result = world.run(_calls.resolve(world.service(), "acks", _masks.pieces(ids), None))
    assert (result.applied, result.repeated, len(result.completed)) == (14_999, 1, 1)
    assert len({request.headers["idempotency-key"] for request in world.requests}) == 2

    world = World(script(answer(200, first), problem(403, "forbidden")))
    with pytest.raises(errors.Forbidden) as excinfo:
        world.run(_calls.resolve(world.service(), "acks", _masks.pieces(ids), None))
    assert excinfo.value.partial is not None
    assert excinfo.value.partial.applied == 9_999


def test_a_malformed_id_anywhere_stops_a_collection_before_anything_is_sent() -> None:
    """The error names its position."""
    ids: list[Any] = [item_id(7, number) for number in range(20_000)]
    ids[15_000] = "7:0"
    with pytest.raises(errors.MalformedItem, match="position 15000: '7:0' is not an item id") as excinfo:
        _masks.pieces(ids)
    assert excinfo.value.position == 15_000


@pytest.mark.parametrize("wrong", ["7:0", b"7:0:1", [7], [None], ["7:0:1", ""], [("7", "0", "1")], None, 7])
def test_a_value_that_is_no_id_is_malformed(wrong: Any) -> None:
    """For every type; the error shows the value unchanged."""
    first = wrong[-1] if isinstance(wrong, list) else wrong
    with pytest.raises(errors.MalformedItem, match=re.escape(f": {first!r} is not an item id")):
        _masks.pieces(wrong)


NO_TEXT = "\ud800"
"""Python's reading of a name that is not UTF-8."""


@pytest.mark.parametrize(
    "flow",
    [
        lambda service: _calls.open_batch(service, {"labels": {"file": NO_TEXT}}, None),
        lambda service: _calls.open_batch(service, {"key": cast(str, b"k")}, None),
        lambda service: _calls.extend(service, 7, math.nan, None),
        lambda service: _calls.resolve(service, "failures", _masks.pieces("7:0:1"), NO_TEXT),
        lambda service: _calls.batches(service, query({"key": NO_TEXT}), 10),
        lambda service: _calls.events(service, None, [NO_TEXT], None),
        lambda service: tallies.value(service, "screws", NO_TEXT),
        lambda service: _calls.append(service, [5]),
    ],
    ids=["label", "key", "number", "reason", "filter", "type", "path", "event"],
)
def test_values_without_a_json_form_are_refused_before_anything_is_sent(flow: Any) -> None:
    """Texts without a UTF-8 form, numbers without a JSON form, and other types."""
    world = World(script())
    with pytest.raises(errors.InvalidArgument, match="be encoded as"):
        world.run(flow(world.service()))
    assert not world.requests


def test_an_endless_iterator_is_read_piece_by_piece() -> None:
    """So that any number of ids can be acked in constant memory."""

    def ids() -> Iterator[str]:
        number = 0
        while True:
            yield item_id(7, number)
            number += 1

    pieces = _masks.pieces(ids())
    assert len(next(pieces)["items"]) == 10_000
    assert next(pieces)["items"][0] == item_id(7, 10_000)


@given(
    st.sampled_from([64, 72, 512]),
    st.integers(0, 1000),
    st.integers(0, 700),
    st.sampled_from([1, 1, 1, 2, 3, 63, 64, -1, -5]),
)
def test_a_range_of_ids_is_sent_as_masks_of_exactly_its_bits(size: int, start: int, length: int, step: int) -> None:
    """For every range of items and groups."""
    ids = ItemIds(7, size, range(start, start + length))[::step]
    assert sorted(expanded(_masks.pieces(ids), size)) == sorted(ids)


def test_a_sparse_range_is_sent_as_ids() -> None:
    """If a mask would be longer."""
    ids = ItemIds(7, 8192, range(0, 10_000_000, 1000))[:10]
    assert sent_items(ids) == list(ids)


@pytest.mark.parametrize("size", [64, 8192, 32768])
def test_a_piece_of_masks_stays_below_the_limits(size: int) -> None:
    """4,096 groups and 8 MiB, for any group size; no group is in two pieces."""
    ids = ItemIds(2**53 - 1, size, range(5, 5 + size * 9000))
    groups = []
    for piece in _masks.pieces(ids):
        body = json.dumps({**piece, "reason": "x" * 1000}, separators=(",", ":"))
        assert len(body) < 8 * 2**20
        assert len(piece["groups"]) <= 4096
        groups += [mask["group"] for mask in piece["groups"]]
    assert groups == list(range(9001))
