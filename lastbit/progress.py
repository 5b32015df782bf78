"""The progress bar of a batch that is waited for: how far, how fast, how long still.

The estimate is honest only for a sealed batch; an open one may still grow, and the bar says so instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lastbit.errors import MissingExtra
from lastbit.models import Batch

if TYPE_CHECKING:
    from rich.console import Console

STATE_STYLES = {"open": "cyan", "sealed": "blue", "complete": "green", "expired": "red", "cancelled": "yellow"}


@contextmanager
def bar(console: Console | None = None) -> Iterator[Callable[[Batch], None]]:
    """A live bar, by default on standard error; call what it gives with the batch whenever it was seen. Raises
    `MissingExtra` without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
        from rich.text import Text
    except ImportError as cause:
        raise MissingExtra("cli", "a progress bar") from cause

    class Pace(ProgressColumn):
        def render(self, task: Task) -> Text:
            if task.finished:
                return Text(f"in {duration(task.elapsed or 0.0)}", style="dim")
            speed = task.speed
            if not speed:
                return Text("waiting for acks" if task.remaining else "", style="dim")
            text = f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.1f}/s"
            if task.fields["state"] == "sealed" and task.remaining is not None:
                return Text(f"{text}, about {duration(task.remaining / speed)} left", style="dim")
            return Text(f"{text}, not sealed yet", style="dim")

    columns = (
        TextColumn("batch {task.description}"),
        TextColumn("[{task.fields[style]}]{task.fields[state]:<9}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:,} of {task.fields[items]:,}"),
        TextColumn("{task.fields[failures]}"),
        Pace(),
    )
    with Progress(*columns, console=console or Console(stderr=True), expand=True) as progress:
        task = progress.add_task("", total=None, state="", style="dim", failures="", items=0)

        def saw(batch: Batch) -> None:
            progress.update(
                task,
                description=str(batch.id),
                # Without an end in sight the bar pulses.
                total=batch.items if batch.items or batch.ended else None,
                completed=batch.resolved,
                items=batch.items,
                state=batch.state,
                style=STATE_STYLES.get(batch.state, "default"),
                failures=f"[red]{batch.failed:,} failed" if batch.failed else "",
            )

        yield saw


def duration(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `5 h 2 min`, `3 d 4 h`: the two units that matter."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for unit, name, smaller, smaller_name, limit in (
        (60, "min", 1, "s", 3600),
        (3600, "h", 60, "min", 86400),
        (86400, "d", 3600, "h", None),
    ):
        if limit is None or whole < limit:
            count, rest = divmod(whole, unit)
            return f"{count} {name} {rest // smaller} {smaller_name}" if rest >= smaller else f"{count} {name}"
    raise AssertionError("the last unit has no limit")
