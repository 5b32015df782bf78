"""What a check found, and the table that scripts are told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Verdict(Enum):
    FINE = "fine"
    UNSAFE = "unsafe"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """`about` is stable, for scripts; `do` says what to do where the verdict isn't fine."""

    about: str
    verdict: Verdict
    says: str
    do: str | None = None


def as_json(found: list[Finding]) -> dict[str, Any]:
    """What scripts are told."""
    return {
        "ok": all(each.verdict is Verdict.FINE for each in found),
        "findings": [
            {"about": each.about, "verdict": each.verdict.value, "says": each.says, "do": each.do} for each in found
        ],
    }
