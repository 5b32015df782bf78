"""`lastbit groups`: consumer groups, their workers, partitions and positions."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import groupby

import click
from rich import box
from rich.table import Table

from lastbit import groups as model
from lastbit.cli.app import Session, confirm, examples, session, yes_option
from lastbit.cli.output import safe, styled
from lastbit.cli.rendering import number
from lastbit.progress import duration


@click.group(epilog=examples("lastbit groups list", "lastbit groups show orders"))
def groups() -> None:
    """Share partitions equally between workers."""


@groups.command("list", epilog=examples("lastbit groups list"))
@session
def list_groups(s: Session) -> None:
    """List consumer groups by name."""
    found = list(s.client.groups.list())
    s.output.listing("groups", found, _summary, "no consumer groups")


@groups.command(
    epilog=examples(
        "lastbit groups create orders --partitions 12", "lastbit groups create orders --partitions 12 --ttl 30"
    )
)
@click.argument("name")
@click.option("--partitions", type=click.IntRange(1), required=True, help="Number of partitions; cannot be changed.")
@click.option("--ttl", type=float, help="Seconds that a worker may be silent.  [default for a new group: 10]")
@click.option("--release", type=float, help="Seconds to drain a released partition.  [default for a new group: 30]")
@session
def create(s: Session, name: str, partitions: int, ttl: float | None, release: float | None) -> None:
    """Create the consumer group NAME, or change its times."""
    new_group = s.client.groups.create(name, partitions=partitions, ttl=ttl, release=release)
    s.output.answer(new_group, _head(new_group))


@groups.command(epilog=examples("lastbit groups show orders", "lastbit groups show orders --partitions"))
@click.argument("name")
@click.option("--partitions", "by_partition", is_flag=True, help="Show each partition on its own line.")
@session
def show(s: Session, name: str, by_partition: bool) -> None:
    """Show the owners of the partitions of consumer group NAME, since when, and their lag."""
    details = s.client.groups.get(name)
    if s.output.as_json:
        s.output.document(details)
        return
    now = datetime.now(UTC)
    s.output.say(_head(details))
    s.output.console.print(_partitions(details, now) if by_partition else _workers(details, now))


@groups.command(epilog=examples("lastbit groups delete orders"))
@click.argument("name")
@yes_option
@session
def delete(s: Session, name: str, yes: bool) -> None:
    """Delete the consumer group NAME with its positions; it must have no workers."""
    confirm(yes, lambda: f"Delete the consumer group {name} with its positions?")
    s.client.groups.delete(name)
    s.output.answer({"deleted": name}, f"{safe(name)} is deleted")


@groups.command(epilog=examples("lastbit groups kick orders worker-3"))
@click.argument("name")
@click.argument("worker")
@session
def kick(s: Session, name: str, worker: str) -> None:
    """Free all that WORKER holds in the group NAME, at once.

    Its later writes are refused. If it lives, it joins again with its next heartbeat.
    """
    s.client.groups.leave(name, worker)
    s.output.answer({"kicked": worker}, f"{safe(worker)} holds nothing in {safe(name)}")


def _summary(group: model.GroupSummary) -> str:
    free = group.partitions - group.owned
    unowned = f", [yellow]{free:,} without an owner[/]" if free else ""
    return (
        f"[bold]{safe(group.name)}[/]  {number(group.workers, 'worker')}, "
        f"{number(group.partitions, 'partition')}{unowned}"
    )


def _head(group: model.Group) -> str:
    return (
        f"[bold]{safe(group.name)}[/]  {number(group.partitions, 'partition')}, a worker may be silent for "
        f"{group.ttl:g} s and take {group.release:g} s to drain"
    )


def _since(start: datetime | None, now: datetime) -> str:
    return "" if start is None else duration(max(0.0, (now - start).total_seconds()))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def _workers(group: model.GroupDetails, now: datetime) -> Table:
    """A line for each worker, and one for partitions without an owner."""
    table = _table("worker", "holds", "to release", "partitions", "lag", "since", "seen")
    for worker in group.workers:
        positions_held = [position for position in group.positions if position.owner == worker.worker]
        name = safe(worker.worker) if worker.live else f"[red]{safe(worker.worker)}, silent[/]"
        releasing = f"[yellow]{worker.releasing:,}[/]" if worker.releasing else ""
        last_seen = f"{duration(max(0.0, (now - worker.last_seen).total_seconds()))} ago"
        table.add_row(
            styled(name),
            f"{worker.partitions:,}",
            releasing,
            ranges(positions_held),
            _lag(positions_held),
            _since(worker.started_at, now),
            last_seen,
        )
    if free := [position for position in group.positions if position.owner is None]:
        table.add_row("[yellow]nobody[/]", f"{len(free):,}", "", ranges(free), _lag(free), "", "")
    return table


def _partitions(group: model.GroupDetails, now: datetime) -> Table:
    table = _table("partition", "owner", "epoch", "since", "floor", "outstanding", "lag")
    for position in group.positions:
        owner = "[yellow]nobody[/]" if position.owner is None else safe(position.owner)
        if position.release_by is not None:
            owner += " [yellow]to release[/]"
        counts = (
            "" if count is None else f"{count:,}" for count in (position.floor, position.outstanding, position.lag)
        )
        table.add_row(
            str(position.partition), styled(owner), f"{position.epoch:,}", _since(position.since, now), *counts
        )
    return table


def _lag(positions: list[model.GroupPosition]) -> str:
    lags = [position.lag for position in positions if position.lag is not None]
    return f"{sum(lags):,}" if lags else ""


def ranges(positions: list[model.GroupPosition]) -> str:
    """`0-3, 7`."""
    numbers = enumerate(position.partition for position in positions)
    runs = ([number for _, number in run] for _, run in groupby(numbers, key=lambda pair: pair[1] - pair[0]))
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
