"""The clients with a real service, and with one that loses its answers."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import re
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import httpx
import pytest

from lastbit import (
    AckResult,
    AsyncBatchHandle,
    AsyncClient,
    Batch,
    BatchEnded,
    BatchHandle,
    BatchNotFound,
    BatchSealed,
    Callback,
    Client,
    ClientClosed,
    Completed,
    Conflict,
    Forbidden,
    IdempotencyKeyReused,
    InvalidArgument,
    InvalidRequest,
    ItemId,
    ItemResolved,
    MalformedItem,
    NotRefreshed,
    Retry,
    ServiceUnreachable,
    StateCounts,
    Unavailable,
    WaitTimeout,
    _calls,
)
from lastbit.integrations import fan_out
from lastbit.search import Filters
from tests.sdk.conftest import ScriptedService, Way

FAST = Retry(attempts=4, base=0)


@pytest.fixture
def losing_answers(scripted_service: Any, service_url: str) -> Iterator[Any]:
    """In front of the real service: the first answer to each distinct request is lost."""
    lost_answers: set[str] = set()
    with httpx.Client(base_url=service_url, timeout=60) as real:

        def reply(request: Any) -> Any:
            request_headers = {
                name: value
                for name, value in request.headers.items()
                if name in {"idempotency-key", "content-type", "accept"}
            }
            answer = real.request(request.method, request.path, headers=request_headers, json=request.body)
            request_key = f"{request.method} {request.path} {request_headers.get('idempotency-key')}"
            if request_key not in lost_answers:
                lost_answers.add(request_key)
                return None
            answer_headers = {name: answer.headers[name] for name in ("content-type",) if name in answer.headers}
            return answer.status_code, answer_headers, answer.json() if answer.content else None

        scripted_service.reply = reply
        yield scripted_service


# -- a batch's life


def test_a_batch_from_its_opening_to_its_last_item(client: Client) -> None:
    """As on the README's first page: the call that resolves the last item reports the batch complete."""
    batch = client.open(key="catalog-42", labels={"team": "search"})
    ids = batch.extend(3)
    assert list(ids) == [f"{batch.id}:0:{index}" for index in range(3)]
    assert client.ack(ids[0]) == AckResult(applied=1)
    assert not batch.seal().complete
    assert client.ack([ids[1], ids[1], ids[0]]) == AckResult(applied=1, repeated=1)
    last = client.ack(ids[2])
    assert last.completed == (Completed(batch.id, "catalog-42", True, True, True),)
    repeat = client.ack(ids[2])
    assert repeat == AckResult(repeated=1, completed=(Completed(batch.id, "catalog-42", False, True, False),))
    status = batch.refresh()
    assert (status.state, status.acked, status.pending, status.labels) == ("complete", 3, 0, {"team": "search"})
    assert status.ended_at is not None
    assert batch.succeeded
    assert batch.verify().ok


def test_an_open_may_issue_and_seal_at_once(client: Client) -> None:
    """In one transaction; an empty batch is complete at once."""
    batch = client.open(items=100, sealed=True, group_size=64)
    assert len(batch.ids) == 100
    assert batch.ids[64] == f"{batch.id}:1:0"
    assert (batch.state, batch.items, batch.newly) == ("sealed", 100, False)
    empty = client.open(sealed=True)
    assert empty.complete
    assert empty.newly
    assert empty.replayed is False


def test_a_producer_that_is_run_again_gets_the_same_batch_and_ids(client: Client) -> None:
    """With its own idempotency keys; another body with the same key is refused."""
    open_key = uuid.uuid4().hex
    first = client.open(items=2, idempotency_key=open_key)
    extension = first.extend(5, idempotency_key="chunk-1")
    repeat = client.open(items=2, idempotency_key=open_key)
    assert (repeat.id, repeat.ids, repeat.replayed) == (first.id, first.ids, True)
    assert repeat.extend(5, idempotency_key="chunk-1") == extension
    assert repeat.refresh().items == 7
    with pytest.raises(IdempotencyKeyReused):
        client.open(items=3, idempotency_key=open_key)


def test_an_extend_for_other_things_is_refused(client: Client) -> None:
    """Their digest is compared under the idempotency key."""
    batch = client.open()
    extension = batch.extend(5, idempotency_key="chunk-1", digest="a")
    assert batch.extend(5, idempotency_key="chunk-1", digest="a") == extension
    with pytest.raises(IdempotencyKeyReused, match="with another digest"):
        batch.extend(5, idempotency_key="chunk-1", digest="b")
    with pytest.raises(InvalidArgument, match="a digest is 1 to 64 visible ASCII characters"):
        batch.extend(5, idempotency_key="chunk-2", digest="a b")
    assert batch.refresh().items == 5


def test_a_pending_item_adds_items_to_its_sealed_batch(client: Client) -> None:
    batch = client.open(items=2, sealed=True)
    added = [batch.extend(2, by=item, idempotency_key="links") for item in (*batch.ids, ItemId.parse(batch.ids[0]))]
    assert [list(ids.numbers) for ids in added] == [[2, 3], [4, 5], [2, 3]]
    client.ack(batch.ids)
    assert batch.extend(2, by=batch.ids[0], idempotency_key="links") == added[0]
    with pytest.raises(ItemResolved, match=f"item {batch.ids[0]} is resolved"):
        batch.extend(2, by=batch.ids[0])
    issued = {
        (key, item): client.driver.run(_calls.is_issued, batch.id, key, item)
        for key in ("links", "images")
        for item in (None, batch.ids[0], added[0][0])
    }
    assert [known for known, is_issued in issued.items() if is_issued] == [("links", batch.ids[0])]
    assert client.ack([*added[0], *added[1]]).completed[0].succeeded


def test_a_batch_seals_itself_with_its_last_item(client: Client) -> None:
    batch = client.open(items=2, seal_at=5)
    assert (batch.state, batch.info.seal_at) == ("open", 5)
    with pytest.raises(BatchSealed, match="sealed at 5 items and has 2"):
        batch.extend(4)
    assert not client.driver.run(_calls.is_issued, batch.id, "rest")
    batch.extend(3, idempotency_key="rest")
    assert batch.refresh().state == "sealed"
    assert client.driver.run(_calls.is_issued, batch.id, "rest")


def test_a_range_of_ids_is_acked_as_bits(client: Client) -> None:
    """Across groups, in slices, twice; counted exactly."""
    batch = client.open(items=2_000_000, sealed=True)
    ids = batch.ids
    assert client.ack(ids[5:1_000_001]).applied == 999_996
    assert client.ack(ids[:10:3]) == AckResult(applied=2, repeated=2)
    result = client.ack(ids)
    assert (result.applied, result.repeated) == (1_000_002, 999_998)
    assert result.completed[0].newly
    assert batch.verify().ok


def test_a_large_list_is_split_and_completes_once(client: Client) -> None:
    """`completed` names the batch once, with `newly`."""
    batch = client.open(items=25_000, sealed=True)
    result = client.ack(list(batch.ids))
    assert (result.applied, len(result.completed), result.completed[0].newly) == (25_000, 1, True)
    repeat = client.ack(iter(batch.ids))
    assert (repeat.repeated, len(repeat.completed), repeat.completed[0].newly) == (25_000, 1, False)


def test_items_that_were_not_issued_are_rejected_by_id(client: Client) -> None:
    """And doesn't block the others."""
    batch = client.open(items=2)
    unissued = f"{batch.id}:0:2"
    result = client.ack([batch.ids[0], unissued, "999999:0:0"])
    assert result.applied == 1
    assert {(rejection.item, rejection.reason) for rejection in result.rejected} == {
        (unissued, "unknown_item"),
        ("999999:0:0", "unknown_batch"),
    }


def test_bits_beyond_the_batch_are_rejected_by_count(client: Client) -> None:
    """The rejection of a mask names its group."""
    from lastbit import ItemIds

    batch = client.open(items=10)
    result = client.ack(ItemIds(batch.id, 8192, range(15)))
    assert result.applied == 10
    assert (result.rejected[0].group, result.rejected[0].count) == (f"{batch.id}:0", 5)
    assert result.rejected_count == 5


def test_failed_items_keep_their_reasons_until_they_are_redriven(client: Client) -> None:
    """The ack of the last failed item makes the batch succeed."""
    batch = client.open(items=5, sealed=True)
    client.ack(batch.ids[:3])
    result = client.fail(batch.ids[3:], reason="disk full")
    completion = result.completed[0]
    assert (result.applied, completion.newly, completion.succeeded) == (2, True, False)
    failed = list(batch.failed())
    assert [(item_range.start, item_range.end) for item_range in failed] == [(3, 5)]
    assert failed[0].reasons == {batch.ids[3]: "disk full", batch.ids[4]: "disk full"}
    client.ack(batch.ids[3])
    redriven = client.ack(batch.ids[4]).completed[0]
    assert (redriven.newly, redriven.succeeded, redriven.newly_succeeded) == (False, True, True)
    assert list(batch.failed()) == []


def test_skipped_items_are_no_failures(client: Client) -> None:
    """A skip of the failed items makes the batch succeed; an ack overrides it."""
    from lastbit import ItemIds

    batch = client.open(items=4, sealed=True)
    client.ack(batch.ids[0])
    client.fail(batch.ids[1:3])
    assert not client.skip(batch.ids[3], reason="not needed").completed[0].succeeded
    assert client.skip(ItemIds(batch.id, 8192, range(1, 3))).completed[0].newly_succeeded
    counts = batch.refresh()
    assert (counts.acked, counts.failed, counts.skipped, counts.pending) == (1, 0, 3, 0)
    assert counts.resolved == 4
    (span,) = batch.skipped()
    assert (span.start, span.end, span.reasons) == (1, 4, {batch.ids[3]: "not needed"})
    with client.acker() as acker:
        results = [acker.skip(batch.ids[0]), acker.ack(batch.ids[1]), acker.skip(batch.ids[2], "still not needed")]
    assert all(result.result() is not None for result in results)
    verification = client.batch(batch.id).verify()
    assert (verification.ok, verification.skipped, verification.counted.skipped) == (True, 2, 2)


def test_pending_ranges_are_paged_and_lead_to_the_missing_ids(client: Client) -> None:
    """So that exactly the missing items can be published again."""
    batch = client.open(items=200, group_size=64)
    client.ack([item for number, item in enumerate(batch.ids) if number % 10])
    ranges = list(batch.pending(page_size=3))
    assert [(item_range.start, item_range.count) for item_range in ranges] == [
        (number, 1) for number in range(0, 200, 10)
    ]
    missing_ids = [item for item_range in ranges for item in item_range.ids]
    assert missing_ids == list(batch.ids[::10])
    watermark = batch.watermark()
    assert (watermark.watermark, watermark.item) == (0, batch.ids[0])


def test_a_tree_is_summed_and_a_batch_has_a_history(client: Client) -> None:
    parent = client.open(items=2)
    child = client.open(items=3, parent=parent.ids[0])
    client.fail(child.ids[0], reason="no such page")
    sums = parent.progress()
    assert (sums.batch, sums.items, sums.acked, sums.failed, sums.pending) == (parent.id, 4, 0, 1, 3)
    assert (sums.batches["open"], sums.truncated) == (2, False)
    points = child.history()
    assert (points[0].at, points[0].resolved) == (child.refresh().created_at, 0)
    assert (points[-1].resolved, points[-1].failed) == (1, 1)


def test_batches_without_a_change_are_found(client: Client) -> None:
    key = uuid.uuid4().hex
    batch = client.open(key=key)
    assert [found.id for found in client.batches(key=key, unchanged_for=0)] == [batch.id]
    assert list(client.batches(key=key, unchanged_for=timedelta(hours=1))) == []
    assert client.counts(key=key, unchanged_for=3600).total == 0
    with pytest.raises(InvalidArgument, match="unchanged_for"):
        client.counts(unchanged_for=-1)


def test_batches_are_listed_newest_first_by_state_key_and_labels(client: Client) -> None:
    """The list spans several pages."""
    key = uuid.uuid4().hex
    batches = [client.open(key=key, labels={"n": str(number % 2), "all": "yes"}) for number in range(5)]
    batches[0].seal()
    listing = list(client.batches(key=key, page_size=2))
    assert [batch.id for batch in listing] == [batch.id for batch in reversed(batches)]
    assert [batch.id for batch in client.batches(key=key, labels={"n": "1", "all": "yes"})] == [
        batches[3].id,
        batches[1].id,
    ]
    assert [batch.id for batch in client.batches(key=key, state="complete")] == [batches[0].id]


def test_batches_are_found_and_counted_with_the_same_filters(client: Client) -> None:
    """By key prefix, time, outcome, parent and labels."""
    prefix = uuid.uuid4().hex
    parent = client.open(key=f"{prefix}-0", items=1)
    failed = client.open(key=f"{prefix}-1", items=4, sealed=True, parent=parent.ids[0])
    tolerant = client.open(key=f"{prefix}-2", items=2, sealed=True, tolerated_failures=0, labels={"a": "b"})
    complete_batch = client.open(key=f"{prefix}-3", sealed=True)
    client.fail([*failed.ids, tolerant.ids[0]])
    created_at = tolerant.refresh().created_at
    searches: list[tuple[Filters, list[BatchHandle]]] = [
        ({}, [complete_batch, tolerant, failed, parent]),
        ({"key": f"{prefix}-0"}, [parent]),
        ({"labels": {"a": "b"}}, [tolerant]),
        ({"opened_after": created_at}, [complete_batch, tolerant]),
        ({"opened_before": created_at.astimezone(timezone(timedelta(hours=5)))}, [failed, parent]),
        ({"outcome": "succeeded"}, [complete_batch]),
        ({"outcome": "failed"}, [failed]),
        ({"outcome": "exceeded"}, [tolerant]),
        ({"parent": parent.id}, [failed]),
        ({"parent": parent.ids[0]}, [failed]),
        ({"parent": "0:0:1", "key": None}, []),
    ]
    for filters, expected in searches:
        ids = [batch.id for batch in client.batches(page_size=3, **{"key_prefix": prefix, **filters})]
        assert ids == [batch.id for batch in expected], filters
        assert client.counts(**{"key_prefix": prefix, **filters}).total == len(expected), filters
    assert client.counts(key_prefix=prefix) == StateCounts(
        {"open": 1, "sealed": 1, "complete": 2, "expired": 0, "cancelled": 0}, 4, True
    )


def test_filters_that_no_batch_can_meet_are_refused(client: Client) -> None:
    """The service's error names the filter."""
    noon = datetime(2026, 5, 4, 12, tzinfo=UTC)
    contradictions: list[tuple[str, Filters]] = [
        ("query.key_prefix", {"key": "a", "key_prefix": "b"}),
        ("query.opened_before", {"opened_after": noon, "opened_before": noon}),
        ("query.parent", {"parent": "x"}),
    ]
    for place, filters in contradictions:
        for call in (lambda filters: list(client.batches(**filters)), lambda filters: client.counts(**filters)):
            with pytest.raises(InvalidRequest) as error_info:
                call(filters)
            assert [error["place"] for error in error_info.value.errors] == [place]
    with pytest.raises(InvalidRequest, match=r"query\.outcome"):
        next(client.batches(state="open", outcome="failed"))
    with pytest.raises(InvalidArgument, match="opened_after must be a datetime with a time zone"):
        client.counts(opened_after=noon.replace(tzinfo=None))
    with pytest.raises(TypeError, match="there is no filter 'keys'"):
        client.batches(keys="a")  # type: ignore[call-arg]


def test_an_ended_batch_refuses_with_its_own_error(client: Client) -> None:
    """Each refusal has its own error class, with the problem's code."""
    batch = client.open(items=1)
    batch.seal()
    with pytest.raises(BatchSealed) as sealed:
        batch.extend(1)
    assert sealed.value.code == "batch_sealed"
    child = client.open(items=1, parent=batch.ids[0])
    assert batch.cancel(reason="a mistake").state == "cancelled"
    assert child.refresh().state == "open"
    assert batch.cancel(reason="another one", children=True).reason == "a mistake"
    assert (child.refresh().state, child.info.ended_by, child.info.reason) == ("cancelled", batch.id, "a mistake")
    with pytest.raises(BatchEnded) as excinfo:
        batch.extend(1)
    assert (excinfo.value.status, excinfo.value.code) == (409, "batch_cancelled")
    assert isinstance(excinfo.value, Conflict)
    assert client.ack(batch.ids[0]).rejected[0].reason == "cancelled"
    assert batch.reopen(deadline=timedelta(hours=1), reason="it was none").deadline is not None
    assert child.refresh().state == "open"
    batch.cancel()
    assert (batch.reopen(deadline=None).state, batch.info.deadline) == ("sealed", None)
    with pytest.raises(Conflict) as live:
        batch.reopen()
    assert live.value.code == "batch_live"
    batch.delete()
    with pytest.raises(BatchNotFound):
        batch.refresh()
    assert client.ack(batch.ids[0]).rejected[0].reason == "unknown_batch"


def test_a_malformed_request_names_the_place(client: Client) -> None:
    """In the error's data and in its message."""
    with pytest.raises(InvalidRequest, match="group_size") as excinfo:
        client.open(group_size=63)
    assert excinfo.value.code == "invalid_request"
    with pytest.raises(InvalidRequest):
        client.open().extend(-1)


def test_a_malformed_id_is_refused_before_anything_is_sent(client: Client) -> None:
    """The call's valid ids are not applied."""
    batch = client.open(items=2)
    with pytest.raises(MalformedItem, match="position 1"):
        client.ack([batch.ids[0], f"0{batch.ids[1]}"])
    assert batch.refresh().acked == 0


def test_a_handle_without_a_request_has_only_its_id(client: Client) -> None:
    """Until it is refreshed."""
    handle = client.batch(client.open(key="k").id)
    with pytest.raises(NotRefreshed, match="refresh"):
        _ = handle.state
    assert handle.refresh().key == handle.key == "k"
    assert f"{handle.id}: open" in repr(handle)


# -- waiting


def test_a_wait_ends_with_the_batch(client: Client) -> None:
    """The long poll is answered when another client resolves the last item."""
    batch = client.open(items=2, sealed=True)
    snapshots: list[Batch] = []
    waiting = threading.Event()

    def watch(snapshot: Batch) -> None:
        snapshots.append(snapshot)
        waiting.set()

    def consume() -> None:
        waiting.wait()
        client.ack(batch.ids)

    consumer = threading.Thread(target=consume)
    consumer.start()
    final = batch.wait(timeout=30, progress=watch)
    consumer.join()
    assert final.complete
    assert batch.complete
    assert snapshots[0].pending == 2
    assert snapshots[-1] == final


def test_a_wait_that_times_out_has_the_batch_in_its_error(client: Client) -> None:
    """The error names the number of pending items."""
    batch = client.open(items=3)
    with pytest.raises(WaitTimeout, match="3 of 3 items pending") as excinfo:
        batch.wait(timeout=0)
    assert excinfo.value.batch.pending == 3


def test_progress_is_written_into_a_pipe(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    """On standard error, as lines."""
    batch = client.open(items=1, sealed=True)
    client.ack(batch.ids)
    assert batch.wait(timeout=5, progress=True).complete
    line = rf"batch {batch.id} complete: 1 of 1 resolved, 100 %, in \d+ s\n"
    assert re.fullmatch(line, capfd.readouterr().err)


# -- lost answers


def test_lost_answers_change_nothing(losing_answers: Any, client: Client) -> None:
    """Each verb takes effect once although its first answer is lost, and the retry returns the complete result."""
    with Client(losing_answers.url, retry=FAST) as unlucky:
        batch = unlucky.open(items=2, key="lost")
        assert unlucky.batch(batch.id).extend(3).numbers == range(2, 5)
        assert client.batch(batch.id).refresh().items == 5
        assert unlucky.ack([f"{batch.id}:0:{index}" for index in range(4)]).rejected == ()
        unlucky.batch(batch.id).seal()
        completion = unlucky.ack(f"{batch.id}:0:4").completed[0]
        assert (completion.newly, completion.newly_succeeded) == (True, True)
        other = unlucky.open(items=1)
        assert other.cancel().state == "cancelled"
        other.delete()
    assert client.batch(batch.id).verify().ok
    with pytest.raises(BatchNotFound):
        client.batch(other.id).refresh()
    keys = [request.headers.get("idempotency-key") for request in losing_answers.seen if request.method == "POST"]
    assert all(keys)
    assert len(set(keys)) == len(keys) // 2


def test_a_retried_seal_of_an_empty_batch_gets_newly(losing_answers: Any) -> None:
    """The producer that completes it learns this even after a lost answer."""
    with Client(losing_answers.url, retry=FAST) as unlucky:
        sealed = unlucky.open().seal()
        assert (sealed.complete, sealed.newly) == (True, True)


def test_an_overloaded_service_is_retried_after_its_pause(scripted_service: Any) -> None:
    """The client waits as long as Retry-After asks; the final error has the service's message."""
    problem = {"code": "unavailable", "detail": "the database is away", "status": 503}
    scripted_service.replies((503, {"retry-after": "0", "content-type": "application/problem+json"}, problem))
    with (
        Client(scripted_service.url, retry=FAST) as client,
        pytest.raises(Unavailable, match="the database is away") as excinfo,
    ):
        client.ack("7:0:1")
    assert len(scripted_service.seen) == 4
    assert excinfo.value.retry_after == 0


def test_an_unreachable_service_is_named(unused_port: int) -> None:
    """With its address, the cause and advice."""
    url = f"http://127.0.0.1:{unused_port}"
    with Client(url, retry=Retry(attempts=2, base=0)) as client, pytest.raises(ServiceUnreachable) as excinfo:
        client.open()
    assert excinfo.value.url == url
    assert excinfo.value.attempts == 2
    message = str(excinfo.value)
    assert url in message
    assert "refused" in message.lower()
    assert "LASTBIT_URL" in message


def _sends_nothing(messages: object) -> list[Any]:
    return []


@pytest.mark.parametrize(
    "call",
    [
        *(Client.open, lambda client: list(client.batches()), lambda client: client.batch(7).wait(0)),
        lambda client: fan_out(client, [1, 2], _sends_nothing),
    ],
    ids=["open", "batches", "wait", "fan_out"],
)
def test_an_unreachable_service_is_no_long_traceback(call: Callable[[Client], object], unused_port: int) -> None:
    """It has the call, and at most two frames of this package: the sentence says what to do."""
    url = f"http://127.0.0.1:{unused_port}"
    with Client(url, retry=Retry(attempts=1)) as client, pytest.raises(ServiceUnreachable) as excinfo:
        call(client)
    frames = [frame for frame in traceback.extract_tb(excinfo.tb) if "/lastbit/" in frame.filename]
    assert 1 <= len(frames) <= 2
    assert excinfo.value.__suppress_context__


def test_a_missing_answer_times_out(scripted_service: Any) -> None:
    """The error gives the timeout in seconds."""
    release = threading.Event()
    scripted_service.reply = lambda _: (release.wait(), None)[1]
    try:
        with (
            Client(scripted_service.url, timeout=0.05, retry=Retry(attempts=1)) as client,
            pytest.raises(ServiceUnreachable, match=r"no response within 0\.05 s"),
        ):
            client.ack("7:0:1")
    finally:
        release.set()


def test_the_token_is_sent_and_its_refusal_is_an_error(scripted_service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the argument, or else from the environment."""
    scripted_service.replies((403, {}, {"code": "forbidden", "detail": "this token may only read", "status": 403}))
    monkeypatch.setenv("LASTBIT_TOKEN", "from-the-environment")
    monkeypatch.setenv("LASTBIT_URL", scripted_service.url)
    for token in (None, "given"):
        with Client(token=token) as client, pytest.raises(Forbidden):
            client.ack("7:0:1")
    tokens = [request.headers["authorization"] for request in scripted_service.seen]
    assert tokens == ["Bearer from-the-environment", "Bearer given"]


NO_TIMES: list[Any] = [None, 0, -1, float("nan"), float("inf"), "3"]


@pytest.mark.parametrize(
    "options",
    [
        *({"url": "localhost:8000"}, {"url": 8000}, {"token": "two words"}, {"token": "ключ"}),
        *({"timeout": timeout} for timeout in NO_TIMES),
    ],
    ids=str,
)
def test_invalid_options_are_refused_when_the_client_is_created(options: dict[str, Any]) -> None:
    """Not at the first request."""
    with pytest.raises(InvalidArgument):
        Client(**options)
    with pytest.raises(InvalidArgument):
        AsyncClient(**options)


WRONG_ARGUMENTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "deadline": (lambda client: client.open(deadline="2h"), "deadline must be a datetime .*, not '2h'"),
    "labels of open": (lambda client: client.open(labels=["a"]), r"labels must be a mapping .*, not \['a'\]"),
    "key": (lambda client: client.open(key=""), "key must be a text that is not empty"),
    "callback": (lambda client: client.open(callback=7), "callback must be a URL or a Callback, not 7"),
    "types of callback": (lambda client: client.open(callback=Callback("https://a.b", 7)), "types must be a type of"),  # type: ignore[arg-type]
    "labels of batches": (lambda client: client.batches(labels="a:b"), "labels must be a mapping .*, not 'a:b'"),
    "labels of counts": (lambda client: client.counts(labels=3), "labels must be a mapping .*, not 3"),
    "batch": (lambda client: client.batch("catalog-42"), "a batch id is a whole number, not 'catalog-42'; .*key"),
    "timeout": (lambda client: client.batch(7).wait(timeout="x"), "a timeout is a number of seconds, not 'x'"),
    "a label of open": (lambda client: client.open(labels={"a": None}), "labels must be a mapping"),
    "a label of batches": (lambda client: client.batches(labels={"a": 1}), "labels must be a mapping .*, not {'a': 1}"),
    "a label of update": (lambda client: client.batch(7).update(labels={1: "a"}), "labels must be a mapping"),
    "labels of update": (lambda client: client.batch(7).update(labels=["a"]), "labels must be a mapping"),
    "deadline of update": (lambda client: client.batch(7).update(deadline="2h"), "deadline must be a datetime"),
    "items of redrive": (lambda client: client.batch(7).redrive(items=7), "items must be an item id, or an iterable"),
    "types of events": (lambda client: client.events(types=7), "types must be a type of events, or an iterable"),
    "types of follow": (lambda client: client.follow(types=7), "types must be a type of events, or an iterable"),
    "types of a webhook": (lambda client: client.webhooks.create("https://a.b", types=7), "types must be a type of"),
    "wait": (lambda client: client.events(wait="x"), "wait is a number of seconds, not 'x'"),
    "fence": (lambda client: client.append([], fence=7), "fence must be the fence of an assignment, not 7"),
    "entry": (lambda client: client.tally("t").apply([("k", 1)]), r"an entry must be a key, a delta and a source, not"),
    "entries": (lambda client: client.tally("t").apply(7), "entries must be an iterable of entries, not 7"),
}


@pytest.mark.parametrize(("call", "problem"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_an_argument_of_a_wrong_type_is_named_at_the_call(
    scripted_service: ScriptedService, call: Callable[[Any], Any], problem: str
) -> None:
    """By both clients, with what is expected, and nothing is sent."""

    async def awaited() -> None:
        async with AsyncClient(scripted_service.url) as client:
            made = call(client)
            if inspect.isawaitable(made):
                await made

    with Client(scripted_service.url) as client, pytest.raises(InvalidArgument, match=problem):
        call(client)
    with pytest.raises(InvalidArgument, match=problem):
        asyncio.run(awaited())
    assert scripted_service.seen == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NO_PROXY", "[::1"),
        ("ALL_PROXY", "ftp://x"),
        pytest.param(
            *("SSL_CERT_FILE", "/none"),
            marks=pytest.mark.skipif(httpx.__version__.startswith("0.27"), reason="httpx 0.27 ignores a missing file"),
        ),
    ],
)
def test_an_environment_that_httpx_cannot_use_is_an_invalid_argument(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """It is reported with the names of the variables. httpx has another exception for each case."""
    monkeypatch.setenv(variable, value)
    for make in (Client, AsyncClient):
        with pytest.raises(InvalidArgument, match=variable):
            make()


# combining


def test_an_acker_completes_a_batch_exactly_once(client: Client) -> None:
    """From several threads, with duplicates and failures among the acks."""
    batch = client.open(items=3000, sealed=True)
    completions: list[Completed] = []
    with client.acker(on_completed=completions.append, max_pending=500) as acker:

        def consume(part: int) -> None:
            futures = [acker.ack(item) for item in batch.ids[part::3]]
            futures += [acker.fail(item, "late") for item in batch.ids[part::30]]
            assert all(future.exception() is None for future in futures)

        threads = [threading.Thread(target=consume, args=(part,)) for part in (0, 1, 2, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [completion.newly for completion in completions].count(True) == 1
    assert all(completion.batch == batch.id for completion in completions)
    status = batch.refresh()
    assert (status.acked, status.failed, status.succeeded) == (3000, 0, True)
    assert batch.verify().ok


# -- awaited


def test_the_async_client_behaves_the_same(way: Way, losing_answers: Any) -> None:
    """A batch's life, its ranges, its wait and its acker; also with lost answers."""

    async def live(made: AsyncClient) -> None:
        async with made as client:
            batch = await client.open(key="awaited", items=10)
            ids = await batch.extend(190)
            acked = await client.ack(ids[:100])
            # After a lost answer the retry finds them acked already.
            assert acked.applied + acked.repeated == 100
            assert (await client.fail(ids[100], reason="late")).rejected == ()
            assert [entry.start async for entry in batch.failed()] == [110]
            assert [(entry.start, entry.end) async for entry in batch.pending(page_size=1)] == [(0, 10), (111, 200)]
            assert (await batch.watermark()).watermark == 0
            assert not (await batch.seal()).complete
            with pytest.raises(WaitTimeout):
                await batch.wait(timeout=0)
            waiting = asyncio.create_task(batch.wait(timeout=30))
            completions: list[Completed] = []
            async with client.acker(on_completed=completions.append) as acker:
                for item in [*batch.ids, *ids[100:]]:
                    await acker.ack(item)
            assert [(completion.batch, completion.newly, completion.succeeded) for completion in completions] == [
                (batch.id, True, True)
            ]
            assert (await waiting).complete
            assert (await batch.verify()).ok
            assert batch.id in [entry.id async for entry in client.batches(key="awaited")]
            assert batch.id in [entry.id async for entry in client.batches(key_prefix="await", outcome="succeeded")]
            assert (await client.counts(key="awaited", outcome="succeeded")).states["complete"] >= 1
            with pytest.raises(BatchEnded):
                await batch.cancel()
            await batch.delete()
            with pytest.raises(BatchNotFound):
                await client.batch(batch.id).refresh()

    asyncio.run(live(way.async_client(retry=FAST)))
    asyncio.run(live(AsyncClient(losing_answers.url, retry=FAST)))


def test_a_closed_client_refuses_calls(way: Way) -> None:
    """Also those of its handles, and those that begin later, such as the next page of a list."""
    client = way.client()
    batch = client.open(items=1)
    listed = client.batches()
    client.close()
    for call in (lambda: client.open(), batch.refresh, lambda: next(listed), lambda: client.ack(batch.ids)):
        with pytest.raises(ClientClosed, match="the client is closed"):
            call()

    async def call_closed() -> None:
        async with way.async_client() as async_client:
            pass
        with pytest.raises(ClientClosed):
            await async_client.open()

    asyncio.run(call_closed())


@pytest.mark.parametrize(("blocking", "asynchronous"), [(Client, AsyncClient), (BatchHandle, AsyncBatchHandle)])
def test_both_clients_have_the_same_names_and_arguments(blocking: type, asynchronous: type) -> None:
    """Code for one client reads like code for the other."""

    def shape(kind: type) -> dict[str, list[tuple[str, Any, Any]]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: [
                (parameter.name, parameter.kind, parameter.default)
                for parameter in inspect.signature(method).parameters.values()
            ]
            for name, method in methods
            if not name.startswith("_")
        }

    assert shape(blocking) == shape(asynchronous)
    assert len(shape(blocking)) >= 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: Client("http://127.0.0.1:9"),
        lambda: AsyncClient("http://127.0.0.1:9"),
        lambda: Client("http://127.0.0.1:9").tally("screws"),
        lambda: Client("http://127.0.0.1:9").processes,
    ],
)
def test_a_client_that_would_leave_its_process_says_what_to_do(make: Callable[[], object]) -> None:
    """For example in the closure of a Spark task."""
    with pytest.raises(TypeError, match=r"make the client there. In Spark, lastbit.spark.ack\(df\)"):
        pickle.dumps(make())
