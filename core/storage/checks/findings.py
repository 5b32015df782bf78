"""The finding of a check, and its JSON for scripts."""

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
    """`about` is a stable name, for scripts. `says` describes the state. `do` is advice if the verdict isn't fine."""

    about: str
    verdict: Verdict
    says: str
    do: str | None = None


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """The findings for scripts."""
    return {
        "ok": all(finding.verdict is Verdict.FINE for finding in findings),
        "findings": [
            {
                "about": finding.about,
                "verdict": finding.verdict.value,
                "says": finding.says,
                "do": finding.do,
            }
            for finding in findings
        ],
    }
