"""Hypothesis's settings for all tests."""

from __future__ import annotations

import hypothesis


def load() -> None:
    hypothesis.settings.register_profile(
        "lastbit",
        deadline=None,
        print_blob=True,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
    )
    hypothesis.settings.load_profile("lastbit")
