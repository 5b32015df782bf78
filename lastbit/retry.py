"""When a request is sent again, and after how long: the pure part of patience.

Everything that this client sends may be sent twice (each POST bears an Idempotency-Key that stays the same), so every
failure that can pass is retried. The pauses are exponential with full jitter (Brooker, "Exponential Backoff And
Jitter", 2015): a random share of a doubling bound. Its weakness: a pause can come out near 0, so it spreads a crowd of
clients, but it does not promise a single one a rest; a service that needs one says Retry-After, which is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

RETRIED_STATUSES = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Retry:
    """How long to insist: at most `attempts` times, and not beyond `deadline` seconds after the first. The pause after
    attempt n is random between 0 and min(cap, base * 2^(n-1)) seconds, after Retry-After where there is one."""

    attempts: int = 8
    deadline: float = 60.0
    base: float = 0.1
    cap: float = 10.0

    def pause(self, attempt: int, elapsed: float, retry_after: float | None, chance: float) -> float | None:
        """Seconds to wait after the failed `attempt` (1-based), or None to give up. `chance` is random in [0, 1).

        It gives up at once where the wait would end beyond the deadline: the caller learns now what it would learn
        then.
        """
        if attempt >= self.attempts:
            return None
        # The exponent is bounded because 2.0**1024 overflows, long after the cap has decided.
        pause = chance * min(self.cap, self.base * 2.0 ** min(attempt - 1, 60))
        if retry_after is not None:
            # On top of it: all who were refused at once would otherwise be back at once.
            pause += retry_after
        return pause if elapsed + pause < self.deadline else None


def retry_after_seconds(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """The Retry-After of an answer in seconds from now, or None where it has none that is understood.

    Header names are in lower case. A date is compared with the answer's own Date, so that a clock that is off on either
    side makes no difference; only without one it is compared with `now`.
    """
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    if text.isascii() and text.replace(".", "", 1).isdigit():
        seconds = float(text)
        return seconds if math.isfinite(seconds) else None
    until = _http_date(text)
    if until is None:
        return None
    sent = _http_date(headers.get("date", "")) or now or datetime.now(UTC)
    return max(0.0, (until - sent).total_seconds())


def _http_date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError, TypeError, IndexError):
        return None  # depending on the release, the parser raises any of them
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
