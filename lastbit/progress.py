"""The progress of a batch, as a bar or as lines: the resolved items, the rate, and the estimated time left.

An estimate is possible only for a sealed batch. For an open batch, which may still grow, the bar shows "not sealed".
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lastbit.errors import MissingExtra
from lastbit.models import Batch

if TYPE_CHECKING:
    from rich.console import Console

STATE_STYLES = {"open": "cyan", "sealed": "blue", "complete": "green", "expired": "red", "cancelled": "yellow"}


WINDOW = 30.0
"""Seconds over which the rate is measured: long enough to be stable, short enough to notice a change."""


EVERY = 5.0
"""Seconds between two plain lines of progress."""


class Pace:
    """The speed of a batch, from times and resolved counts."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._seen: deque[tuple[float, int]] = deque()

    def saw(self, batch: Batch) -> None:
        now = self._now()
        self._seen.append((now, batch.resolved))
        # Keep one sample from before the window, so that the window is covered.
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW:
            self._seen.popleft()

    @property
    def rate(self) -> float:
        """Items a second."""
        if len(self._seen) < 2:
            return 0.0
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start) if end > start else 0.0

    def words(self, batch: Batch) -> str:
        """`250/s, about 3 min 20 s left`, or why there is no estimate."""
        if batch.ended:
            if batch.ended_at is None:
                return f"in {duration(self._now() - self._began)}"
            return f"in {duration(max(0.0, (batch.ended_at - batch.created_at).total_seconds()))}"
        rate = self.rate
        text = ""
        if rate > 0:
            text = f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s"
        elif batch.pending:
            text = "waiting for acks"
        if batch.state == "open":
            return f"{text}, not sealed" if text else "not sealed"
        return f"{text}, about {duration(batch.pending / rate)} left" if rate > 0 else text


def percent(part: int, whole: int) -> str:
    """`99.95 %`: 100 only when all is done, 0 only when nothing is. `percent` in api/page/percent.js is the same."""
    if part >= whole:
        return "100 %"
    if 0 < part * 10_000 < whole:
        return "<0.01 %"
    share = 100 * part / whole
    digits = 2 if share >= 99 or share < 1 else 1 if share >= 90 or share < 10 else 0
    scale = 10**digits
    return f"{100 * part * scale // whole / scale:g} %"


class Lines:
    """Prints a plain line for each change of a batch, where no bar can be drawn. `show` prints one."""

    def __init__(self, show: Callable[[str], object]) -> None:
        self._show = show
        self._pace = Pace()
        self._last: tuple[str, int, int] | None = None

    def __call__(self, batch: Batch) -> None:
        self._pace.saw(batch)
        counts = (batch.state, batch.resolved, batch.items)
        if counts == self._last:
            return
        self._last = counts
        share = percent(batch.resolved, batch.items) if batch.items else "no items"
        self._show(
            f"batch {batch.id} {batch.state}: {batch.resolved:,} of {batch.items:,} resolved, {share}, "
            f"{self._pace.words(batch)}"
        )


@contextmanager
def bar(console: Console | None = None) -> Iterator[Callable[[Batch], None]]:
    """A live bar, by default on standard error; elsewhere than on a terminal or in a notebook, a line for each change.
    Call the yielded function with the batch at each poll. Raises `MissingExtra` without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError as cause:
        raise MissingExtra("cli", "a progress bar") from cause

    console = console or Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield Lines(lambda line: print(line, file=console.file, flush=True))
        return
    columns = (
        TextColumn("batch {task.description}"),
        TextColumn("[{task.fields[style]}]{task.fields[state]:<9}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:,} of {task.fields[items]:,}"),
        TextColumn("{task.fields[failures]}"),
        TextColumn("[dim]{task.fields[pace]}"),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("", total=None, state="", style="dim", failures="", items=0, pace="")
        pace = Pace()

        def saw(batch: Batch) -> None:
            pace.saw(batch)
            progress.update(
                task,
                description=str(batch.id),
                # Without a total the bar pulses. An open batch without pending items may still grow, so it has no
                # total.
                total=batch.items if batch.pending or batch.ended else None,
                completed=batch.resolved,
                items=batch.items,
                state=batch.state,
                style=STATE_STYLES.get(batch.state, "default"),
                failures=f"[red]{batch.failed:,} failed" if batch.failed else "",
                pace=pace.words(batch),
            )

        yield saw


@contextmanager
def counter(noun: str, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """A counter, by default on standard error: a live line on a terminal, else a plain line every five seconds. Call
    the yielded function with the number. Raises `MissingExtra` without rich."""
    try:
        from rich.console import Console
    except ImportError as cause:
        raise MissingExtra("cli", "a progress line") from cause

    console = console or Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda number: status.update(f"{number:,} {noun}")
        return
    last = time.monotonic()

    def count(number: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            console.print(f"{number:,} {noun}", highlight=False)

    yield count


def duration(seconds: float) -> str:
    """A duration in its two largest units: `12 s`, `3 min 20 s`, `5 h 2 min`, `3 d 4 h`."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    for unit, name, smaller, smaller_name, limit in (
        (60, "min", 1, "s", 3600),
        (3600, "h", 60, "min", 86400),
        (86400, "d", 3600, "h", None),
    ):
        if limit is None or total < limit:
            count, rest = divmod(total, unit)
            return f"{count} {name} {rest // smaller} {smaller_name}" if rest >= smaller else f"{count} {name}"
    raise AssertionError("the last unit has no limit")
