"""How much is tried: a little in `make test-slow`, always the same; in `make fuzz` much more, others each time."""

from __future__ import annotations

import os
import random
from typing import Any, Final

from hypothesis import HealthCheck, settings

LONG: Final = "LASTBIT_FUZZ" in os.environ
SEED: Final = int(os.environ.get("LASTBIT_FUZZ_SEED", "0")) or (random.randrange(1, 2**32) if LONG else 1)
"""Of what is drawn without Hypothesis, which has ways of its own to repeat."""


def examples(small: int, large: int) -> Any:
    """The settings of a Hypothesis test that tries so many: `small`, or `large` in a long run."""
    return settings(
        max_examples=large if LONG else small,
        derandomize=not LONG,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
