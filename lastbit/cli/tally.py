"""`lastbit tally`: the totals, where one comes from, and adding to it by hand."""

from __future__ import annotations

from itertools import islice

import click

from lastbit.chains import Source
from lastbit.cli.app import Session, session
from lastbit.cli.output import safe

COUNT = click.IntRange(min=0)


@click.group()
def tally() -> None:
    """Count what is replayed, without counting twice."""


@tally.command()
@click.argument("name", metavar="TALLY")
@click.argument("key")
@session
def value(s: Session, name: str, key: str) -> None:
    """Show the total of KEY, and up to where each source was counted."""
    found = s.client.tally(name).get(key)
    if s.output.as_json:
        s.output.document(found)
        return
    s.output.say(f"[bold]{found.value:,}[/] {safe(found.key)}")
    for each in found.sources:
        generation = f", generation {each.generation}" if each.generation else ""
        child = f", child {each.child}" if each.child else ""
        s.output.say(
            f"  {each.value:,} of {safe(each.topic)}, partition {each.partition}{generation}, up to offset "
            f"{each.offset}{child}"
        )


@tally.command("list")
@click.argument("name", metavar="TALLY")
@click.option("--prefix", default="", help="Only keys that begin so.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many.")
@session
def list_totals(s: Session, name: str, prefix: str, limit: int) -> None:
    """Show the totals, by key."""
    found = list(islice(s.client.tally(name).totals(prefix=prefix, page_size=min(limit, 1000)), limit))
    s.output.listing(
        "totals", found, lambda each: f"[bold]{each.value:>12,}[/]  {safe(each.key)}", "nothing was counted"
    )


@tally.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", metavar="TALLY")
@click.argument("key")
@click.argument("delta", type=int)
@click.option("--topic", required=True, help="Where the message comes from first.")
@click.option("--partition", type=COUNT, default=0, show_default=True, help="Of the topic.")
@click.option("--offset", type=COUNT, required=True, help="Of the message in its partition.")
@click.option("--child", type=COUNT, default=0, help="Which of the messages that were made of it.")
@click.option("--generation", type=COUNT, default=0, help="Of a topic that was made anew.")
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
    """Add DELTA to KEY, once for this message and for none before it."""
    applied = s.client.tally(name).apply([(key, delta, Source(topic, partition, offset, child, generation))])
    s.output.answer(applied, "added" if applied.applied else "a repeat: it was counted before")


@tally.command()
@click.argument("name", metavar="TALLY")
@session
def delete(s: Session, name: str) -> None:
    """Remove TALLY with its guards: what is replayed counts again."""
    s.client.tally(name).delete()
    s.output.answer({"deleted": name}, f"{safe(name)} is deleted")
