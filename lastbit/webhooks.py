"""Webhooks: `client.webhooks` makes and lists them, shows what became of their deliveries, and sends these again.

The service sends each event of the feed, signed by the Standard Webhooks specification, at least once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from lastbit import errors
from lastbit._calls import _ask, _pages
from lastbit._protocol import Flow, Service
from lastbit._shapes import expect
from lastbit.models import Json, _time, _time_or_none

if TYPE_CHECKING:
    from lastbit.client import AsyncClient, Client

LONGEST_SEND = 60
"""Seconds for which the service may wait for a receiver's answer."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """A URL that is told of events: of these `types`, or of all. `state` is `active`, or `disabled` after it answered
    410 Gone; `position` is up to which event of the feed its deliveries were planned."""

    id: int
    url: str
    types: tuple[str, ...] | None
    label: str | None
    state: str
    position: int
    created_at: datetime

    @classmethod
    def _fields(cls, data: Json) -> dict[str, Any]:
        return {
            "id": data["id"],
            "url": data["url"],
            "types": None if data["types"] is None else tuple(data["types"]),
            "label": data["label"],
            "state": data["state"],
            "position": data["position"],
            "created_at": _time(data["created_at"]),
        }

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data))


@dataclass(frozen=True, slots=True)
class CreatedWebhook(Webhook):
    """A new webhook with its secret, which no later answer has again: keep it where the receiver finds it."""

    secret: str = field(repr=False)

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data), secret=data["secret"])


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try: the `status` of the answer, or in `error` why there was no whole one."""

    at: datetime
    status: int | None
    error: str | None
    milliseconds: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(_time(data["at"]), data["status"], data["error"], data["milliseconds"])


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one webhook. `state` is `pending`, `delivered` or `dead`; `attempts` counts since it was planned or
    redelivered, `log` has every attempt."""

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
            _time_or_none(data["next_attempt_at"]),
            tuple(map(Attempt.from_json, data["log"])),
        )


@dataclass(frozen=True, slots=True)
class Tested:
    """What came back for a test event, which was sent under the id `event`."""

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
        raise errors.InvalidArgument(f"types are several names, not one text: [{types!r}]")
    body = {"url": url, "types": None if types is None else list(types), "label": label}
    # Not sent twice: the secret of the first one would be lost with its answer.
    return _ask(service, "POST", "/v1/webhooks", CreatedWebhook.from_json, body=_given(body), within=0.0)


def _get(service: Service, webhook: int) -> Flow[Webhook]:
    return _ask(service, "GET", _path(webhook), Webhook.from_json)


def _list(service: Service, page_size: int) -> Flow[None]:
    return _pages(service, "/v1/webhooks", "webhooks", Webhook.from_json, [], page_size)


def _delete(service: Service, webhook: int) -> Flow[None]:
    yield from service.call("DELETE", _path(webhook))


def _deliveries(service: Service, webhook: int, state: str | None, page_size: int) -> Flow[None]:
    params = [] if state is None else [("state", state)]
    return _pages(service, _path(webhook, "deliveries"), "deliveries", Delivery.from_json, params, page_size)


def _redeliver(service: Service, webhook: int, position: int | None, event: str | None) -> Flow[int]:
    def count(data: Json) -> int:
        redelivered: int = expect(data["redelivered"], int)
        return redelivered

    return _ask(
        service, "POST", _path(webhook, "redeliver"), count, body=_given({"position": position, "event": event})
    )


def _test(service: Service, webhook: int) -> Flow[Tested]:
    return _ask(service, "POST", _path(webhook, "test"), Tested.from_json, hold=LONGEST_SEND, within=0.0)


def _given(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


class Webhooks:
    """`client.webhooks`. All methods raise `ServiceError` (`WebhookNotFound`, `InvalidRequest`) and
    `ServiceUnreachable`."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(self, url: str, *, types: Sequence[str] | None = None, label: str | None = None) -> CreatedWebhook:
        """Tell `url` of the events from now on, of these types or of all. The answer alone has the `secret`."""
        return self._client._run(_create(self._client._service, url, types, label))

    def get(self, webhook: int) -> Webhook:
        """One webhook as it is now."""
        return self._client._run(_get(self._client._service, webhook))

    def list(self, *, page_size: int = 100) -> Iterator[Webhook]:
        """The webhooks, newest first, fetched as they are asked for."""
        return self._client._iterate(_list(self._client._service, page_size))

    def delete(self, webhook: int) -> None:
        """Send it nothing more, and remove it with its deliveries."""
        self._client._run(_delete(self._client._service, webhook))

    def deliveries(self, webhook: int, *, state: str | None = None, page_size: int = 100) -> Iterator[Delivery]:
        """What was sent and is to be sent, newest event first, fetched as it is asked for."""
        return self._client._iterate(_deliveries(self._client._service, webhook, state, page_size))

    def redeliver(self, webhook: int, *, position: int | None = None, event: str | None = None) -> int:
        """Send one event again, by its position or id, or without either all that are dead; how many are due again."""
        return self._client._run(_redeliver(self._client._service, webhook, position, event))

    def test(self, webhook: int) -> Tested:
        """Have a test event sent now, and wait for what comes back."""
        return self._client._run(_test(self._client._service, webhook))


class AsyncWebhooks:
    """`Webhooks`, awaited."""

    __slots__ = ("_client",)

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(self, url: str, *, types: Sequence[str] | None = None, label: str | None = None) -> CreatedWebhook:
        """Tell `url` of the events from now on; see `Webhooks.create`."""
        return await self._client._run(_create(self._client._service, url, types, label))

    async def get(self, webhook: int) -> Webhook:
        """One webhook as it is now."""
        return await self._client._run(_get(self._client._service, webhook))

    def list(self, *, page_size: int = 100) -> AsyncIterator[Webhook]:
        """The webhooks, newest first, fetched as they are asked for."""
        return self._client._iterate(_list(self._client._service, page_size))

    async def delete(self, webhook: int) -> None:
        """Send it nothing more, and remove it with its deliveries."""
        await self._client._run(_delete(self._client._service, webhook))

    def deliveries(self, webhook: int, *, state: str | None = None, page_size: int = 100) -> AsyncIterator[Delivery]:
        """What was sent and is to be sent, newest event first, fetched as it is asked for."""
        return self._client._iterate(_deliveries(self._client._service, webhook, state, page_size))

    async def redeliver(self, webhook: int, *, position: int | None = None, event: str | None = None) -> int:
        """Send events again; see `Webhooks.redeliver`."""
        return await self._client._run(_redeliver(self._client._service, webhook, position, event))

    async def test(self, webhook: int) -> Tested:
        """Have a test event sent now, and wait for what comes back."""
        return await self._client._run(_test(self._client._service, webhook))
