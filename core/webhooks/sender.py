"""The interface that core uses to send a webhook's requests. `senders` implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SendResult:
    """The result of one request. `error` explains why there is no complete response; there may be a `status` as
    well."""

    status: int | None
    error: str | None
    milliseconds: int
    retry_after: float | None = None
    """Seconds, from the receiver's Retry-After."""

    @property
    def delivered(self) -> bool:
        return self.error is None and self.status is not None and 200 <= self.status < 300


class Sender(Protocol):
    """An HTTP client. It is called from several threads at once."""

    def check(self, url: str) -> None:
        """Raises `addresses.Unfit` if this service may not send to the URL, whatever its host resolves to."""

    def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        """POST `body`. It blocks, so no transaction may be open. Never raises for errors of the network or the
        receiver."""
