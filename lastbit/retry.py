"""The retry policy: which requests are retried, and the pauses between attempts.

Nearly every request is safe to repeat, as each POST and PATCH has an Idempotency-Key that stays the same. So every
temporary failure is retried, except for a call that must be sent only once (`Service.call`). Pauses grow exponentially
with full jitter (Brooker, "Exponential Backoff And Jitter", 2015): each is a random share of a limit that doubles. A
pause may be near 0, so this spreads the retries of many clients, but a single client may retry at once. A service that
needs a pause sends Retry-After, which is a minimum.
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
    """The retry policy: at most `attempts` attempts, within `deadline` seconds of the first. The pause after attempt n
    is random between 0 and min(cap, base * 2^(n-1)) seconds, plus Retry-After if present."""

    attempts: int = 8
    deadline: float = 60.0
    base: float = 0.1
    cap: float = 10.0

    def pause(self, attempt: int, elapsed: float, retry_after: float | None, chance: float) -> float | None:
        """Seconds to wait after the failed `attempt` (1-based), or None to give up. `chance` is random in [0, 1).

        It gives up at once if the wait would end beyond the deadline.
        """
        if attempt >= self.attempts:
            return None
        # The exponent is limited because 2.0**1024 overflows, long after the cap applies.
        pause = chance * min(self.cap, self.base * 2.0 ** min(attempt - 1, 60))
        if retry_after is not None:
            # In addition to the jitter: otherwise all refused clients would retry at the same time.
            pause += retry_after
        return pause if elapsed + pause < self.deadline else None


def retry_after_seconds(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """The Retry-After of a response, in seconds from now; None if it is missing or invalid.

    Header names are in lower case. A date is compared with the response's own Date, so that a wrong clock on either
    side does not matter; without one it is compared with `now`.
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
    reference = _http_date(headers.get("date", "")) or now or datetime.now(UTC)
    return max(0.0, (until - reference).total_seconds())


def _http_date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError, TypeError, IndexError):
        return None  # which of these the parser raises depends on Python's release
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
