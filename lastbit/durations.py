"""Durations as people type them: a whole number and a unit, such as `90s`, `15m`, `12h`, `7d` or `2w`."""

from __future__ import annotations

import re
from typing import Final

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION: Final = re.compile(f"([0-9]{{1,9}})([{''.join(_SECONDS)}])")
UNITS: Final = "s, m, h, d or w"


def seconds(text: str) -> int:
    """The seconds of a duration. Raises `ValueError`."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration: expected a number with {UNITS}, like 15m")
    return int(match[1]) * _SECONDS[match[2]]
