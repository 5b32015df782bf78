"""The demo's output: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

STEP = 10
"""Percentage points between two plain lines of progress."""


class Show:
    def __init__(self, console: Console, bar: Progress | None) -> None:
        self._console = console
        self._bar = bar
        self._task = bar.add_task("resolved", total=None, issued=0) if bar is not None else None
        self._began = time.monotonic()
        self._said = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """Print an event with the time since the start."""
        self._console.print(f"[dim]{self.seconds:5.1f} s[/]  {text}", highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def plain(self, text: str = "") -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def progress(self, resolved: int, issued: int, files: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=resolved, total=files, issued=issued)
            return
        percent = 100 * resolved // files
        if percent >= self._said + STEP:
            self._said = percent - percent % STEP
            self.say(f"{resolved:,} of {files:,} files resolved, {issued:,} issued so far")


@contextlib.contextmanager
def show() -> Iterator[Show]:
    """On exit the bar is removed; printed lines stay."""
    console = Console()
    if not console.is_terminal:
        yield Show(Console(width=200), None)
        return
    columns = (
        TextColumn("         {task.description}"),
        BarColumn(bar_width=40),
        TextColumn("{task.completed:,.0f} of {task.fields[issued]:,} issued"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Show(console, bar)
