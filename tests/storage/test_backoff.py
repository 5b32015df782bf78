"""The pause before the next try of a delivery, as a pure function."""

from __future__ import annotations

import pytest

from core.webhooks.backoff import Backoff


def test_the_defaults_spread_ten_tries_over_more_than_a_day() -> None:
    """Maximum pauses grow fivefold up to a day; on average they total more than a day."""
    pauses = [Backoff().pause(failures, 1.0) for failures in range(1, 11)]
    assert pauses == [5, 25, 125, 625, 3125, 15_625, 78_125, 86_400, 86_400, None]
    assert sum(pause for pause in pauses if pause) / 2 > 86_400


@pytest.mark.parametrize(("chance", "pause"), [(0.0, 0.0), (0.5, 12.5), (1.0, 25.0)])
def test_jitter_is_full(chance: float, pause: float) -> None:
    """Anything from zero to the maximum."""
    assert Backoff().pause(2, chance) == pause


@pytest.mark.parametrize(
    ("retry_after", "pause"), [(None, 2.5), (0, 2.5), (1, 2.5), (600, 600), (10**9, 86_400), (-5, 2.5)]
)
def test_retry_after_is_respected_within_bounds(retry_after: float | None, pause: float) -> None:
    """No earlier than it asks, and never later than the longest pause."""
    assert Backoff().pause(1, 0.5, retry_after) == pause


def test_there_is_no_pause_after_the_last_try() -> None:
    """However long the receiver asks to wait; and a large number of tries doesn't overflow."""
    assert Backoff(tries=1).pause(1, 0.5, 60) is None
    assert Backoff(tries=100).pause(99, 1.0) == 86_400
