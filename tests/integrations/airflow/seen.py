"""What the tests' DAGs report: `dag.test()` runs their tasks in the test's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

failures: list[BaseException] = []
sent: list[tuple[str, str]] = []
"""Item ids with their messages."""


def remember_failure(context: Mapping[str, Any]) -> None:
    failures.append(context["exception"])


def clear() -> None:
    failures.clear()
    sent.clear()
