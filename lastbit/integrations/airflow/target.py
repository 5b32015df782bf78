"""The batch that a task waits for: one by its id, or the newest one with a key, which may not be open yet."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lastbit.client import AsyncClient, Client
from lastbit.errors import InvalidArgument
from lastbit.models import Batch


@dataclass(frozen=True, slots=True)
class Target:
    """Either `batch_id`, or `batch_key` with the time before which batches with that key don't count."""

    batch_id: int | None = None
    batch_key: str | None = None
    opened_since: datetime | None = None

    @classmethod
    def of(cls, batch_id: Any, batch_key: Any, opened_since: Any) -> Target:
        """From arguments that may have been templates. Raises `InvalidArgument`."""
        if (batch_id is None) == (batch_key is None):
            given = "neither has a value" if batch_id is None else "both have one"
            raise InvalidArgument(f"a batch is named by either batch_id or batch_key; here, {given}")
        if batch_id is not None:
            if opened_since is not None:
                raise InvalidArgument("opened_since is for batch_key: a batch_id names one batch")
            return cls(batch_id=whole_number("batch_id", batch_id))
        if not isinstance(batch_key, str) or not batch_key:
            raise InvalidArgument(f"batch_key is a text that is not empty, not {batch_key!r}")
        return cls(batch_key=batch_key, opened_since=None if opened_since is None else moment(opened_since))

    def __str__(self) -> str:
        if self.batch_id is not None:
            return f"batch {self.batch_id}"
        since = "" if self.opened_since is None else f", opened since {self.opened_since.isoformat()}"
        return f"the newest batch with key {self.batch_key!r}{since}"

    def find(self, client: Client) -> Batch | None:
        """The batch; None if none with the key is open yet. Raises `BatchNotFound` for an unknown id."""
        if self.batch_id is not None:
            return client.batch(self.batch_id).refresh()
        for newest in client.batches(key=self.batch_key, page_size=1):
            return self._fitting(newest)
        return None

    async def find_async(self, client: AsyncClient) -> Batch | None:
        """`find`, awaited."""
        if self.batch_id is not None:
            return await client.batch(self.batch_id).refresh()
        async for newest in client.batches(key=self.batch_key, page_size=1):
            return self._fitting(newest)
        return None

    def _fitting(self, newest: Batch) -> Batch | None:
        is_earlier = self.opened_since is not None and newest.created_at < self.opened_since
        return None if is_earlier else newest


def whole_number(name: str, value: Any) -> int:
    """A batch's id: a number, or digits, because a rendered template is a text. Raises `InvalidArgument`."""
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()):
        raise InvalidArgument(
            f"{name} is the id of a batch, a whole number, not {value!r}: does the task that it comes from return one?"
        )
    return int(text)


def moment(value: datetime | str) -> datetime:
    """A time as `datetime` or in ISO 8601; one without a time zone is in UTC. Raises `InvalidArgument`."""
    try:
        time = value if isinstance(value, datetime) else datetime.fromisoformat(value.strip())
    except (ValueError, AttributeError) as cause:
        raise InvalidArgument(f"opened_since is a time in ISO 8601, like 2026-11-25T06:00Z, not {value!r}") from cause
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
