"""Rate limits of each token: calls, items and bytes of bodies per second.

Each token has a token bucket of each kind in the memory of this process. A bucket holds one second's worth. An admitted
call is charged in full, even if it costs more than the bucket holds; then calls are refused until the bucket has
refilled. So at a rate of 1,000 items a second, a call of 10,000 items is possible every ten seconds. A call that
exceeds a rate costs at most one request; a call that is refused for another reason costs as much as an accepted one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection
from typing import Final

from api.metrics import REFUSED
from api.problems import Problem
from lastbit.tokens import Token

BURST: Final = 1.0
"""The capacity of a bucket, in seconds of its rate."""


class Bucket:
    """A token bucket. It stores only the time at which it will be full again if nothing more is taken."""

    __slots__ = ("full_at", "rate")

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.full_at = float("-inf")

    def take(self, amount: int, now: float) -> float:
        """Take `amount` if the bucket holds at least 1, and return 0. Otherwise take nothing, and return the seconds
        until it holds 1. `now`: seconds of the monotonic clock."""
        short = self.full_at - now + 1 / self.rate - BURST
        if short > 1e-9:
            return short
        self.owe(amount, now)
        return 0.0

    def owe(self, amount: int, now: float) -> None:
        """Take `amount`, whatever the bucket holds."""
        self.full_at = max(self.full_at, now) + amount / self.rate


class Rates:
    """The buckets of all tokens that have a rate. Thread-safe."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[bytes, str], Bucket] = {}
        self._lock = threading.Lock()

    def charge_call(self, caller: Token, size: int = 0) -> None:
        """Charge one call with a body of `size` bytes. Raises `Problem`: `rate_limited`."""
        if caller.requests is not None:
            self._take(caller, "requests", caller.requests, 1)
        if caller.body_bytes is not None and size:
            self._take(caller, "bytes", caller.body_bytes, size)

    def owe_bytes(self, caller: Token, size: int) -> None:
        """Charge bytes that were read before their number was known."""
        if caller.body_bytes is not None:
            with self._lock:
                self._bucket(caller, "bytes", caller.body_bytes).owe(size, time.monotonic())

    def require_items(self, caller: Token) -> None:
        """Refuse a large call before it is parsed, if it will be refused after that. Raises `Problem`:
        `rate_limited`."""
        if caller.items is not None:
            self._take(caller, "items", caller.items, 0)

    def charge_items(self, caller: Token, items: int) -> None:
        """Charge the items, events or entries of a call. Raises `Problem`: `rate_limited`."""
        if caller.items is not None and items:
            self._take(caller, "items", caller.items, items)

    def retain(self, tokens: Collection[bytes]) -> None:
        """Drop the buckets of all other tokens. `tokens`: digests."""
        with self._lock:
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if key[0] in tokens}

    def _take(self, caller: Token, unit: str, rate: int, amount: int) -> None:
        with self._lock:
            seconds = self._bucket(caller, unit, rate).take(amount, time.monotonic())
        if seconds:
            REFUSED.labels("rate").inc()
            raise Problem(
                "rate_limited",
                f"the token {caller.name} has a rate of {rate:,} {unit} a second",
                headers={"Retry-After": str(math.ceil(seconds))},
            )

    def _bucket(self, caller: Token, unit: str, rate: int) -> Bucket:
        key = caller.digest, unit
        bucket = self._buckets.get(key)
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[key] = Bucket(rate)
        return bucket
