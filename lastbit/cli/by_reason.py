"""Failed or skipped items grouped by reason, the most frequent reason first, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lastbit.cli.rendering import number, why
from lastbit.models import FailedRange

MOST_REASONS = 1000
"""Maximum reasons that are counted separately: the first ones by item number."""
MOST_RUNS = 10
"""Maximum runs of items that are shown for one reason."""


@dataclass(slots=True)
class Group:
    """The items of one reason."""

    count: int = 0
    runs: int = 0
    shown: list[list[str]] = field(default_factory=list)
    """First and last id of each shown run."""
    end: int = -1
    """The number after the last run."""

    def add(self, start: int, end: int, first: str, last: str) -> None:
        self.count += end - start
        if start == self.end:
            if self.runs <= MOST_RUNS:
                self.shown[-1][1] = last
        else:
            self.runs += 1
            if self.runs <= MOST_RUNS:
                self.shown.append([first, last])
        self.end = end


class ByReason:
    """Collects ranges of failed or skipped items, in ascending order."""

    def __init__(self, batch: int, kind: Literal["failed", "skipped"]) -> None:
        self._batch = batch
        self._kind = kind
        self._groups: dict[str | None, Group] = {}
        self._others = 0

    def add(self, span: FailedRange) -> None:
        ids = span.ids
        for reason, start, end in _runs(span, ids.group_size):
            if reason in self._groups or len(self._groups) < MOST_REASONS:
                first, last = ids[start - span.start], ids[end - 1 - span.start]
                self._groups.setdefault(reason, Group()).add(start, end, first, last)
            else:
                self._others += end - start

    def _sorted(self) -> list[tuple[str | None, Group]]:
        return sorted(self._groups.items(), key=lambda entry: -entry[1].count)

    def summary(self) -> dict[str, Any]:
        """Each reason with the number of its items; the reason is None for items without one. `others`
        counts the items of further reasons."""
        reasons = [{"reason": reason, "count": group.count} for reason, group in self._sorted()]
        return {"reasons": reasons, "others": self._others}

    def lines(self) -> Iterator[str]:
        """A paragraph for each reason, and the total."""
        if not self._groups:
            yield f"nothing {self._kind}"
            return
        listing = f"lastbit pending {self._batch} --{self._kind} --ids"
        style = "red" if self._kind == "failed" else "default"
        for reason, group in self._sorted():
            yield f"[bold]{number(group.count, 'item')}[/]  {why(reason, style)}"
            for first, last in group.shown:
                yield f"  {first}" if first == last else f"  {first} … {last}"
            if group.runs > MOST_RUNS:
                yield f"  [dim]and {number(group.runs - MOST_RUNS, 'more range')}: {listing}[/]"
        if self._others:
            yield f"[bold]{number(self._others, 'item')}[/]  [dim]for other reasons: {listing}[/]"
        total = self._others + sum(group.count for group in self._groups.values())
        reasons = f"more than {MOST_REASONS:,} reasons" if self._others else number(len(self._groups), "reason")
        yield f"{number(total, 'item')} {self._kind}, for {reasons}"


def _runs(span: FailedRange, group_size: int) -> Iterator[tuple[str | None, int, int]]:
    """The parts of the range that have the same reason: (reason, start, end)."""
    by_number = sorted((_number(item, group_size), reason) for item, reason in span.reasons.items())
    position = span.start
    for start, reason in by_number:
        if position < start:
            yield None, position, start
        yield reason, start, start + 1
        position = start + 1
    if position < span.end:
        yield None, position, span.end


def _number(item: str, group_size: int) -> int:
    _, group, index = item.split(":")
    return int(group) * group_size + int(index)
