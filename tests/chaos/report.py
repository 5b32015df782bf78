"""The readable report of a run: the work, the disturbances and the checks."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.chaos.checks import Checks, Violation
from tests.chaos.evidence import Evidence

SHOWN = 20
"""The number of violations that are printed in full."""


@dataclass
class Report:
    seed: int
    seconds: float
    world: Mapping[str, int]
    troubles: Counter[str]
    broker: Counter[str]
    restarts: Counter[str]
    evidence: Evidence
    checks: Checks

    @property
    def violations(self) -> list[Violation]:
        return self.checks.violations

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        asks = self.evidence.asks
        rows = self.evidence.stored.batches.values()
        yield f"seed {self.seed}, {self.seconds:.0f} s"
        yield ""
        yield "What it did"
        states = Counter(row.state for row in rows)
        yield _line("batches", f"{len(rows):,}: " + ", ".join(f"{n:,} {state}" for state, n in states.most_common()))
        acked, failed = sum(row.acked for row in rows), sum(row.failed for row in rows)
        yield _line("items", f"{sum(row.items for row in rows):,}: {acked:,} acked, {failed:,} failed in the end")
        yield _line("queue", _listed(self.broker))
        yield _line("troubles", _listed(self.troubles))
        yield _line("behind the URL", _listed(Counter(self.world)))
        yield _line("processes begun", _listed(self.restarts))
        attempts = Counter(ask.key for ask in asks if ask.key)
        yield _line(
            "requests",
            f"{len(asks):,}: {sum(ask.good for ask in asks):,} answered 2xx, "
            f"{sum(ask.status == 503 for ask in asks):,} 503, {sum(ask.status is None for ask in asks):,} not "
            f"answered; {sum(attempts.values()) - len(attempts):,} were retries",
        )
        for actor in sorted({ask.actor for ask in asks}):
            requests = [ask for ask in asks if ask.actor == actor]
            items = sum(request.size for ask, request in self.checks.wanted if ask.actor == actor and ask.good)
            yield _line(f"  {actor}", f"{len(requests):,} requests" + (f", {items:,} items answered" if items else ""))
        yield ""
        yield "What it checked"
        yield _line("checked", _listed(self.checks.checked))
        yield ""
        yield f"{len(self.violations)} VIOLATIONS" if self.violations else "No answer contradicts the database."
        for violation in self.violations[:SHOWN]:
            place = (
                f"item {violation.item}: "
                if violation.item
                else f"batch {violation.batch}: "
                if violation.batch is not None
                else ""
            )
            yield f"- {place}{violation.message}"
            related = self.evidence.about(violation.batch, violation.item) if violation.batch is not None else []
            for ask in violation.asks or related:
                yield f"      {ask}"
        if len(self.violations) > SHOWN:
            yield f"… and {len(self.violations) - SHOWN} more"


def _line(name: str, text: str) -> str:
    return textwrap.fill(text, 118, initial_indent=f"  {name:<18} ", subsequent_indent=" " * 21)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "none"
