"""When a delivery is tried again, as a pure function."""

from __future__ import annotations

import pytest

from core.webhooks.backoff import Backoff


def test_the_defaults_spread_ten_tries_over_more_than_a_day() -> None:
    """Ceilings that grow fivefold to a day; on average, more than a day in all."""
    pauses = [Backoff().pause(failures, 1.0) for failures in range(1, 11)]
    assert pauses == [5, 25, 125, 625, 3125, 15_625, 78_125, 86_400, 86_400, None]
    assert sum(pause for pause in pauses if pause) / 2 > 86_400


@pytest.mark.parametrize(("chance", "pause"), [(0.0, 0.0), (0.5, 12.5), (1.0, 25.0)])
def test_jitter_is_full(chance: float, pause: float) -> None:
    """Anything from nothing to the ceiling."""
    assert Backoff().pause(2, chance) == pause


@pytest.mark.parametrize(
    ("retry_after", "pause"), [(None, 2.5), (0, 2.5), (1, 2.5), (600, 600), (10**9, 86_400), (-5, 2.5)]
)
def test_what_the_receiver_asks_for_is_heeded_within_bounds(retry_after: float | None, pause: float) -> None:
    """No sooner than it says, and never later than the longest pause."""
    assert Backoff().pause(1, 0.5, retry_after) == pause


def test_after_the_last_try_there_is_none() -> None:
    """However patient the receiver; and a large number of tries overflows nothing."""
    assert Backoff(tries=1).pause(1, 0.5, 60) is None
    assert Backoff(tries=100).pause(99, 1.0) == 86_400
