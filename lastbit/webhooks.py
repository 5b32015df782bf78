"""Webhooks: `client.webhooks` creates and lists them, shows their deliveries, sends deliveries again, and rotates
secrets.

The service sends each event of the feed at least once, signed by the Standard Webhooks specification.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Self

from lastbit import _arguments, errors
from lastbit._calls import ask, pages
from lastbit._drivers import AsyncDriver, Driver
from lastbit._protocol import Flow, Service, visible_ascii
from lastbit._shapes import expect, timestamp, timestamp_or_none
from lastbit.models import Json

LONGEST_SEND = 60
"""Seconds that the service may wait for a receiver's response."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """A URL that receives events of these `types`, or of all. `state` is `active`, or `disabled` after a 410 Gone
    response. `position`: the last event of the feed for which deliveries were planned. `batch`: the batch whose
    callback it is. `overlap_until`: until then, secrets from before a rotation sign too."""

    id: int
    url: str
    types: tuple[str, ...] | None
    label: str | None
    state: str
    position: int
    created_at: datetime
    batch: int | None = field(default=None, kw_only=True)
    overlap_until: datetime | None = field(default=None, kw_only=True)

    @classmethod
    def _fields(cls, data: Json) -> dict[str, Any]:
        return {
            "id": data["id"],
            "url": data["url"],
            "types": None if data["types"] is None else tuple(data["types"]),
            "label": data["label"],
            "state": data["state"],
            "position": data["position"],
            "created_at": timestamp(data["created_at"]),
            "batch": data.get("batch"),
            "overlap_until": timestamp_or_none(data.get("overlap_until")),
        }

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data))


@dataclass(frozen=True, slots=True)
class _WithSecret(Webhook):
    secret: str = field(repr=False)

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data), secret=data["secret"])


class CreatedWebhook(_WithSecret):
    """A new webhook with its secret, which is shown only once: store it for the receiver."""

    __slots__ = ()


class RotatedWebhook(_WithSecret):
    """A webhook with its new secret: store it for the receiver. No other call returns it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt: the response's `status`, or the reason in `error` if there was no complete response."""

    at: datetime
    status: int | None
    error: str | None
    milliseconds: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(timestamp(data["at"]), data["status"], data["error"], data["milliseconds"])


@dataclass(frozen=True, slots=True)
class Delivery:
    """The delivery of one event to one webhook. `state` is `pending`, `delivered` or `dead`. `attempts` counts attempts
    since it was planned or redelivered; `log` has all attempts."""

    webhook: int
    position: int
    event: str
    type: str
    batch: int | None
    state: str
    attempts: int
    next_attempt_at: datetime | None
    log: tuple[Attempt, ...]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(
            data["webhook"],
            data["position"],
            data["event"],
            data["type"],
            data["batch"],
            data["state"],
            data["attempts"],
            timestamp_or_none(data["next_attempt_at"]),
            tuple(map(Attempt.from_json, data["log"])),
        )


@dataclass(frozen=True, slots=True)
class Tested:
    """The outcome of a test event, which was sent with the id `event`."""

    event: str
    delivered: bool
    status: int | None
    error: str | None
    milliseconds: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["event"], data["delivered"], data["status"], data["error"], data["milliseconds"])


def _path(webhook: int, *rest: str) -> str:
    if not isinstance(webhook, int) or isinstance(webhook, bool) or webhook < 0:
        raise errors.InvalidArgument(f"a webhook id is a whole number, not {webhook!r}")
    return "/".join(["/v1/webhooks", str(webhook), *rest])


def _create(service: Service, url: str, types: Sequence[str] | None, label: str | None) -> Flow[CreatedWebhook]:
    if isinstance(types, str):
        raise errors.InvalidArgument(f"types is a list of names, not one text: use [{types!r}]")
    body = {"url": url, "types": None if types is None else list(_arguments.types(types)), "label": label}
    # Not retried: the secret of the first webhook would be lost with its response.
    return ask(service, "POST", "/v1/webhooks", CreatedWebhook.from_json, body=_given(body), within=0.0)


def _get(service: Service, webhook: int) -> Flow[Webhook]:
    return ask(service, "GET", _path(webhook), Webhook.from_json)


def _list(service: Service, page_size: int) -> Flow[None]:
    return pages(service, "/v1/webhooks", "webhooks", Webhook.from_json, [], page_size)


def _delete(service: Service, webhook: int) -> Flow[None]:
    yield from service.call("DELETE", _path(webhook))


def _deliveries(service: Service, webhook: int, state: str | None, page_size: int) -> Flow[None]:
    params = [] if state is None else [("state", state)]
    return pages(service, _path(webhook, "deliveries"), "deliveries", Delivery.from_json, params, page_size)


def _redeliver(service: Service, webhook: int, position: int | None, event: str | None) -> Flow[int]:
    def count(data: Json) -> int:
        redelivered: int = expect(data["redelivered"], int)
        return redelivered

    return ask(service, "POST", _path(webhook, "redeliver"), count, body=_given({"position": position, "event": event}))


def _test(service: Service, webhook: int) -> Flow[Tested]:
    return ask(service, "POST", _path(webhook, "test"), Tested.from_json, hold=LONGEST_SEND, within=0.0)


def _rotate_secret(
    service: Service, webhook: int, overlap: int | timedelta | None, idempotency_key: str | None
) -> Flow[RotatedWebhook]:
    if isinstance(overlap, timedelta):
        overlap = int(overlap.total_seconds())
    key = None if idempotency_key is None else visible_ascii("an idempotency key", idempotency_key, 255)
    path = _path(webhook, "rotate-secret")
    body = _given({"overlap_seconds": overlap})
    return ask(service, "POST", path, RotatedWebhook.from_json, body=body, idempotency_key=key)


def _given(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


class Webhooks:
    """`client.webhooks`. All methods raise `ServiceError` (`WebhookNotFound`, `InvalidRequest`) and
    `ServiceUnreachable`."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def create(self, url: str, *, types: Sequence[str] | None = None, label: str | None = None) -> CreatedWebhook:
        """Send `url` all new events, or those of these types. Only this result contains the `secret`. A repeat creates
        another webhook, so a call that fails is not retried: look at `list` before you repeat it."""
        return self._driver.run(_create, url, types, label)

    def get(self, webhook: int) -> Webhook:
        """The current state of one webhook."""
        return self._driver.run(_get, webhook)

    def list(self, *, page_size: int = 100) -> Iterator[Webhook]:
        """The webhooks, newest first, fetched page by page."""
        return self._driver.iterate(_list, page_size)

    def delete(self, webhook: int) -> None:
        """Delete the webhook and its deliveries."""
        self._driver.run(_delete, webhook)

    def deliveries(self, webhook: int, *, state: str | None = None, page_size: int = 100) -> Iterator[Delivery]:
        """The deliveries of a webhook, newest event first, fetched page by page. `state`: only those in this state."""
        return self._driver.iterate(_deliveries, webhook, state, page_size)

    def redeliver(self, webhook: int, *, position: int | None = None, event: str | None = None) -> int:
        """Send one event again, by its position or id; with neither, all dead deliveries. Returns the number of
        deliveries."""
        return self._driver.run(_redeliver, webhook, position, event)

    def test(self, webhook: int) -> Tested:
        """Send a test event now and wait for the outcome."""
        return self._driver.run(_test, webhook)

    def rotate_secret(
        self, webhook: int, *, overlap: int | timedelta | None = None, idempotency_key: str | None = None
    ) -> RotatedWebhook:
        """Give the webhook a new secret. The earlier ones sign too for `overlap` seconds, by default for a day, so that
        the receiver can change its own meanwhile; with 0 they end at once."""
        return self._driver.run(_rotate_secret, webhook, overlap, idempotency_key)


class AsyncWebhooks:
    """`Webhooks`, awaited."""

    __slots__ = ("_driver",)

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    async def create(self, url: str, *, types: Sequence[str] | None = None, label: str | None = None) -> CreatedWebhook:
        """Send `url` all new events, or those of these types. Only this result contains the `secret`. A repeat creates
        another webhook, so a call that fails is not retried: look at `list` before you repeat it."""
        return await self._driver.run(_create, url, types, label)

    async def get(self, webhook: int) -> Webhook:
        """The current state of one webhook."""
        return await self._driver.run(_get, webhook)

    def list(self, *, page_size: int = 100) -> AsyncIterator[Webhook]:
        """The webhooks, newest first, fetched page by page."""
        return self._driver.iterate(_list, page_size)

    async def delete(self, webhook: int) -> None:
        """Delete the webhook and its deliveries."""
        await self._driver.run(_delete, webhook)

    def deliveries(self, webhook: int, *, state: str | None = None, page_size: int = 100) -> AsyncIterator[Delivery]:
        """The deliveries of a webhook, newest event first, fetched page by page. `state`: only those in this state."""
        return self._driver.iterate(_deliveries, webhook, state, page_size)

    async def redeliver(self, webhook: int, *, position: int | None = None, event: str | None = None) -> int:
        """Send one event again, by its position or id; with neither, all dead deliveries. Returns the number of
        deliveries."""
        return await self._driver.run(_redeliver, webhook, position, event)

    async def test(self, webhook: int) -> Tested:
        """Send a test event now and wait for the outcome."""
        return await self._driver.run(_test, webhook)

    async def rotate_secret(
        self, webhook: int, *, overlap: int | timedelta | None = None, idempotency_key: str | None = None
    ) -> RotatedWebhook:
        """Give the webhook a new secret. The earlier ones sign too for `overlap` seconds, by default for a day, so that
        the receiver can change its own meanwhile; with 0 they end at once."""
        return await self._driver.run(_rotate_secret, webhook, overlap, idempotency_key)
