"""When a delivery that failed is tried again: exponential backoff with full jitter (Brooker, "Exponential Backoff And
Jitter", 2015), as the Standard Webhooks specification recommends. Pure: chance comes in as an argument.

Full jitter spreads the retries of many deliveries that failed together over the whole interval. Its weakness: a single
pause can be close to nothing, so that tries are used up sooner than the ceilings suggest; on average it is half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FACTOR: Final = 5.0
"""5 s, 25 s, 2 min, 10 min, 52 min, 4 h, 22 h, 24 h, 24 h: ten tries in 37 hours on average, in 75 at most."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """`tries` in all, the ceiling of the pause after the first of them and of any, in seconds."""

    tries: int = 10
    first: float = 5.0
    longest: float = 86_400.0

    def pause(self, failures: int, chance: float, retry_after: float | None = None) -> float | None:
        """Seconds until the next try after so many `failures`, None where that was the last. `chance` is from 0 to 1;
        `retry_after` is what the receiver asked for: no sooner than that, within the longest pause."""
        if failures >= self.tries:
            return None
        ceiling = min(self.longest, self.first * FACTOR ** (failures - 1))
        return max(ceiling * chance, min(retry_after or 0.0, self.longest))
