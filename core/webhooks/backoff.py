"""The pauses between attempts of a delivery: exponential backoff with full jitter (Brooker, "Exponential Backoff And
Jitter", 2015), as the Standard Webhooks specification recommends. The random number is an argument.

Full jitter spreads the retries of deliveries that failed together over the whole interval. Its weakness: a pause may be
close to zero, so all attempts may be used up long before the ceilings suggest. The average pause is half its ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FACTOR: Final = 5.0
"""The ceilings are 5 s, 25 s, 2 min, 10 min, 52 min, 4 h, 22 h, 24 h and 24 h by default: ten attempts in 37 hours on
average, in 75 at most."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """`tries` is the number of attempts, including the first one. `first` is the ceiling of the first pause, and
    `longest` that of every pause, in seconds."""

    tries: int = 10
    first: float = 5.0
    longest: float = 86_400.0

    def pause(self, failures: int, chance: float, retry_after: float | None = None) -> float | None:
        """Seconds until the next attempt after this number of `failures`; None if no attempt is left. `chance` is a
        random number from 0 to 1. `retry_after`, from the receiver, is a minimum in seconds, limited to `longest`."""
        if failures >= self.tries:
            return None
        ceiling = min(self.longest, self.first * FACTOR ** (failures - 1))
        return max(ceiling * chance, min(retry_after or 0.0, self.longest))
