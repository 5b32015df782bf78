"""The tolerance of a batch, as pure functions: how many failures it may have and still succeed.

Both limits are exact: counts are integers, and a percentage is compared without a division. With both, the failures
must be within both. A percentage of the items can be judged only once the batch is sealed, as until then its number of
items may grow.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class OnExceeded(StrEnum):
    """What happens to a live batch whose failures pass its tolerance."""

    CONTINUE = "continue"
    CANCEL = "cancel"


class Tolerance(NamedTuple):
    """The maximum number of failed items, and their maximum percentage. None: no limit of this kind."""

    failures: int | None = None
    percentage: int | None = None

    def is_passed(self, items: int, failed: int, *, sealed: bool) -> bool:
        """Whether the failures are beyond a limit. Without limits, they never are."""
        if self.failures is not None and failed > self.failures:
            return True
        return sealed and self.percentage is not None and failed * 100 > self.percentage * items

    def succeeds(self, items: int, failed: int) -> bool:
        """Whether a complete batch succeeded. Without limits, no item may have failed."""
        if not failed:
            return True
        return self != NONE and not self.is_passed(items, failed, sealed=True)


NONE = Tolerance()
