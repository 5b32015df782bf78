"""Every verb of the contract as a flow: what is asked for, and what the answer means.

Both clients drive these; neither knows a path or a field of its own.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from lastbit import _masks, errors, models
from lastbit._protocol import Emit, Flow, Pause, Service, T, utf8, visible_ascii
from lastbit._shapes import expect
from lastbit.ids import ItemId

LONGEST_HOLD = 30
"""Seconds of one long poll. The service would hold 60, but that is also where many gateways give up."""

MOST_EVENTS = 1000
"""Events of one page."""

Ids = str | ItemId | Iterable[str | ItemId]


def _ask(service: Service, method: str, path: str, decode: Callable[[Any], T], **options: Any) -> Flow[T]:
    answer = yield from service.call(method, path, **options)
    return service.decoded(f"{method} {path}", answer, decode)


def _path(batch: int, *rest: str) -> str:
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 0:
        raise errors.InvalidArgument(f"a batch id is a whole number, not {batch!r}")
    return "/".join(["/v1/batches", str(batch), *rest])


def _key(idempotency_key: str | None) -> str | None:
    return None if idempotency_key is None else visible_ascii("an idempotency key", idempotency_key, 255)


def open_batch(
    service: Service,
    key: str | None,
    labels: Mapping[str, str] | None,
    group_size: int | None,
    items: int | None,
    sealed: bool,
    parent: str | ItemId | None,
    expires_in: float | timedelta | None,
    idempotency_key: str | None,
) -> Flow[tuple[models.Opened, bool]]:
    """The flow's value is the batch and whether the answer is a replay."""
    if isinstance(expires_in, timedelta):
        expires_in = int(expires_in.total_seconds())
    body: dict[str, Any] = {
        "key": key,
        "labels": None if labels is None else dict(labels),
        "group_size": group_size,
        "items": items,
        "sealed": sealed or None,
        "parent": None if parent is None else str(parent),
        "expires_in": expires_in,
    }
    # Left out, not null: the defaults are the service's.
    body = {name: value for name, value in body.items() if value is not None}
    answer = yield from service.call("POST", "/v1/batches", body=body, idempotency_key=_key(idempotency_key))
    opened = service.decoded("POST /v1/batches", answer, models.Opened.from_json)
    return opened, answer.headers.get("idempotency-replayed", "").lower() == "true"


def extend(service: Service, batch: int, count: int, idempotency_key: str | None) -> Flow[models.Extended]:
    return _ask(
        service,
        "POST",
        _path(batch, "items"),
        models.Extended.from_json,
        body={"count": count},
        idempotency_key=_key(idempotency_key),
    )


def seal(service: Service, batch: int) -> Flow[models.Sealed]:
    return _ask(service, "POST", _path(batch, "seal"), models.Sealed.from_json)


def cancel(service: Service, batch: int) -> Flow[models.Batch]:
    return _ask(service, "POST", _path(batch, "cancel"), models.Batch.from_json)


def delete(service: Service, batch: int) -> Flow[None]:
    yield from service.call("DELETE", _path(batch))


def get(service: Service, batch: int) -> Flow[models.Batch]:
    return _ask(service, "GET", _path(batch), models.Batch.from_json)


def verify(service: Service, batch: int) -> Flow[models.Verification]:
    return _ask(service, "GET", _path(batch, "verify"), models.Verification.from_json)


def repair(service: Service, batch: int, dry_run: bool) -> Flow[models.Repair]:
    return _ask(service, "POST", _path(batch, "repair"), models.Repair.from_json, body={"dry_run": dry_run})


def watermark(service: Service, batch: int) -> Flow[models.Watermark]:
    return _ask(service, "GET", _path(batch, "watermark"), models.Watermark.from_json)


def explain(service: Service, batch: int) -> Flow[models.Explanation]:
    return _ask(service, "GET", _path(batch, "explain"), models.Explanation.from_json)


def pending(service: Service, batch: int, page_size: int) -> Flow[None]:
    """Emits `PendingRange`s."""
    return _pages(service, _path(batch, "pending"), "ranges", models.PendingRange.from_json, [], page_size)


def failed(service: Service, batch: int, page_size: int) -> Flow[None]:
    """Emits `FailedRange`s."""
    return _pages(service, _path(batch, "failed"), "ranges", models.FailedRange.from_json, [], page_size)


def ranges_from(service: Service, batch: int, kind: str, start: int, page_size: int) -> Flow[None]:
    """Emits (start, end) of the ranges of `kind`, `pending` or `failed`, from the number `start` on.

    A cursor says from which number a page goes on, and here it is made instead of received: several readers share a
    batch that way. A service that writes its cursors otherwise refuses this one, so nothing is read wrongly.
    """
    cursor = b64encode(f"{kind}:{batch}:{start}".encode(), b"-_").decode().rstrip("=")
    return _pages(service, _path(batch, kind), "ranges", _start_and_end, [], page_size, cursor)


def _start_and_end(data: models.Json) -> tuple[int, int]:
    return expect(data["start"], int), expect(data["end"], int)


def batches(
    service: Service, state: str | None, key: str | None, labels: Mapping[str, str] | None, page_size: int
) -> Flow[None]:
    """Emits `Batch`es, newest first."""
    params = [(name, value) for name, value in (("state", state), ("key", key)) if value is not None]
    params += [("label", f"{name}:{value}") for name, value in (labels or {}).items()]
    return _pages(service, "/v1/batches", "batches", models.Batch.from_json, params, page_size)


def _pages(
    service: Service,
    path: str,
    field: str,
    decode: Callable[[Any], Any],
    params: list[tuple[str, str]],
    page_size: int,
    cursor: str | None = None,
) -> Flow[None]:
    def page(data: models.Json) -> tuple[list[Any], str | None]:
        return [decode(element) for element in data[field]], expect(data["next"], str | None)

    while True:
        asked = [*params, ("limit", str(page_size))]
        if cursor is not None:
            asked.append(("cursor", cursor))
        elements, cursor = yield from _ask(service, "GET", path, page, params=tuple(asked))
        for element in elements:
            yield Emit(element)
        # An empty page is not the last one; only a page without `next` is.
        if cursor is None:
            return


def wait(service: Service, batch: int, timeout: float | None, hold: int = LONGEST_HOLD) -> Flow[models.Batch]:
    """Long polls until the batch is in a terminal state; emits it as each poll saw it. Raises `WaitTimeout` after
    `timeout` seconds. `hold`: the longest that one poll may last, in whole seconds; with a shorter one the caller sees
    more of the way."""
    if timeout is not None and not timeout >= 0:
        raise errors.InvalidArgument(f"a timeout is a number of seconds, not {timeout!r}")
    started = service.now()
    left = math.inf if timeout is None else timeout
    while True:
        polled = service.now()
        held = int(min(hold, left))
        seen = yield from _ask(
            service,
            "GET",
            _path(batch),
            models.Batch.from_json,
            params=(("wait", str(held)),) if held else (),
            hold=held,
            # The policy's patience, if it ends sooner; a wait of 5 s does not retry for a minute.
            within=None if timeout is None else max(left, 1.0),
        )
        yield Emit(seen)
        if seen.ended:
            return seen
        now = service.now()
        left = math.inf if timeout is None else timeout - (now - started)
        if left <= 0:
            assert timeout is not None
            raise errors.WaitTimeout(seen, timeout)
        # A poll that comes back at once must not become a storm: a service that is stopping, or holds nothing back.
        rest = min(left, 1.0 - (now - polled))
        if rest > 0:
            yield Pause(rest)
            left = math.inf if timeout is None else max(0.0, timeout - (service.now() - started))


def resolve(
    service: Service,
    verb: str,
    bodies: Iterator[_masks.Piece],
    reason: str | None,
    idempotency_key: str | None = None,
) -> Flow[models.AckResult]:
    """Send pieces of ids to `verb` (`acks` or `failures`), one request each, and merge the answers. An error on the way
    bears what was answered before it as `partial`. A key of the caller's own is for a single piece."""
    result = models.AckResult()
    given = {} if reason is None else {"reason": utf8("a reason", reason)}
    try:
        for body in bodies:
            answer = yield from _ask(
                service,
                "POST",
                f"/v1/{verb}",
                models.AckResult.from_json,
                body={**body, **given},
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
    asked = [("after", after), ("batch", batch), ("wait", wait or None), ("limit", limit)]
    params = [(name, str(value)) for name, value in asked if value is not None]
    params += [("type", name) for name in ((types,) if isinstance(types, str) else types)]
    return _ask(service, "GET", "/v1/events", models.EventPage.from_json, params=tuple(params), hold=wait)


def follow(service: Service, after: int | None, types: str | Iterable[str], batch: int | None) -> Flow[None]:
    """Emits `Event`s, for ever. Each poll begins where the one before ended, whatever came between, so none is lost or
    comes twice."""
    types = types if isinstance(types, str) else tuple(types)

    def poll(after: int | None) -> Flow[tuple[Sequence[models.Event], int]]:
        page = yield from events(service, after, types, batch, LONGEST_HOLD, MOST_EVENTS)
        return page.events, page.next

    return _following(service, after, poll)


def _following(
    service: Service, after: int | None, poll: Callable[[int | None], Flow[tuple[Sequence[Any], int]]]
) -> Flow[None]:
    """Emits what each long poll finds above the position where the one before ended, for ever."""
    while True:
        polled = service.now()
        found, after = yield from poll(after)
        for each in found:
            yield Emit(each)
        # A poll that comes back at once with nothing must not become a storm: the service is stopping.
        rest = 1.0 - (service.now() - polled)
        if not found and rest > 0:
            yield Pause(rest)


def append(
    service: Service, new: Iterable[Mapping[str, Any]], fence: models.Fence | None = None
) -> Flow[tuple[models.Appended, ...]]:
    try:
        body: dict[str, Any] = {"events": [dict(event) for event in new]}
    except (TypeError, ValueError) as cause:
        raise errors.InvalidArgument(f"an event is a mapping, which has a JSON form: {cause}") from cause
    if fence is not None:
        body["fence"] = fence.to_json()

    def appended(data: models.Json) -> tuple[models.Appended, ...]:
        answered = tuple(map(models.Appended.from_json, data["events"]))
        if len(answered) != len(body["events"]):
            raise ValueError(f"{len(answered)} events for {len(body['events'])}")
        return answered

    return _ask(service, "POST", "/v1/events", appended, body=body)
