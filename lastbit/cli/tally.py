"""`lastbit tally`: show totals and their sources, and add to them by hand."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from lastbit import errors
from lastbit.chains import Source
from lastbit.cli.app import Session, Signed, confirm, examples, session, yes_option
from lastbit.cli.arguments import LIMIT, WHOLE, Whole
from lastbit.cli.output import safe

if TYPE_CHECKING:
    from lastbit.tallies.tally import Tally

COUNT = Whole(min=0)


class UnknownTally(errors.LastbitError):
    """There is no such tally."""

    def __str__(self) -> str:
        return f"there is no tally {self.args[0]!r}: nothing was added to it, or it was deleted"


@click.group(epilog=examples("lastbit tally value screws robot-7", "lastbit tally list screws"))
def tally() -> None:
    """Count replayed messages without counting them twice."""


@tally.command(epilog=examples("lastbit tally value screws robot-7"))
@click.argument("name", metavar="TALLY")
@click.argument("key")
@session
def value(s: Session, name: str, key: str) -> None:
    """Show the total of KEY, and the last counted offset of each source."""
    total = s.client.tally(name).get(key)
    if not total.sources:
        _require(s.client.tally(name))
    if s.output.as_json:
        s.output.document(total)
        return
    s.output.say(f"[bold]{total.value:,}[/] {safe(total.key)}")
    for source in total.sources:
        generation = f", generation {source.generation}" if source.generation else ""
        child = f", child {source.child}" if source.child else ""
        place = f"offset {source.offset}{child}" if source.position is None else safe(source.position)
        s.output.say(
            f"  {source.value:,} of {safe(source.topic)}, partition {source.partition}{generation}, up to {place}"
        )


@tally.command("list", epilog=examples("lastbit tally list screws --prefix robot-"))
@click.argument("name", metavar="TALLY")
@click.option("--prefix", default="", help="Only keys that begin with this.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="Maximum number of totals.")
@session
def list_totals(s: Session, name: str, prefix: str, limit: int) -> None:
    """Show the totals, by key."""
    totals = list(islice(s.client.tally(name).totals(prefix=prefix, page_size=min(limit, 1000)), limit))
    if not totals:
        _require(s.client.tally(name))
    s.output.listing(
        "totals", totals, lambda total: f"[bold]{total.value:>12,}[/]  {safe(total.key)}", "no key begins with this"
    )


@tally.command(
    cls=Signed,
    epilog=examples("lastbit tally apply screws robot-7 3 --topic fastened --offset 4711"),
)
@click.argument("name", metavar="TALLY")
@click.argument("key")
@click.argument("delta", type=WHOLE)
@click.option("--topic", required=True, help="Topic of the original message.")
@click.option("--partition", type=COUNT, default=0, show_default=True, help="Partition of the topic.")
@click.option("--offset", type=COUNT, required=True, help="Offset of the message in its partition.")
@click.option("--child", type=COUNT, default=0, help="Index of this message among those derived from the original.")
@click.option("--generation", type=COUNT, default=0, help="Generation of a topic that was recreated.")
@session
def apply(
    s: Session,
    name: str,
    key: str,
    delta: int,
    topic: str,
    partition: int,
    offset: int,
    child: int,
    generation: int,
) -> None:
    """Add DELTA to KEY, once for this message.

    If this message, or a later one of its source, was counted before, nothing is added.
    """
    applied = s.client.tally(name).apply([(key, delta, Source(topic, partition, offset, child, generation))])
    counted = "not added: this message, or a later one of its source, was counted before"
    s.output.answer(applied, "added" if applied.applied else counted)


@tally.command(epilog=examples("lastbit tally delete screws"))
@click.argument("name", metavar="TALLY")
@yes_option
@session
def delete(s: Session, name: str, yes: bool) -> None:
    """Delete TALLY with its guards: replayed messages count again."""
    _require(s.client.tally(name))
    confirm(yes, lambda: f"Delete the tally {name} with its guards? Replayed messages will count again.")
    s.client.tally(name).delete()
    s.output.answer({"deleted": name}, f"{safe(name)} is deleted")


def _require(tally: Tally) -> None:
    """Raises `UnknownTally` if nothing was added to the tally. The service treats an unknown tally as empty."""
    if next(tally.totals(page_size=1), None) is None:
        raise UnknownTally(tally.name)
