"""Each operation of the HTTP contract as a flow: its request, and how to decode the response.

Both clients run these flows; paths and fields are defined only here.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from types import EllipsisType
from typing import Any, Final, NamedTuple

from lastbit import _arguments, _masks, _traces, errors, failures, models
from lastbit._protocol import Answer, Emit, Flow, Pause, Service, T, utf8, visible_ascii
from lastbit._shapes import expect
from lastbit.ids import MAX_ITEMS, ItemId, ItemIds
from lastbit.retry import Retry
from lastbit.search import StateCounts

LONGEST_HOLD = 30
"""Seconds of one long poll. The service allows 60, but many gateways end a request earlier."""

MOST_EVENTS = 1000
"""Maximum events of one page."""

MOST_RANGES = 1000
"""Maximum ranges of one page."""

REDRIVE = "batch.redrive"
"""The type of the events of redrives."""

SHORT: Final = 3.0
"""Seconds to wait for an answer that nobody needs."""

Ids = str | ItemId | Iterable[str | ItemId]


def ask(service: Service, method: str, path: str, decode: Callable[[Any], T], **options: Any) -> Flow[T]:
    answer = yield from service.call(method, path, **options)
    return service.decoded(f"{method} {path}", answer, decode)


def version(service: Service) -> Flow[str]:
    """The release of the service. It is asked once, with little patience: whoever asks goes on without an answer."""
    once = replace(service, retry=Retry(attempts=1), timeout=min(service.timeout, SHORT))
    return (yield from ask(once, "GET", "/healthz", lambda health: str(health["version"])))


def _path(batch: int, *rest: str) -> str:
    return "/".join(["/v1/batches", str(_arguments.batch_id(batch)), *rest])


def _key(idempotency_key: str | None) -> str | None:
    return None if idempotency_key is None else visible_ascii("an idempotency key", idempotency_key, 255)


def open_batch(
    service: Service, options: models.OpenOptions, idempotency_key: str | None
) -> Flow[tuple[models.Opened, bool]]:
    """The flow's value: the batch, and whether the response is a replay."""
    _arguments.check_names("argument", options, models.OpenOptions)
    # Omitted, not null, so that the service's defaults apply.
    body = {name: value for name, value in _encoded(options).items() if value is not None}
    key, trace = _key(idempotency_key), _traces.current()
    answer = yield from service.call(
        "POST", "/v1/batches", body=body, idempotency_key=key, headers=trace, repeatable=False
    )
    batch = service.decoded("POST /v1/batches", answer, models.Opened.from_json)
    return batch, _is_replay(answer)


def _encoded(options: Mapping[str, Any], **encoders: Callable[[Any], Any]) -> dict[str, Any]:
    """The options as the service expects them. None and `...` stay as they are."""
    encoders = {**_ENCODERS, **encoders}
    return {
        name: encoders[name](value) if name in encoders and value is not None and value is not ... else value
        for name, value in options.items()
    }


def _is_replay(answer: Answer) -> bool:
    return answer.headers.get("idempotency-replayed", "").lower() == "true"


def _callback(callback: str | models.Callback) -> dict[str, Any]:
    if isinstance(callback, str):
        return {"url": callback}
    if not isinstance(callback, models.Callback):
        raise _arguments.refusal("callback", "a URL or a Callback", callback)
    types = callback.types
    return {"url": callback.url} | ({} if types is None else {"types": list(_arguments.types(types))})


def _expires_in(expires_in: float | timedelta) -> float:
    return int(expires_in.total_seconds()) if isinstance(expires_in, timedelta) else expires_in


_ENCODERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "key": _arguments.key,
    "labels": _arguments.labels,
    "sealed": lambda sealed: sealed or None,
    "parent": str,
    "expires_in": _expires_in,
    "callback": _callback,
    "deadline": _arguments.deadline,
}
"""For the options of a batch that are not sent as they are."""


def extend(
    service: Service,
    batch: int,
    count: int,
    idempotency_key: str | None,
    digest: str | None = None,
    by: str | ItemId | None = None,
) -> Flow[models.Extended]:
    path = _path(batch, "items")
    body: dict[str, Any] = {"count": count}
    if digest is not None:
        body["digest"] = visible_ascii("a digest", digest, 64)
    if by is not None:
        body["by"] = str(by)
    answer = yield from service.call("POST", path, body=body, idempotency_key=_key(idempotency_key), repeatable=False)
    return replace(service.decoded(f"POST {path}", answer, models.Extended.from_json), replayed=_is_replay(answer))


def update(service: Service, batch: int, changes: models.Changes, idempotency_key: str | None) -> Flow[models.Batch]:
    """`...`: the field stays as it is."""
    _arguments.check_names("argument", changes, models.Changes)
    patch = _encoded(changes, labels=partial(_arguments.labels, removable=True))
    patch = {name: value for name, value in patch.items() if value is not ...}
    decode = models.Batch.from_json
    return ask(service, "PATCH", _path(batch), decode, body=patch, idempotency_key=_key(idempotency_key))


def is_issued(service: Service, batch: int, idempotency_key: str, by: str | ItemId | None = None) -> Flow[bool]:
    """Whether an extend with this key, and on behalf of the item `by` if there is one, has issued items. The batch must
    have items.

    It asks for the maximum number of items of a batch, which is refused in any case, and nothing is issued. The service
    looks up the key first, so the reason of the refusal tells whether it was used.
    """
    try:
        extended = yield from extend(service, batch, MAX_ITEMS, idempotency_key, by=by)
    except errors.IdempotencyKeyReused:
        return True
    except (errors.BatchSealed, errors.BatchEnded, errors.ItemResolved):
        return False
    except errors.InvalidRequest as error:
        if any(problem.get("place") == "body.count" for problem in error.errors):
            return False
        raise
    raise errors.UnexpectedAnswer(
        service.address, f"POST {_path(batch, 'items')}", 201, f"a batch can't hold that many items: {extended}"
    )


def seal(service: Service, batch: int) -> Flow[models.Sealed]:
    return ask(service, "POST", _path(batch, "seal"), models.Sealed.from_json)


def cancel(
    service: Service, batch: int, reason: str | None, children: bool, idempotency_key: str | None
) -> Flow[models.Batch]:
    body: dict[str, Any] = {} if reason is None else {"reason": utf8("a reason", reason)}
    if children:
        body["children"] = True
    key, path = _key(idempotency_key), _path(batch, "cancel")
    return ask(service, "POST", path, models.Batch.from_json, body=body, idempotency_key=key)


def reopen(
    service: Service,
    batch: int,
    deadline: datetime | timedelta | EllipsisType | None,
    reason: str | None,
    idempotency_key: str | None,
) -> Flow[models.Batch]:
    """`...`: the deadline stays as it is."""
    body = {} if deadline is ... else _encoded({"deadline": deadline})
    if reason is not None:
        body["reason"] = utf8("a reason", reason)
    key, path = _key(idempotency_key), _path(batch, "reopen")
    return ask(service, "POST", path, models.Batch.from_json, body=body, idempotency_key=key)


def delete(service: Service, batch: int, state: str | None = None) -> Flow[None]:
    yield from service.call("DELETE", _path(batch), params=() if state is None else (("state", state),))


def get(service: Service, batch: int) -> Flow[models.Batch]:
    return ask(service, "GET", _path(batch), models.Batch.from_json)


def verify(service: Service, batch: int) -> Flow[models.Verification]:
    return ask(service, "GET", _path(batch, "verify"), models.Verification.from_json)


def repair(service: Service, batch: int, dry_run: bool) -> Flow[models.Repair]:
    return ask(service, "POST", _path(batch, "repair"), models.Repair.from_json, body={"dry_run": dry_run})


def watermark(service: Service, batch: int) -> Flow[models.Watermark]:
    return ask(service, "GET", _path(batch, "watermark"), models.Watermark.from_json)


def progress(service: Service, batch: int) -> Flow[models.TreeProgress]:
    return ask(service, "GET", _path(batch, "progress"), models.TreeProgress.from_json)


def history(service: Service, batch: int) -> Flow[list[models.HistoryPoint]]:
    return ask(service, "GET", _path(batch, "history"), models.history)


def explain(service: Service, batch: int) -> Flow[models.Explanation]:
    return ask(service, "GET", _path(batch, "explain"), models.Explanation.from_json)


def pending(service: Service, batch: int, page_size: int) -> Flow[None]:
    """Emits `PendingRange`s."""
    return pages(service, _path(batch, "pending"), "ranges", models.PendingRange.from_json, [], page_size)


def failed(service: Service, batch: int, page_size: int) -> Flow[None]:
    """Emits `FailedRange`s."""
    return pages(service, _path(batch, "failed"), "ranges", models.FailedRange.from_json, [], page_size)


def skipped(service: Service, batch: int, page_size: int) -> Flow[None]:
    """Emits `SkippedRange`s."""
    return pages(service, _path(batch, "skipped"), "ranges", models.SkippedRange.from_json, [], page_size)


def failure_reasons(service: Service, batch: int, limit: int) -> Flow[failures.FailureReasons]:
    path = _path(batch, "failed", "reasons")
    return ask(service, "GET", path, failures.FailureReasons.from_json, params=(("limit", str(limit)),))


def redrive(
    service: Service,
    batch: int,
    reason: str | None,
    items: Ids | None,
    note: str | None,
    pending: bool,
    unchanged_for: int | timedelta | None,
    idempotency_key: str | None,
) -> Flow[failures.Redriven]:
    body: dict[str, Any] = {"pending": True} if pending else {}
    if unchanged_for is not None:
        body["unchanged_for"] = (
            math.ceil(unchanged_for.total_seconds()) if isinstance(unchanged_for, timedelta) else unchanged_for
        )
    if reason is not None:
        body["reason"] = utf8("a reason", reason)
    if items is not None:
        if not isinstance(items, str | ItemId | Iterable):
            raise _arguments.refusal("items", "an item id, or an iterable of ids", items)
        body["items"] = [str(item) for item in ([items] if isinstance(items, str | ItemId) else items)]
    if note is not None:
        body["note"] = utf8("a note", note)
    key, path = _key(idempotency_key), _path(batch, "redrive")
    return ask(service, "POST", path, failures.Redriven.from_json, body=body, idempotency_key=key, repeatable=False)


def redrives(service: Service, after: int | None, batch: int | None) -> Flow[None]:
    """Emits `Redrive`s, without end."""

    def page(data: models.Json) -> Poll:
        elements = list(map(failures.Redrive.from_json, data["events"]))
        return Poll(elements, expect(data["next"], int), expect(data["last"], int))

    def poll(service: Service, after: int | None) -> Flow[Poll]:
        return _events(service, page, after, REDRIVE, batch, LONGEST_HOLD, MOST_EVENTS)

    return poll_forever(service, after, poll)


def redriven(service: Service, wanted: failures.Redrive) -> Flow[None]:
    """Emits the ids of a redrive: those of its event, and if there are more, those beyond that are failed or pending
    now."""
    kind = "pending" if wanted.pending else "failed"
    for start, end in wanted.spans:
        for id in ItemIds(wanted.batch, wanted.group_size, range(start, end)):
            yield Emit(id)
    cursor = _ranges_cursor(kind, wanted.batch, wanted.spans[-1][1]) if wanted.more and wanted.spans else None
    path = _path(wanted.batch, kind)
    decode: Callable[[Any], models.PendingRange]
    decode = models.PendingRange.from_json if wanted.pending else models.FailedRange.from_json
    while cursor is not None:
        found, cursor = yield from _page(service, path, "ranges", decode, [], MOST_RANGES, cursor)
        for part in found:
            for id in part.ids:
                reasons = part.reasons if isinstance(part, models.FailedRange) else {}
                if wanted.reason is None or reasons.get(id) == wanted.reason:
                    yield Emit(id)


def ranges_from(service: Service, batch: int, kind: str, start: int, page_size: int) -> Flow[None]:
    """Emits (start, end) of the ranges of `kind`, `pending`, `failed` or `skipped`, from the number `start` on.

    Several readers can share a batch.
    """
    cursor = _ranges_cursor(kind, batch, start)
    return pages(service, _path(batch, kind), "ranges", _start_and_end, [], page_size, cursor)


def _ranges_cursor(kind: str, batch: int, start: int) -> str:
    """The cursor of the ranges from the number `start` on. It is made here, not received. A service with another cursor
    format refuses it, so nothing is read wrongly."""
    return b64encode(f"{kind}:{batch}:{start}".encode(), b"-_").decode().rstrip("=")


def _start_and_end(data: models.Json) -> tuple[int, int]:
    return expect(data["start"], int), expect(data["end"], int)


def batches(service: Service, params: list[tuple[str, str]], page_size: int) -> Flow[None]:
    """Emits `Batch`es, newest first. `params`: a `search.query`."""
    return pages(service, "/v1/batches", "batches", models.Batch.from_json, params, page_size)


def batch_page(
    service: Service, params: list[tuple[str, str]], limit: int, cursor: str | None
) -> Flow[tuple[list[models.Batch], str | None]]:
    """One page of `Batch`es, newest first, and the cursor of the next page."""
    return _page(service, "/v1/batches", "batches", models.Batch.from_json, params, limit, cursor)


def find_failures(service: Service, text: str | None, params: list[tuple[str, str]], page_size: int) -> Flow[None]:
    """Emits `Failure`s. `params`: a `search.query`."""
    if text is not None:
        params = [*params, ("text", utf8("a text", text))]
    return pages(service, "/v1/failures", "failures", failures.Failure.from_json, params, page_size)


def counts(service: Service, params: list[tuple[str, str]]) -> Flow[StateCounts]:
    return ask(service, "GET", "/v1/batches/counts", StateCounts.from_json, params=tuple(params))


def pages(
    service: Service,
    path: str,
    field: str,
    decode: Callable[[Any], Any],
    params: list[tuple[str, str]],
    page_size: int,
    cursor: str | None = None,
) -> Flow[None]:
    while True:
        elements, cursor = yield from _page(service, path, field, decode, params, page_size, cursor)
        for element in elements:
            yield Emit(element)
        # An empty page is not the last one; only a page without `next` is.
        if cursor is None:
            return


def _page(
    service: Service,
    path: str,
    field: str,
    decode: Callable[[Any], T],
    params: list[tuple[str, str]],
    limit: int,
    cursor: str | None,
) -> Flow[tuple[list[T], str | None]]:
    def page(data: models.Json) -> tuple[list[T], str | None]:
        return [decode(element) for element in data[field]], expect(data["next"], str | None)

    page_params = [*params, ("limit", str(limit))]
    if cursor is not None:
        page_params.append(("cursor", cursor))
    return ask(service, "GET", path, page, params=tuple(page_params))


def wait(service: Service, batch: int, timeout: float | None, hold: int = LONGEST_HOLD) -> Flow[None]:
    """Long polls until the batch is in a terminal state; emits its state after each poll. Raises `WaitTimeout` after
    `timeout` seconds. `hold`: maximum whole seconds of one poll; a shorter one emits more states."""
    if timeout is not None:
        _arguments.seconds("a timeout", timeout)
    start = service.now()
    remaining = math.inf if timeout is None else timeout
    while True:
        poll_start = service.now()
        hold_seconds = int(min(hold, remaining))
        batch_state = yield from ask(
            service,
            "GET",
            _path(batch),
            models.Batch.from_json,
            params=(("wait", str(hold_seconds)),) if hold_seconds else (),
            hold=hold_seconds,
            # The retry deadline applies if it is earlier; a wait of 5 s does not retry for a minute.
            within=None if timeout is None else max(remaining, 1.0),
        )
        service = service.after_an_answer()
        yield Emit(batch_state)
        if batch_state.ended:
            return
        now = service.now()
        remaining = math.inf if timeout is None else timeout - (now - start)
        if remaining <= 0:
            assert timeout is not None
            raise errors.WaitTimeout(batch_state, timeout)
        # Wait if the poll returned early, so that polls don't follow each other without a pause. A service that is
        # stopping returns at once.
        rest = min(remaining, 1.0 - (now - poll_start))
        if rest > 0:
            yield Pause(rest)
            remaining = math.inf if timeout is None else max(0.0, timeout - (service.now() - start))


def resolve(
    service: Service,
    verb: str,
    bodies: Iterator[_masks.Piece],
    reason: str | None,
    idempotency_key: str | None = None,
) -> Flow[models.AckResult]:
    """Send pieces of ids to `verb` (`acks`, `failures` or `skips`), one request each, and merge the results. If a
    later request fails, the error has the merged results so far as `partial`. Pass an idempotency key only with a
    single piece."""
    result = models.AckResult()
    reason_field = {} if reason is None else {"reason": utf8("a reason", reason)}
    try:
        for body in bodies:
            answer = yield from ask(
                service,
                "POST",
                f"/v1/{verb}",
                models.AckResult.from_json,
                body={**body, **reason_field},
                idempotency_key=idempotency_key,
            )
            result = result.merged(answer)
    except errors.LastbitError as error:
        error.partial = result
        raise
    return result


def events(
    service: Service,
    after: int | None,
    types: str | Iterable[str],
    batch: int | None,
    wait: float = 0,
    limit: int | None = None,
) -> Flow[models.EventPage]:
    return _events(service, models.EventPage.from_json, after, types, batch, wait, limit)


def _events(
    service: Service,
    decode: Callable[[Any], T],
    after: int | None,
    types: str | Iterable[str],
    batch: int | None,
    wait: float,
    limit: int | None,
) -> Flow[T]:
    _arguments.seconds("wait", wait)
    options = [("after", after), ("batch", batch), ("wait", wait or None), ("limit", limit)]
    params = [(name, str(value)) for name, value in options if value is not None]
    params += [("type", name) for name in _arguments.types(types)]
    return ask(service, "GET", "/v1/events", decode, params=tuple(params), hold=wait)


def follow(service: Service, after: int | None, types: str | Iterable[str], batch: int | None) -> Flow[None]:
    """Emits `Event`s, without end. Each poll starts where the previous one ended, even after errors, so no event is
    lost or repeated."""
    types = _arguments.types(types)

    def poll(service: Service, after: int | None) -> Flow[Poll]:
        page = yield from events(service, after, types, batch, LONGEST_HOLD, MOST_EVENTS)
        return Poll(page.events, page.next, page.last)

    return poll_forever(service, after, poll)


def changes(service: Service, after: int | None, types: Sequence[str]) -> Flow[None]:
    """Emits a `Poll` of events for each long poll, also if it is empty, without end. Without `after`, it begins at the
    end of the feed."""
    start = after if after is not None else (yield from events(service, None, (), None, 0, 1)).last

    def poll(service: Service, after: int | None) -> Flow[Poll]:
        page = yield from events(service, after, types, None, LONGEST_HOLD, MOST_EVENTS)
        return Poll(page.events, page.next, page.last)

    yield from poll_forever(service, start, poll, by_poll=True)


class Poll(NamedTuple):
    """The elements of a page, the position up to which it read, and the feed's last one."""

    elements: Sequence[Any]
    next: int
    last: int


def poll_forever(
    service: Service,
    after: int | None,
    poll: Callable[[Service, int | None], Flow[Poll]],
    *,
    by_poll: bool = False,
) -> Flow[None]:
    """Emits the elements of each long poll, or `by_poll` the polls themselves, starting at the position where the
    previous poll ended, without end."""
    while True:
        poll_start, start = service.now(), after
        answer = yield from poll(service, start)
        elements, after, last = answer
        service = service.after_an_answer()
        for element in [answer] if by_poll else elements:
            yield Emit(element)
        # Wait if an empty poll returned early, so that polls don't follow each other without a pause. A service that is
        # stopping returns at once. But a page that examined events, and ended before the feed's end, is behind.
        rest = 1.0 - (service.now() - poll_start)
        if not elements and not (start != after < last) and rest > 0:
            yield Pause(rest)


def fence_json(fence: models.Fence) -> models.Json:
    """Raises `InvalidArgument`."""
    if not isinstance(fence, models.Fence):
        raise _arguments.refusal("fence", "the fence of an assignment", fence)
    return fence.to_json()


def append(
    service: Service, new: Iterable[Mapping[str, Any]], fence: models.Fence | None = None
) -> Flow[tuple[models.Appended, ...]]:
    try:
        body: dict[str, Any] = {"events": [dict(event) for event in new]}
    except (TypeError, ValueError) as cause:
        raise errors.InvalidArgument(f"an event must be a mapping that can be encoded as JSON: {cause}") from cause
    if fence is not None:
        body["fence"] = fence_json(fence)

    def appended(data: models.Json) -> tuple[models.Appended, ...]:
        results = tuple(map(models.Appended.from_json, data["events"]))
        if len(results) != len(body["events"]):
            raise ValueError(f"{len(results)} events for {len(body['events'])}")
        return results

    return ask(service, "POST", "/v1/events", appended, body=body)
