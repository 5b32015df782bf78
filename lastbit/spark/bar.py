"""The bar of `ack(progress=True)`. Only the driver imports this module, as it needs rich, which executors lack."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lastbit.errors import MissingExtra
from lastbit.progress import EVERY, duration
from lastbit.spark.progress import AckProgress, Watcher

if TYPE_CHECKING:
    from rich.console import Console


class Pace:
    """The rates of a call, from the times at which its state changed."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._stage: int | None = None
        self._began = now()

    def words(self, state: AckProgress) -> str:
        """`1,250 rows/s, about 12 s left in this stage`, as far as it is known."""
        if state.stage != self._stage:
            self._stage, self._began = state.stage, self._now()
        elapsed = self._now() - self._began
        if elapsed <= 0:
            return ""
        parts = [f"{state.rows / elapsed:,.0f} rows/s"] if state.rows else []
        if 0 < state.completed_tasks < state.tasks:
            remaining = elapsed * (state.tasks - state.completed_tasks) / state.completed_tasks
            parts.append(f"about {duration(remaining)} left in this stage")
        return ", ".join(parts)


@contextmanager
def bar(console: Console | None = None) -> Iterator[Watcher]:
    """A live bar, by default on standard error, in a terminal or a notebook; elsewhere a plain line every five seconds.
    Raises `MissingExtra` without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
    except ImportError as cause:
        raise MissingExtra("cli", "a progress bar") from cause

    console = console or Console(file=sys.stderr)
    pace = Pace()
    if not (console.is_terminal or console.is_jupyter):
        yield _lines(console, pace)
        return
    columns = (
        TextColumn("ack: {task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[sent]}"),
        TextColumn("[dim]{task.fields[pace]}"),
    )
    with Bar(*columns, console=console, expand=True) as live_bar:
        task = live_bar.add_task("starting", total=None, sent="", pace="")

        def show(state: AckProgress) -> None:
            live_bar.update(
                task,
                description=_stage_words(state),
                total=state.tasks or None,
                completed=state.completed_tasks,
                sent=_sent_words(state),
                pace=pace.words(state),
            )

        yield show


def _lines(console: Console, pace: Pace) -> Watcher:
    last = time.monotonic()

    def show(state: AckProgress) -> None:
        nonlocal last
        words = [_stage_words(state), _sent_words(state), pace.words(state)]
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            console.print("ack: " + ", ".join(filter(None, words)), highlight=False, soft_wrap=True)

    return show


def _stage_words(state: AckProgress) -> str:
    if state.stage is None:
        return "starting"
    return f"stage {state.stage}, {state.completed_tasks:,} of {state.tasks:,} tasks"


def _sent_words(state: AckProgress) -> str:
    return f"{state.rows:,} rows, {state.groups:,} groups sent" if state.rows else ""
