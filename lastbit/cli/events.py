"""Commands for the feed: events, append."""

from __future__ import annotations

from itertools import islice
from typing import Any

import click

from lastbit import errors
from lastbit.cli import rendering
from lastbit.cli.app import Session, ended_by_signals, examples, session
from lastbit.cli.arguments import BATCH, JSON, LIMIT, POSITION, Whole
from lastbit.cli.faults import ending_without_a_reader


@click.command(
    epilog=examples(
        "lastbit events --last 20",
        "lastbit events --batch catalog-42",
        "lastbit events --follow --type batch.completed --limit 1",
    )
)
@click.option("--after", type=POSITION, help="Start after this position.  [default: with the oldest stored event]")
@click.option("--last", type=Whole(min=0), metavar="N", help="Start with the last N events.")
@click.option("--type", "types", multiple=True, help="Only events of this type; repeat to allow several types.")
@click.option("--batch", type=BATCH, help="Only events of this batch.")
@click.option("--limit", type=LIMIT, help="Maximum number of events.  [default: 50; with --follow: no limit]")
@click.option(
    "--follow", is_flag=True, help="Go on with new events as they arrive; without --after or --last, show only these."
)
@session
def events(
    s: Session,
    after: int | None,
    last: int | None,
    types: tuple[str, ...],
    batch: int | None,
    limit: int | None,
    follow: bool,
) -> None:
    """Show the events of the feed, in commit order.

    With --follow and --json, each event is a JSON document on its own line.
    """
    if after is not None and last is not None:
        raise click.UsageError("--after and --last exclude each other")
    if after is None and (last is not None or follow):
        after = _before_the_last(s, last or 0)
    if follow:
        with ended_by_signals(), ending_without_a_reader():
            for event in islice(s.client.follow(after=after, types=types, batch=batch), limit):
                s.output.answer(event, rendering.event(event))
        return
    page = s.client.events(after=after, types=types, batch=batch, limit=min(limit or 50, 1000))
    events, next_after = list(page.events), page.next
    while len(events) < (limit or 50) and next_after < page.last:
        page = s.client.events(after=next_after, types=types, batch=batch, limit=min((limit or 50) - len(events), 1000))
        events, next_after = events + list(page.events), page.next
    if s.output.as_json:
        s.output.document({"events": events, "next": next_after, "last": page.last})
        return
    for event in events:
        s.output.say(rendering.event(event))
    if not events:
        s.output.say("no events")
        if batch is not None:
            try:
                s.client.batch(batch).refresh()
            except errors.BatchNotFound:  # a deleted one has events, so it can't be refused first
                click.echo(f"There is no batch {batch} now.", err=True)
    elif next_after < page.last:
        s.output.say(f"[dim]There are more: continue with --after {next_after}.[/]")


def _before_the_last(s: Session, count: int) -> int:
    """The position before the last `count` stored events."""
    page = s.client.events(limit=1)
    before_oldest = page.events[0].position - 1 if page.events else page.next
    return max(before_oldest, page.last - count)


@click.command(epilog=examples("""lastbit append paid-1 order.paid --key order-1 --data '{"cents": 4999}'"""))
@click.argument("id")
@click.argument("type")
@click.option("--key", help="Your name for the subject of the event.")
@click.option("--data", type=JSON, help="Any JSON.")
@session
def append(s: Session, id: str, type: str, key: str | None, data: Any) -> None:
    """Append an event of your own to the feed.

    If an event with this ID is in the feed already, nothing is appended.
    """
    result = s.client.append_event(id=id, type=type, key=key, data=data)
    repeat_note = ", appended before" if result.repeated else ""
    s.output.answer(result, f"position [bold]{result.position}[/]{repeat_note}")
