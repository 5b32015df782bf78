"""Commands for items: ack, fail, skip, pending, reasons, redrive, failures."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Literal

import click

from lastbit import errors
from lastbit.cli import rendering, selections
from lastbit.cli.app import Session, confirm, end, examples, session, yes_option
from lastbit.cli.arguments import BATCH, LIMIT, Whole
from lastbit.cli.by_reason import ByReason
from lastbit.cli.faults import NOT_SUCCEEDED, sent_once
from lastbit.cli.filters import filter_options, state_option
from lastbit.cli.output import plain
from lastbit.cli.selections import Selection
from lastbit.cli.standard_input import chunks
from lastbit.failures import Failure
from lastbit.models import AckResult, Batch, FailedRange, PendingRange
from lastbit.search import Filters

MOST_LOOKED_UP = 100
"""Maximum batches of a command that are read to find out whether its failures cancelled them."""


@click.command(epilog=examples("lastbit ack 7:0:42 7:0:43", "lastbit pending 7 --ids --limit 1000 | lastbit ack -"))
@click.argument("ids", nargs=-1, metavar="[ID]... [-]")
@session
def ack(s: Session, ids: tuple[str, ...]) -> None:
    """Ack items: they are done.

    Without an ID, or with a dash, ids are read from standard input, one per line, without limit.
    """
    _resolve(s, ids, s.client.ack, "acked")


@click.command(
    epilog=examples("lastbit fail 7:0:42 --reason 'no such file'", "lastbit fail - --reason 'disk full' < ids.txt")
)
@click.argument("ids", nargs=-1, metavar="[ID]... [-]")
@click.option("--reason", help="Why they failed, as shown by `lastbit pending --failed`.")
@session
def fail(s: Session, ids: tuple[str, ...], reason: str | None) -> None:
    """Mark items as failed (dead-lettered). An ack wins over a failure, even if it comes later.

    Without an ID, or with a dash, ids are read from standard input, one per line, without limit. The output names
    batches that are cancelled because their failures exceed their tolerance.
    """
    _resolve(s, ids, lambda chunk: s.client.fail(chunk, reason), "failed")


@click.command(
    epilog=examples(
        "lastbit skip 7:0:42 --reason 'the customer has left'", "lastbit pending 7 --failed --ids | lastbit skip -"
    )
)
@click.argument("ids", nargs=-1, metavar="[ID]... [-]")
@click.option("--reason", help="Why they are not needed.")
@session
def skip(s: Session, ids: tuple[str, ...], reason: str | None) -> None:
    """Mark items as not needed: they are resolved, and no failures. A skip wins over a failure, and an ack over both.

    Without an ID, or with a dash, ids are read from standard input, one per line, without limit.
    """
    _resolve(s, ids, lambda chunk: s.client.skip(chunk, reason), "skipped")


def _resolve(s: Session, ids: tuple[str, ...], send: Callable[[list[str]], AckResult], verb: str) -> None:
    result = AckResult()
    count = 0
    batches: dict[int, None] = {}
    cancelled: list[Batch] = []
    try:
        for chunk in chunks(ids):
            result = result.merged(send(chunk))
            count += len(chunk)
            if len(batches) < MOST_LOOKED_UP:
                batches |= dict.fromkeys(int(item.partition(":")[0]) for item in chunk)
        if verb == "failed" and (result.applied or result.rejected):
            cancelled = list(_cancelled(s, islice(batches, MOST_LOOKED_UP)))
    except (errors.LastbitError, KeyboardInterrupt) as error:
        if isinstance(error, errors.LastbitError):
            if error.partial is not None:
                result = result.merged(error.partial)
            if count:
                error.partial = result
        if not s.output.as_json:
            if result != AckResult():
                # No later call reports that this one completed a batch.
                s.output.answer(result, *rendering.resolved(result, verb))
            if count:
                click.echo(f"The first {count:,} ids were sent; sending them again is safe.", err=True)
        raise
    document = plain(result)
    if verb == "failed":
        document["cancelled"] = [{"batch": batch.id, "key": batch.key} for batch in cancelled]
    s.output.answer(document, *rendering.resolved(result, verb), *map(rendering.cancellation, cancelled))
    if result.rejected:
        end(NOT_SUCCEEDED)


def _cancelled(s: Session, batches: Iterable[int]) -> Iterator[Batch]:
    """Those of the batches that are cancelled because too many of their items failed. The response to failures doesn't
    name them."""
    for batch in batches:
        try:
            info = s.client.batch(batch).refresh()
        except errors.BatchNotFound:
            continue
        except errors.LastbitError:  # the failures are stored nonetheless
            return
        if info.state == "cancelled" and info.exceeded:
            yield info


@click.command(
    epilog=examples(
        "lastbit pending 7", "lastbit pending catalog-42 --failed", "lastbit pending 7 --failed --ids | lastbit ack -"
    )
)
@click.argument("batch", type=BATCH)
@click.option("--failed", is_flag=True, help="Show the failed items instead, grouped by reason.")
@click.option("--skipped", is_flag=True, help="Show the skipped items instead, grouped by reason.")
@click.option("--ids", "ids_only", is_flag=True, help="Print each id on a line, and nothing else.")
@click.option("--limit", type=LIMIT, help="Maximum number of ranges, or of ids with --ids.  [default: all]")
@session
def pending(s: Session, batch: int, failed: bool, skipped: bool, ids_only: bool, limit: int | None) -> None:
    """Show the pending items of BATCH, as ranges of ids.

    Failed or skipped ones are shown by reason, the most frequent first. In JSON, `reasons` has the first thousand
    reasons, and `others` is the number of items with other ones.
    """
    if failed and skipped:
        raise click.UsageError("--failed and --skipped exclude each other: use one of them")
    handle = s.client.batch(batch)
    pages = handle.failed if failed else handle.skipped if skipped else handle.pending
    matching: Iterator[Any] = pages(page_size=min(limit or 1000, 1000))
    # Fetch the first page before writing, so that an error does not leave half a document.
    matching = chain(list(islice(matching, 1)), matching)
    ranges = islice(matching, limit)
    if ids_only:
        ids = islice(chain.from_iterable(one.ids for one in ranges), limit)
        if s.output.as_json:
            s.output.stream({"batch": batch}, "ids", ids)
        else:
            s.output.lines(ids)
    elif failed or skipped:
        _show_by_reason(s, batch, "failed" if failed else "skipped", ranges)
    elif s.output.as_json:
        s.output.stream({"batch": batch}, "ranges", ranges)
    else:
        _show(s, ranges)
    if not ids_only and not s.output.as_json and next(matching, None) is not None:
        s.output.say("[dim]There are more; --limit shows more of them.[/]")


def _show_by_reason(s: Session, batch: int, kind: Literal["failed", "skipped"], ranges: Iterable[FailedRange]) -> None:
    groups = ByReason(batch, kind)

    def collected() -> Iterator[FailedRange]:
        for span in ranges:
            groups.add(span)
            yield span

    if s.output.as_json:
        s.output.stream({"batch": batch}, "ranges", collected(), groups.summary)
        return
    deque(collected(), maxlen=0)
    for line in groups.lines():
        s.output.say(line)


def _show(s: Session, ranges: Iterable[PendingRange]) -> None:
    count = items = 0
    for span in ranges:
        count += 1
        items += span.count
        if span.count == 1:
            s.output.say(f"[bold]{span.first}[/]  [dim]number {span.start:,}[/]")
        else:
            numbers = f"[dim]numbers {span.start:,} to {span.end - 1:,}[/]"
            s.output.say(
                f"[bold]{span.first}[/] … [bold]{span.last}[/]  {rendering.number(span.count, 'item')}, {numbers}"
            )
    ending = f" in {rendering.number(count, 'range')}" if count else ""
    s.output.say(f"{rendering.number(items, 'item')} pending{ending}" if items else "nothing pending")


@click.command(epilog=examples("lastbit reasons 7", "lastbit reasons catalog-42 --limit 10"))
@click.argument("batch", type=BATCH)
@click.option(
    "--limit",
    type=Whole(min=1, max=1000),
    default=100,
    show_default=True,
    help="Maximum number of reasons, up to 1000.",
)
@session
def reasons(s: Session, batch: int, limit: int) -> None:
    """Show why items of BATCH failed, by reason.

    Each reason is shown with its count, its times and some ids. Of more than 5,000 failures, only a sample is examined.
    """
    reasons = s.client.batch(batch).failure_reasons(limit=limit)
    s.output.answer(reasons, *rendering.reasons(reasons))


@click.command(
    epilog=examples(
        "lastbit redrive catalog-42",
        "lastbit redrive 7 --reason 'no such file' --note 'the mount is back' --yes",
        "lastbit redrive 7 --pending --unchanged-for 1h",
        "lastbit redrive --key-prefix catalog- --since 24h --reason 'no such file'",
    )
)
@click.argument("batch", type=BATCH, required=False)
@click.option("--reason", help="Only items that failed for this reason.  [default: all failed items]")
@click.option("--note", help="A text for the producer.")
@click.option("--pending", is_flag=True, help="The pending items instead, except those of nested batches.")
@click.option("--idempotency-key", help="A repeat with the same key has no further effect.")
@selections.selection_options
@yes_option
@session
def redrive(
    s: Session,
    batch: int | None,
    reason: str | None,
    note: str | None,
    pending: bool,
    idempotency_key: str | None,
    selection: Selection,
    yes: bool,
) -> None:
    """Ask the producer to send failed or pending items again.

    Those of BATCH, or of all batches that filters choose. This appends an event to the feed for each batch, which the
    producer must follow (client.redrives in Python). The items stay as they are until they are acked. With --pending,
    --unchanged-for also applies to BATCH. With filters, the batches are counted first, and you are asked to type their
    number.
    """
    kind = "pending" if pending else "failed"
    phrase = "" if reason is None else f"the items that failed for {reason!r}"
    unchanged_for = selection.filters.get("unchanged_for")
    options: dict[str, Any] = {"reason": reason, "note": note, "pending": pending}
    if selection.check(batch, "unchanged_for"):
        key = idempotency_key or str(uuid.uuid4())
        options |= {"unchanged_for": unchanged_for if pending else None, "idempotency_key": key}
        action = selections.Action(
            "redrive",
            "redriven",
            lambda handle, _: handle.redrive(**options),
            lambda choice: (
                f"Ask for {phrase or f'all {getattr(choice, kind):,} {kind} items'} of {choice.described()} again?"
            ),
            selections.LIVE if pending else (*selections.LIVE, "complete"),
            lambda batch: batch.pending > 0 if pending else batch.failed > 0,
            f"--idempotency-key {key}",
        )
        if not pending:
            selection = replace(selection, filters={**selection.filters, "failed": True})
        selections.act(s, selection, action, yes=yes)
        return
    assert batch is not None
    confirm(yes, lambda: f"Ask for {phrase or f'all {kind} items'} of batch {batch} again?")
    redrive = s.client.batch(batch).redrive(
        **options, unchanged_for=unchanged_for, idempotency_key=sent_once(idempotency_key)
    )
    s.output.answer(
        redrive,
        f"[bold]batch {batch}[/]  asked for {rendering.number(redrive.count, f'{kind} item')} again, "
        f"at position {redrive.position:,} of the feed",
        "[dim]Their producer, which must follow redrives, sends them again; "
        f"lastbit status {batch} shows the counts.[/]",
    )


@click.command(
    epilog=examples(
        "lastbit failures --text 'disk is full'",
        "lastbit failures --text timeout --key-prefix catalog- --since 24h",
        "lastbit failures --text timeout --json | jq -r '.failures[].batch' | sort -u",
    )
)
@click.option("--text", help="Only failures whose reason has this text, in upper or lower case.")
@state_option
@filter_options
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="Maximum number of failures.")
@session
def failures(s: Session, text: str | None, state: str | None, filters: Filters, limit: int) -> None:
    """Find failed items by a text in their reason.

    It searches all batches, or those that filters choose, the newest first. Items that failed without a reason are left
    out. There is no index of reasons: this reads the failures of all these batches until it has found enough.
    """
    with s.output.counter("failures found") as count:
        matching = s.client.failures(text, state=state, page_size=min(limit, 1000), **filters)
        entries: list[Failure] = []
        for failure in islice(matching, limit):
            entries.append(failure)
            count(len(entries))
        has_more = len(entries) == limit and next(matching, None) is not None
    if s.output.as_json:
        s.output.document({"failures": entries, "more": has_more})
        return
    for failure in entries:
        s.output.say(rendering.failure(failure))
    if not entries:
        s.output.say("no failures")
        return
    batches = rendering.number(len({failure.batch for failure in entries}), "batch", "batches")
    s.output.say(f"[dim]{rendering.number(len(entries), 'failure')} in {batches}[/]")
    if has_more:
        s.output.say("[dim]There are more; --limit shows more of them.[/]")
