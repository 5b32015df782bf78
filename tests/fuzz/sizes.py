"""The amount of fuzzing: a little in `make test-slow`, always the same; much more in `make fuzz`, with new cases each
time."""

from __future__ import annotations

import os
import random
from typing import Any, Final

from hypothesis import HealthCheck, settings

LONG: Final = "LASTBIT_FUZZ" in os.environ
SEED: Final = int(os.environ.get("LASTBIT_FUZZ_SEED", "0")) or (random.randrange(1, 2**32) if LONG else 1)
"""The seed of cases that are drawn without Hypothesis, which repeats cases in its own way."""


def examples(small: int, large: int) -> Any:
    """The settings of a Hypothesis test with this many examples: `small`, or `large` in a long run."""
    return settings(
        max_examples=large if LONG else small,
        derandomize=not LONG,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
