"""`lastbit groups`: consumer groups, their workers, partitions and positions."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import groupby

import click
from rich.text import Text

from lastbit import groups as model
from lastbit.cli.app import Session, confirm, examples, session, yes_option
from lastbit.cli.arguments import REAL, Whole
from lastbit.cli.output import safe, styled
from lastbit.cli.rendering import Layout, fitted, number
from lastbit.progress import duration


@click.group(epilog=examples("lastbit groups list", "lastbit groups show orders"))
def groups() -> None:
    """Share partitions equally between workers."""


@groups.command("list", epilog=examples("lastbit groups list"))
@session
def list_groups(s: Session) -> None:
    """List consumer groups by name."""
    group_list = list(s.client.groups.list())
    s.output.listing("groups", group_list, _summary, "no consumer groups")


@groups.command(
    epilog=examples(
        "lastbit groups create orders --partitions 12", "lastbit groups create orders --partitions 12 --ttl 30"
    )
)
@click.argument("name")
@click.option("--partitions", type=Whole(1), required=True, help="Number of partitions; cannot be changed.")
@click.option(
    "--ttl", type=REAL, help="Seconds without a heartbeat after which a lease ends.  [default for a new group: 10]"
)
@click.option(
    "--release",
    type=REAL,
    help="Seconds that a worker has to drain a partition it releases.  [default for a new group: 30]",
)
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
    """Show the owner of each partition.

    With the time since it took the partition, its last heartbeat, and the lag.
    """
    details = s.client.groups.get(name)
    if s.output.as_json:
        s.output.document(details)
        return
    now = datetime.now(UTC)
    s.output.say(_head(details))
    width = s.output.console.width
    if by_partition:
        table = fitted(PARTITIONS, _partitions(details, now), width)
    else:
        table = fitted(WORKERS, _workers(details, now), width)
    s.output.show(table)


@groups.command(epilog=examples("lastbit groups delete orders"))
@click.argument("name")
@yes_option
@session
def delete(s: Session, name: str, yes: bool) -> None:
    """Delete the consumer group NAME with its positions.

    The group must have no workers.
    """
    confirm(yes, lambda: f"Delete the consumer group {name} with its positions?")
    s.client.groups.delete(name)
    s.output.answer({"deleted": name}, f"{safe(name)} is deleted")


@groups.command(epilog=examples("lastbit groups kick orders worker-3"))
@click.argument("name")
@click.argument("worker")
@session
def kick(s: Session, name: str, worker: str) -> None:
    """Free all partitions of WORKER in the group NAME at once.

    Its later writes are refused. If it is alive, it joins again with its next heartbeat.
    """
    s.client.groups.leave(name, worker)
    s.output.answer({"kicked": worker}, f"{safe(worker)} owns no partitions in {safe(name)}")


def _summary(group: model.GroupSummary) -> str:
    free = group.partitions - group.owned
    unowned = f", [yellow]{free:,} without an owner[/]" if free else ""
    return (
        f"[bold]{safe(group.name)}[/]  {number(group.workers, 'worker')}, "
        f"{number(group.partitions, 'partition')}{unowned}"
    )


def _head(group: model.Group) -> str:
    return (
        f"[bold]{safe(group.name)}[/]  {number(group.partitions, 'partition')}, lease {group.ttl:g} s, release "
        f"{group.release:g} s"
    )


def _since(start: datetime | None, now: datetime) -> str:
    return "" if start is None else duration(max(0.0, (now - start).total_seconds()))


WORKERS = Layout(
    columns=("worker", "holds", "to release", "partitions", "lag", "since", "seen"),
    importance=("worker", "holds", "lag", "partitions", "seen", "to release", "since"),
    always=frozenset({"worker", "holds", "lag"}),
    numbers=frozenset({"holds", "to release", "lag", "since", "seen"}),
    texts=("worker", "partitions"),
)
PARTITIONS = Layout(
    columns=("partition", "owner", "epoch", "since", "floor", "outstanding", "lag"),
    importance=("partition", "owner", "lag", "floor", "outstanding", "epoch", "since"),
    always=frozenset({"partition", "owner", "lag"}),
    numbers=frozenset({"partition", "epoch", "since", "floor", "outstanding", "lag"}),
    texts=("owner",),
)


def _workers(group: model.GroupDetails, now: datetime) -> list[dict[str, Text]]:
    """A line for each worker, and one for partitions without an owner."""
    rows = []
    for worker in group.workers:
        positions_held = [position for position in group.positions if position.owner == worker.worker]
        rows.append(
            {
                "worker": styled(safe(worker.worker) if worker.live else f"[red]{safe(worker.worker)}, silent[/]"),
                "holds": Text(f"{worker.partitions:,}"),
                "to release": Text(f"{worker.releasing:,}" if worker.releasing else "", "yellow"),
                "partitions": Text(ranges(positions_held)),
                "lag": Text(_lag(positions_held)),
                "since": Text(_since(worker.started_at, now)),
                "seen": Text(f"{duration(max(0.0, (now - worker.last_seen).total_seconds()))} ago"),
            }
        )
    if free := [position for position in group.positions if position.owner is None]:
        rows.append(
            {
                **dict.fromkeys(WORKERS.columns, Text()),
                "worker": Text("nobody", "yellow"),
                "holds": Text(f"{len(free):,}"),
                "partitions": Text(ranges(free)),
                "lag": Text(_lag(free)),
            }
        )
    return rows


def _partitions(group: model.GroupDetails, now: datetime) -> list[dict[str, Text]]:
    rows = []
    for position in group.positions:
        owner = "[yellow]nobody[/]" if position.owner is None else safe(position.owner)
        if position.release_by is not None:
            owner += " [yellow]to release[/]"
        counts = {"floor": position.floor, "outstanding": position.outstanding, "lag": position.lag}
        rows.append(
            {
                "partition": Text(str(position.partition)),
                "owner": styled(owner),
                "epoch": Text(f"{position.epoch:,}"),
                "since": Text(_since(position.since, now)),
                **{name: Text("" if count is None else f"{count:,}") for name, count in counts.items()},
            }
        )
    return rows


def _lag(positions: list[model.GroupPosition]) -> str:
    lags = [position.lag for position in positions if position.lag is not None]
    return f"{sum(lags):,}" if lags else ""


def ranges(positions: list[model.GroupPosition]) -> str:
    """`0-3, 7`."""
    numbers = enumerate(position.partition for position in positions)
    runs = ([number for _, number in run] for _, run in groupby(numbers, key=lambda pair: pair[1] - pair[0]))
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
