"""Formats batches, events and results for a terminal."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from rich import box
from rich.cells import cell_len
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from lastbit.cli.output import plain_text, safe, styled
from lastbit.errors import ItemRejected
from lastbit.failures import Failure, FailureReasons
from lastbit.ids import ItemIds
from lastbit.models import (
    AckResult,
    Batch,
    Completed,
    Event,
    Explanation,
    HistoryPoint,
    Repair,
    TreeProgress,
    Verification,
)
from lastbit.progress import STATE_STYLES, duration, percent

BAR_WIDTH = 40
BARS = "▁▂▃▄▅▆▇█"
"""The bars of a pace: the first one is that of a pause."""
MOST_REJECTED = 20
"""Maximum rejected items that are listed."""

TEXT_WIDTH = 12
"""Minimum width of a text column; a narrower one is not shown."""
GAP = 3
"""Columns of a terminal between two columns of a table."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a table for terminals of any width."""

    columns: tuple[str, ...]
    importance: tuple[str, ...]
    """All columns, the most important ones first."""
    always: frozenset[str]
    numbers: frozenset[str]
    texts: tuple[str, ...]
    """Columns that share the remaining width."""


BATCHES = Layout(
    columns=("batch", "state", "resolved", "items", "pending", "failed", "changed", "key", "labels"),
    importance=("batch", "state", "resolved", "key", "failed", "pending", "items", "labels", "changed"),
    always=frozenset({"batch", "state", "resolved"}),
    numbers=frozenset({"batch", "resolved", "items", "pending", "failed", "changed"}),
    texts=("key", "labels"),
)


PARAGRAPH = 80
"""Columns of sentences, in a pipe too."""
LINES = "\n\t"
"""Reasons are often tracebacks, which are read line by line."""


def number(count: int, noun: str, plural: str | None = None) -> str:
    """`1 item`, `2,000 items`."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def state(batch: Batch) -> str:
    """The state in its color; a complete batch with failures shows their number."""
    style = STATE_STYLES.get(batch.state, "default")
    if batch.complete and not batch.succeeded:
        return f"[yellow]{batch.state}, {batch.failed:,} failed[/]"
    return f"[{style}]{safe(batch.state)}[/]"


def title(batch: int, key: str | None) -> str:
    return f"[bold]batch {batch}[/]" + (f" {safe(key)}" if key is not None else "")


def share(batch: Batch) -> str:
    """The resolved share."""
    return percent(batch.resolved, batch.items) if batch.items else "no items"


def moment(time: datetime, now: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC, {duration(max(0.0, (now - time).total_seconds()))} ago"


def due(time: datetime, now: datetime) -> str:
    """A moment that may be in the future."""
    if time <= now:
        return moment(time, now)
    return f"{time:%Y-%m-%d %H:%M:%S} UTC, in {duration((time - now).total_seconds())}"


def batch_lines(
    batch: Batch,
    history: Sequence[HistoryPoint] = (),
    tree: TreeProgress | None = None,
    now: datetime | None = None,
) -> RenderableType:
    """One batch in detail; with its pace, if anything is resolved, and the sums of its tree, if it has children."""
    now = now or datetime.now(UTC)
    head = styled(f"{title(batch.id, batch.key)}  {state(batch)}")
    full = BAR_WIDTH * batch.resolved // batch.items if batch.items else 0
    bar = Text.assemble(
        ("█" * full, "yellow" if batch.failed else "green"), ("░" * (BAR_WIDTH - full), "dim"), f"  {share(batch)}"
    )
    counts = Text.assemble(
        f"{number(batch.items, 'item')}: ",
        (f"{batch.acked:,} acked", "green" if batch.acked else "dim"),
        ", ",
        (f"{batch.failed:,} failed", "red" if batch.failed else "dim"),
        skipped(batch),
        ", ",
        (f"{batch.pending:,} pending", "bold" if batch.pending else "dim"),
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    if history and batch.resolved:
        facts.add_row("pace", pace(history))
    if tree is not None and sum(tree.batches.values()) > 1:
        facts.add_row("tree", tree_sums(tree))
    if batch.labels:
        labels = ", ".join(f"{name}:{value}" for name, value in batch.labels.items())
        facts.add_row("labels", Text(plain_text(labels)))
    if batch.parent is not None:
        facts.add_row("parent", Text(plain_text(batch.parent)))
    facts.add_row("opened", moment(batch.created_at, now))
    if batch.sealed_at is not None:
        facts.add_row("sealed", moment(batch.sealed_at, now))
    elif batch.seal_at is not None and not batch.ended:
        facts.add_row("seals itself", f"at {number(batch.seal_at, 'item')}")
    if batch.ended_at is not None:
        above = "" if batch.ended_by is None else f", because of batch {batch.ended_by} above it"
        facts.add_row("ended", f"{moment(batch.ended_at, now)}{above}")
        if batch.reason is not None:
            facts.add_row("reason", Text(plain_text(batch.reason)))
    else:
        facts.add_row("changed", moment(batch.updated_at, now))
    if batch.expires_in is not None and not batch.ended:
        facts.add_row("expires", f"after {duration(batch.expires_in)} of idleness")
    if batch.deadline is not None:
        facts.add_row("deadline", due(batch.deadline, now))
    tolerance = tolerated(batch)
    if tolerance:
        facts.add_row("tolerates", tolerance)
    return Group(head, bar, counts, facts)


def pace(history: Sequence[HistoryPoint]) -> str:
    """A bar for each of the same number of seconds, as high as the number of items that were resolved in them."""
    start, seconds = history[0].at, (history[-1].at - history[0].at).total_seconds()
    if not seconds:
        return f"{BARS[-1] * BAR_WIDTH}  0 s"
    counts = [_resolved_after(history, start + timedelta(seconds=seconds * n / BAR_WIDTH)) for n in range(BAR_WIDTH)]
    speeds = [after - before for before, after in pairwise([*counts, float(history[-1].resolved)])]
    top_speed = max(speeds)
    heights = [math.ceil((len(BARS) - 1) * (max(0.0, speed) / top_speed)) if top_speed > 0 else 0 for speed in speeds]
    bars = "".join(BARS[height] for height in heights)
    rate = top_speed * BAR_WIDTH / seconds
    return f"{bars}  {duration(seconds)}, at most {rate:,.0f}/s" if rate >= 1 else f"{bars}  {duration(seconds)}"


def _resolved_after(history: Sequence[HistoryPoint], moment: datetime) -> float:
    """How many items had been resolved at this time, which is not before the first point."""
    for before, after in pairwise(history):
        if before.at <= moment < after.at:
            return before.resolved + (after.resolved - before.resolved) * (
                (moment - before.at) / (after.at - before.at)
            )
    return float(history[-1].resolved)


def skipped(counts: Batch | TreeProgress) -> str:
    """What follows the number of failed items if items were skipped."""
    return f", {counts.skipped:,} skipped" if counts.skipped else ""


def tree_sums(tree: TreeProgress) -> str:
    """`12 batches (3 open, 9 complete): 5,000 items, 4,321 acked, 2 failed, 677 pending`."""
    states = ", ".join(f"{count:,} {state}" for state, count in tree.batches.items() if count)
    prefix = "more than " if tree.truncated else ""
    return (
        f"{prefix}{number(sum(tree.batches.values()), 'batch', 'batches')} ({states}): {number(tree.items, 'item')}, "
        f"{tree.acked:,} acked, {tree.failed:,} failed{skipped(tree)}, {tree.pending:,} pending"
    )


def tolerated(batch: Batch) -> str:
    """The tolerance in words, and whether the failures have passed it; "" without a tolerance."""
    limits = [] if batch.tolerated_failures is None else [number(batch.tolerated_failures, "failure")]
    limits += [] if batch.tolerated_failure_percentage is None else [f"{batch.tolerated_failure_percentage} %"]
    if not limits:
        return ""
    notes = [" and ".join(limits)]
    notes += ["is cancelled beyond them"] if batch.on_exceeded == "cancel" else []
    notes += ["exceeded"] if batch.exceeded else []
    return "; ".join(notes)


def batch_table(batches: Iterable[Batch], width: int, now: datetime | None = None) -> Table:
    """A table with a line per batch, for a terminal of `width` columns."""
    now = now or datetime.now(UTC)
    return fitted(BATCHES, [_cells(batch, now) for batch in batches], width)


def fitted(layout: Layout, rows: Sequence[Mapping[str, Text]], width: int) -> Table:
    """A table for a terminal of `width` columns.

    Only text columns are shortened. Columns that don't fit are omitted, the least important ones first, and the text
    columns share the remaining width.
    """
    widths = {name: max(map(cell_len, [name, *(row[name].plain for row in rows)])) for name in layout.columns}
    least = {name: min(size, TEXT_WIDTH) if name in layout.texts else size for name, size in widths.items()}
    room = width - 2 + GAP  # a column at each edge, and no gap behind the last column of the table
    names_shown = set()
    for name in layout.importance:
        if least[name] + GAP <= room or name in layout.always:
            names_shown.add(name)
            room -= least[name] + GAP
    for name in layout.texts:
        if name in names_shown:
            more = min(max(room, 0), widths[name] - least[name])
            least[name] += more
            room -= more
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for name in (name for name in layout.columns if name in names_shown):
        justify: JustifyMethod = "right" if name in layout.numbers else "left"
        style = "bold" if name == layout.columns[0] else ""
        table.add_column(name, justify=justify, style=style, no_wrap=True, overflow="ellipsis", width=least[name])
    for row in rows:
        table.add_row(*(row[name] for name in layout.columns if name in names_shown))
    return table


def _cells(batch: Batch, now: datetime) -> dict[str, Text]:
    # Those of the adapters hold whole tasks, which `status` shows.
    labels = ", ".join(f"{name}:{value}" for name, value in batch.labels.items() if not name.startswith("lastbit."))
    return {
        "batch": Text(str(batch.id)),
        "state": Text(plain_text(batch.state), STATE_STYLES.get(batch.state, "default")),
        "resolved": Text(share(batch) if batch.items else ""),
        "items": Text(f"{batch.items:,}"),
        "pending": Text(f"{batch.pending:,}" if batch.pending else ""),
        "failed": Text(f"{batch.failed:,}" if batch.failed else "", "red"),
        "changed": Text(f"{duration(max(0.0, (now - batch.updated_at).total_seconds()))} ago"),
        "key": Text(plain_text(batch.key or "")),
        "labels": Text(plain_text(labels)),
    }


def issued(ids: ItemIds) -> str:
    """The issued ids, as a range."""
    if not ids:
        return "no items"
    numbers = ids.numbers
    if len(ids) == 1:
        return f"[bold]{ids[0]}[/]  1 item, number {numbers.start:,}"
    return (
        f"[bold]{ids[0]}[/] … [bold]{ids[-1]}[/]  {number(len(ids), 'item')}, "
        f"numbers {numbers.start:,} to {numbers.stop - 1:,}"
    )


def completion(completed: Completed) -> str:
    """A line about a complete batch in the result of an ack."""
    outcome = "[green]complete[/]" if completed.succeeded else "[yellow]complete, with failures[/]"
    batch = title(completed.batch, completed.key)
    if completed.newly:
        return f"{batch} is {outcome}: this call completed it"
    if completed.newly_succeeded:
        return f"{batch} is {outcome}: this call made it succeed"
    return f"{batch} was already {outcome}"


def cancellation(batch: Batch) -> str:
    """A line about a batch that its failures cancelled."""
    return f"{title(batch.id, batch.key)} is [red]cancelled[/]: its failures exceed its tolerance"


def explanation(details: Explanation) -> list[str]:
    """A paragraph per reason, and the commands that have the items sent again."""
    verdict = "[green]done[/]" if details.done else "[yellow]not done[/]"
    lines = [f"[bold]batch {details.batch}[/]  {safe(details.state)}, {verdict}"]
    for reason in details.reasons:
        lines += textwrap.wrap(
            *(safe(reason.text), PARAGRAPH),
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines + _redrives(details)


def _redrives(details: Explanation) -> list[str]:
    codes = {reason.code for reason in details.reasons}
    if details.state in ("expired", "cancelled") or not codes & {"pending", "failed"}:
        return []
    command = f"lastbit redrive {details.batch}"
    lines = ["to send items again, if their producer follows redrives (or rerun a Spark job):"]
    if "failed" in codes:
        lines.append(f"  {command}  [dim]failed items[/]")
    if "pending" in codes:
        lines.append(f"  {command} --pending  [dim]pending ones whose messages are lost[/]")
    return lines


def inconsistency(batch: int, result: Verification) -> list[str]:
    """One line per difference."""
    head = (
        f"[bold]batch {batch}[/]  [red]inconsistent[/]: acked {result.acked:,}, counted {result.counted.acked:,}; "
        f"failed {result.failed:,}, counted {result.counted.failed:,}; "
        f"skipped {result.skipped:,}, counted {result.counted.skipped:,}"
    )
    return [head, *(f"  {safe(fault)}" for fault in result.faults)]


def repair(batch: int, result: Repair) -> list[str]:
    """The repairs, made or planned, and the items to redeliver."""
    if not result.needed:
        return [f"[bold]batch {batch}[/]  [green]ok[/], there is nothing to repair"]
    verdict = "[yellow]would be repaired[/]" if result.dry_run else "[green]repaired[/]"
    before, after = result.before, result.after
    lines = [f"[bold]batch {batch}[/]  {verdict}, {number(result.groups, 'group')} of it"]
    lines += [f"  {safe(fault)}" for fault in result.faults]
    for name, old, new in (
        ("state", before.state, after.state),
        ("acked", f"{before.acked:,}", f"{after.acked:,}"),
        ("failed", f"{before.failed:,}", f"{after.failed:,}"),
        ("skipped", f"{before.skipped:,}", f"{after.skipped:,}"),
        ("pending", f"{before.pending:,}", f"{after.pending:,}"),
    ):
        if old != new:
            lines.append(f"  {name}: {safe(old)} → {safe(new)}")
    if after.pending and not result.dry_run:
        lines.append(f"  redeliver the pending items: lastbit pending {batch} --ids")
    return lines


def why(reason: str | None, style: str = "red") -> str:
    """The reason of a failure, or of a skip in another style."""
    if not reason:
        return "[dim]no reason given[/]" if reason is None else "[dim]an empty reason[/]"
    return f"[{style}]{safe(reason, keep=LINES)}[/]"


def reasons(found: FailureReasons) -> list[str]:
    """A paragraph for each reason of failures, and the total."""
    if not found.failed:
        return ["nothing failed"]
    lines: list[str] = []
    for reason in found.reasons:
        lines.append(f"[bold]{number(reason.count, 'item')}[/]  {why(reason.reason)}")
        times = "" if reason.first_at is None or reason.last_at is None else _period(reason.first_at, reason.last_at)
        more = " …" if reason.count > len(reason.items) else ""
        lines.append(f"  [dim]{times}[/]{' '.join(reason.items)}{more}")
    counted = sum(reason.count for reason in found.reasons)
    if counted < found.examined:
        lines.append(f"[bold]{number(found.examined - counted, 'item')}[/]  [dim]for other reasons; see --limit[/]")
    if not found.exact:
        lines.append(f"[yellow]a sample:[/] {found.examined:,} of {number(found.failed, 'failed item')} were examined")
    return lines


def failure(entry: Failure) -> str:
    """A failure on one line, with the key of its batch."""
    key = "" if entry.key is None else f" {safe(entry.key)}"
    return f"[bold]{entry.item}[/]{key}  [dim]{entry.failed_at:%Y-%m-%d %H:%M:%S}[/]  {why(entry.reason)}"


def _period(first: datetime, last: datetime) -> str:
    if f"{first:%F %T}" == f"{last:%F %T}":
        return f"{first:%Y-%m-%d %H:%M:%S}  "
    return f"{first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S}  "


def event(entry: Event) -> str:
    """An event on one line."""
    line = f"[bold]{entry.position}[/]  [dim]{entry.at:%Y-%m-%d %H:%M:%S}[/]  {safe(entry.type)}  {safe(entry.id)}"
    if entry.key is not None:
        line += f"  {safe(entry.key)}"
    if entry.data is not None:
        line += f"  [dim]{safe(json.dumps(entry.data, ensure_ascii=False))}[/]"
    return line


def resolved(result: AckResult, verb: str) -> list[str]:
    """The result of acks (`verb`: acked), failures (`verb`: failed) or skips (`verb`: skipped)."""
    rejected = result.rejected_count
    head = f"{result.applied:,} {verb}"
    if result.repeated:
        # The response doesn't distinguish them.
        before = {
            "failed": " (failed, skipped or acked before; they stay so)",
            "skipped": " (acked or skipped before; acked items stay acked)",
        }.get(verb, "")
        head += f", {result.repeated:,} repeated{before}"
    if rejected:
        head += f", [red]{rejected:,} rejected[/]"
    lines = [head]
    for rejection in result.rejected[:MOST_REJECTED]:
        place = rejection.item if rejection.item is not None else f"{rejection.count:,} of group {rejection.group}"
        reason = rejection.reason
        meaning = ItemRejected.MEANINGS.get(reason)
        lines.append(f"  [red]rejected[/] {safe(place)}: {safe(f'{meaning} ({reason})' if meaning else reason)}")
    if len(result.rejected) > MOST_REJECTED:
        lines.append(f"  … and {len(result.rejected) - MOST_REJECTED:,} more; --json lists all")
    return lines + [completion(completed_batch) for completed_batch in result.completed]
