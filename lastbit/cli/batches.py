"""Commands for batches: open, extend, update, seal, cancel, status, list and others."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any, Literal

import click

from lastbit import _calls, _traces
from lastbit.cli import batch_list, browser, rendering, selections
from lastbit.cli.app import Session, Signed, confirm, examples, session, yes_option
from lastbit.cli.arguments import BATCH, COUNT, DEADLINE, DURATION, LABEL, LIMIT, NONE, WHOLE, OrNone, Whole, labels
from lastbit.cli.browser import web_option
from lastbit.cli.faults import sent_once
from lastbit.cli.filters import filter_options, state_option
from lastbit.cli.output import plain, safe
from lastbit.cli.selections import Selection
from lastbit.models import Callback
from lastbit.search import Filters, query

Labels = tuple[tuple[str, str], ...]


@click.command(
    "open",
    epilog=examples(
        "lastbit open --key catalog-42 --label team:search --items 20000 --sealed",
        "lastbit open --key chapter-1 --items 100 --parent 1:0:0",
        "lastbit open --items 20000 --sealed --tolerated-failure-percentage 2",
        "lastbit open --key nightly --items 500 --deadline 2h",
        "lastbit open --key merged --seal-at 5000",
        "lastbit open --items 1000 --ids > ids.txt",
        "lastbit open --items 1000 --sealed --callback https://example.com/hooks",
    ),
)
@click.option("--key", help="Your name for the batch.")
@click.option(
    "--label", "label_pairs", type=LABEL, multiple=True, help="A label of the batch; repeat to give it several."
)
@click.option("--items", type=COUNT, help="Number of items to issue right away.")
@click.option("--sealed", is_flag=True, help="Seal it right away: no more items will come.")
@click.option("--seal-at", type=COUNT, help="Number of items with which it seals itself, and which it can't exceed.")
@click.option("--group-size", type=WHOLE, metavar="N", help="Items per group, a multiple of 8 from 64 to 32768.")
@click.option("--parent", metavar="ITEM", help="The item of another batch that this batch resolves.")
@click.option(
    "--expires-in", type=DURATION, help="How long it may be idle before it expires: seconds, or 15m, 12h, 7d, 2w."
)
@click.option(
    "--deadline",
    type=DEADLINE,
    help="When it expires if it is unfinished: 90s, 15m, 12h or 7d from now, or a date and time with a time zone.",
)
@click.option("--tolerated-failures", type=COUNT, help="Maximum failed items with which it still succeeds.")
@click.option(
    "--tolerated-failure-percentage",
    type=Whole(0, 100),
    metavar="PERCENT",
    help="Maximum percentage of failed items with which it still succeeds, judged once it is sealed.",
)
@click.option(
    "--on-exceeded",
    type=click.Choice(["continue", "cancel"]),
    help="What happens when its failures exceed the tolerance: it continues (the default) or is cancelled.",
)
@click.option("--callback", metavar="URL", help="Send signed webhooks there about how the batch ended.")
@click.option(
    "--callback-type",
    "callback_types",
    metavar="TYPE",
    multiple=True,
    help="Send events of this type instead; repeat to send several types.",
)
@click.option("--idempotency-key", help="The same key returns the same batch instead of opening another.")
@click.option("--ids", "ids_only", is_flag=True, help="Print each issued id on a line, and nothing else.")
@session
def open_batch(
    s: Session,
    key: str | None,
    label_pairs: Labels,
    items: int | None,
    sealed: bool,
    seal_at: int | None,
    group_size: int | None,
    parent: str | None,
    expires_in: int | None,
    deadline: datetime | None,
    tolerated_failures: int | None,
    tolerated_failure_percentage: int | None,
    on_exceeded: Literal["continue", "cancel"] | None,
    callback: str | None,
    callback_types: tuple[str, ...],
    idempotency_key: str | None,
    ids_only: bool,
) -> None:
    """Open a batch."""
    if key == "":
        raise click.UsageError("--key is empty: give the batch a name, or leave the option out")
    if callback_types and callback is None:
        raise click.UsageError("--callback-type needs --callback")
    with _traces.from_environment():
        batch = s.client.open(
            key=key,
            labels=labels(label_pairs),
            items=items,
            sealed=sealed,
            seal_at=seal_at,
            group_size=group_size,
            parent=parent,
            expires_in=expires_in,
            deadline=deadline,
            tolerated_failures=tolerated_failures,
            tolerated_failure_percentage=tolerated_failure_percentage,
            on_exceeded=on_exceeded,
            callback=None if callback is None else Callback(callback, callback_types or None),
            idempotency_key=sent_once(idempotency_key, deadline),
        )
    if s.output.as_json:
        head = {**plain(batch.info), "replayed": batch.replayed}
        if ids_only:
            s.output.stream(head, "ids", batch.ids)
        else:
            s.output.document(head)
    elif ids_only:
        s.output.lines(batch.ids)
    else:
        replay_note = ", opened before with this idempotency key" if batch.replayed else ""
        s.output.say(f"{rendering.title(batch.id, batch.key)}  {rendering.state(batch.info)}{replay_note}")
        if batch.ids:
            s.output.say(rendering.issued(batch.ids))
        if batch.callback is not None:
            s.output.say(f"callback: webhook {batch.callback.id}, secret {safe(batch.callback.secret)}")


@click.command(
    cls=Signed,  # so that the error of a negative count is that of a count
    epilog=examples(
        "lastbit extend 7 5000",
        "lastbit extend catalog-42 5000 --idempotency-key chapter-2 --ids",
        "lastbit extend 7 12 --by 7:0:3",
    ),
)
@click.argument("batch", type=BATCH)
@click.argument("count", type=COUNT)
@click.option("--by", metavar="ITEM", help="The pending item that adds them, to a sealed batch too.")
@click.option("--idempotency-key", help="The same key returns the same items instead of issuing more.")
@click.option("--ids", "ids_only", is_flag=True, help="Print each id on a line, and nothing else.")
@session
def extend(s: Session, batch: int, count: int, by: str | None, idempotency_key: str | None, ids_only: bool) -> None:
    """Issue COUNT more items of BATCH."""
    extended = s.client.driver.run(_calls.extend, batch, count, sent_once(idempotency_key), by=by)
    ids = extended.ids
    if s.output.as_json:
        head: dict[str, Any] = {"batch": batch, "group_size": ids.group_size, "start": ids.numbers.start}
        head |= {"count": len(ids), "replayed": extended.replayed}
        if ids_only:
            s.output.stream(head, "ids", ids)
        else:
            ends = {"first": ids[0], "last": ids[-1]} if ids else {"first": None, "last": None}
            s.output.document({**head, **ends})
    elif ids_only:
        s.output.lines(ids)
    else:
        replay_note = ", issued before with this idempotency key" if extended.replayed else ""
        s.output.say(f"{rendering.issued(ids)}{replay_note}")


@click.command(epilog=examples("lastbit seal 7", "lastbit seal catalog-42"))
@click.argument("batch", type=BATCH)
@session
def seal(s: Session, batch: int) -> None:
    """Promise that no more items of BATCH will come."""
    sealed = s.client.batch(batch).seal()
    pending_text = f", {sealed.pending:,} of {rendering.number(sealed.items, 'item')} pending" if sealed.pending else ""
    note = ": this seal completed it" if sealed.newly else ""
    s.output.answer(sealed, f"{rendering.title(sealed.id, sealed.key)}  {rendering.state(sealed)}{pending_text}{note}")


@click.command(
    epilog=examples(
        "lastbit update 7 --tolerated-failure-percentage 5 --deadline 2h",
        "lastbit update 7 --deadline none",
        "lastbit update catalog-42 --label team:search --remove-label trial",
    )
)
@click.argument("batch", type=BATCH)
@click.option(
    "--label", "label_pairs", type=LABEL, multiple=True, help="A label to add or change; repeat to change several."
)
@click.option(
    "--remove-label", "removed", metavar="NAME", multiple=True, help="A label to remove; repeat to remove several."
)
@click.option("--deadline", type=OrNone(DEADLINE), help="When it expires if it is unfinished, as in open.")
@click.option("--tolerated-failures", type=OrNone(COUNT), help="Maximum failed items with which it still succeeds.")
@click.option(
    "--tolerated-failure-percentage",
    type=OrNone(Whole(0, 100)),
    metavar="PERCENT",
    help="Maximum percentage of failed items with which it still succeeds, judged once it is sealed.",
)
@click.option(
    "--on-exceeded",
    type=click.Choice(["continue", "cancel"]),
    help="What happens when its failures exceed the tolerance.",
)
@click.option("--idempotency-key", help="A repeat with the same key has no further effect.")
@session
def update(
    s: Session,
    batch: int,
    label_pairs: Labels,
    removed: tuple[str, ...],
    idempotency_key: str | None,
    **options: Any,
) -> None:
    """Change the tolerance, deadline or labels of BATCH.

    It must be open or sealed. Options that are left out change nothing; `none` removes a deadline or a limit.
    """
    changes = {name: None if value == NONE else value for name, value in options.items() if value is not None}
    for name, _ in label_pairs:
        if name in removed:
            raise click.UsageError(f"the label {name!r} is in --label and in --remove-label")
    if label_pairs or removed:
        changes["labels"] = {**(labels(label_pairs) or {}), **dict.fromkeys(removed)}
    if not changes:
        raise click.UsageError("expected an option that says what to change")
    updated = s.client.batch(batch).update(**changes, idempotency_key=idempotency_key)
    if s.output.as_json:
        s.output.document(updated)
    else:
        s.output.show(rendering.batch_lines(updated))


@click.command(
    epilog=examples(
        "lastbit cancel 7",
        "lastbit cancel catalog-42 --reason 'the wrong catalog' --children --yes",
        "lastbit cancel --key-prefix catalog- --unchanged-for 1d",
    )
)
@click.argument("batch", type=BATCH, required=False)
@click.option("--reason", help="Why, for people: the event, explain and the page show it.")
@click.option("--children", is_flag=True, help="Also cancel the live batches below it, at any depth.")
@selections.selection_options
@yes_option
@session
def cancel(s: Session, batch: int | None, reason: str | None, children: bool, selection: Selection, yes: bool) -> None:
    """End BATCH now, or all batches that filters choose.

    Later acks are rejected. Filters choose open and sealed batches; they are counted first, and you are asked to type
    their number.
    """
    if selection.check(batch):
        run = str(uuid.uuid4())
        below = " with all live batches below them" if children else ""
        action = selections.Action(
            "cancel",
            "cancelled",
            lambda handle, _: handle.cancel(reason=reason, children=children, idempotency_key=run),
            lambda choice: (
                f"Cancel {choice.described()}{below} with {rendering.number(choice.pending, 'pending item')}?\n"
                "Later acks are rejected."
            ),
            selections.LIVE,
        )
        selections.act(s, selection, action, yes=yes)
        return
    assert batch is not None
    below = " with all live batches below it" if children else ""
    confirm(yes, lambda: f"Cancel {_described(s, batch)}{below}? Later acks are rejected.")
    cancelled = s.client.batch(batch).cancel(reason=reason, children=children)
    pending_text = f"{cancelled.pending:,} of {rendering.number(cancelled.items, 'item')} pending"
    s.output.answer(
        cancelled, f"{rendering.title(cancelled.id, cancelled.key)}  {rendering.state(cancelled)}, {pending_text}"
    )


@click.command(
    epilog=examples(
        "lastbit reopen 7",
        "lastbit reopen catalog-42 --deadline 2h --reason 'the disk is back'",
        "lastbit reopen --state expired --since 2h --deadline 6h",
    )
)
@click.argument("batch", type=BATCH, required=False)
@click.option("--deadline", type=OrNone(DEADLINE), help="When it expires if it is unfinished, as in open, or none.")
@click.option("--reason", help="Why, for readers of the event.")
@click.option("--idempotency-key", help="A repeat with the same key has no further effect.")
@selections.selection_options
@click.option("--yes", is_flag=True, help="With filters: don't ask for confirmation.")
@session
def reopen(
    s: Session,
    batch: int | None,
    deadline: datetime | str | None,
    reason: str | None,
    idempotency_key: str | None,
    selection: Selection,
    yes: bool,
) -> None:
    """Reopen BATCH, or all batches that filters choose.

    A batch that was cancelled or has expired is open or sealed again, as before, with all that was resolved. A deadline
    that has passed must be replaced. With filters, the batches are counted first, and you are asked to type their
    number.
    """
    changes: dict[str, Any] = {} if deadline is None else {"deadline": None if deadline == NONE else deadline}
    if selection.check(batch):
        run = idempotency_key or str(uuid.uuid4())
        moment = f" --deadline {deadline.isoformat()}" if isinstance(deadline, datetime) else ""
        action = selections.Action(
            "reopen",
            "reopened",
            lambda handle, _: handle.reopen(**changes, reason=reason, idempotency_key=run),
            lambda choice: f"Reopen {choice.described()} with {rendering.number(choice.pending, 'pending item')}?",
            ("cancelled", "expired"),
            again=f"--idempotency-key {run}{moment}",
        )
        selections.act(s, selection, action, yes=yes)
        return
    assert batch is not None
    batch_state = s.client.batch(batch).reopen(**changes, reason=reason, idempotency_key=idempotency_key)
    if s.output.as_json:
        s.output.document(batch_state)
    else:
        s.output.show(rendering.batch_lines(batch_state))


@click.command(
    epilog=examples(
        "lastbit delete 7",
        "lastbit delete catalog-42 --yes",
        "lastbit delete --state expired --until 30d",
    )
)
@click.argument("batch", type=BATCH, required=False)
@selections.selection_options
@yes_option
@session
def delete(s: Session, batch: int | None, selection: Selection, yes: bool) -> None:
    """Delete BATCH, or all batches that filters choose.

    All data goes. A batch that has not ended is cancelled first. With filters, the batches are counted first, and you
    are asked to type their number; one whose state changes after that is not deleted.
    """
    if selection.check(batch):
        action = selections.Action(
            "delete",
            "deleted",
            lambda handle, state: handle.delete(state=state),
            lambda choice: f"Delete {choice.described()} with all their data?\nThey can't be restored.",
        )
        selections.act(s, selection, action, yes=yes)
        return
    assert batch is not None
    confirm(yes, lambda: f"Delete {_described(s, batch)}? It can't be restored.")
    s.client.batch(batch).delete()
    s.output.answer({"deleted": batch}, f"[bold]batch {batch}[/] is deleted")


def _described(s: Session, batch: int) -> str:
    """The batch in a question."""
    current = s.client.batch(batch).refresh()
    key = "" if current.key is None else f" {current.key}"
    counts = (
        f"{rendering.number(current.items, 'item')}, {current.acked:,} acked, {current.failed:,} failed"
        f"{rendering.skipped(current)}, {current.pending:,} pending"
    )
    return f"batch {batch}{key} ({current.state}, {counts})"


@click.command(epilog=examples("lastbit status 7", "lastbit status catalog-42 --jq .pending", "lastbit status 7 --web"))
@click.argument("batch", type=BATCH)
@web_option
@session
def status(s: Session, batch: int, web: bool) -> None:
    """Show the current state of BATCH."""
    handle = s.client.batch(batch)
    current = handle.refresh()
    if web:
        browser.show(s, batch)
        return
    if s.output.as_json:
        s.output.document(current)
    else:
        s.output.show(rendering.batch_lines(current, handle.history(), handle.progress()))


@click.command(epilog=examples("lastbit explain 7", "lastbit explain catalog-42 --web"))
@click.argument("batch", type=BATCH)
@web_option
@session
def explain(s: Session, batch: int, web: bool) -> None:
    """Show why BATCH is not done."""
    explanation = s.client.batch(batch).explain()
    if web:
        browser.show(s, batch)
        return
    reasons = [{"code": reason.code, "text": reason.text, **reason.facts} for reason in explanation.reasons]
    s.output.answer({**plain(explanation), "reasons": reasons}, *rendering.explanation(explanation))


@click.command(
    "list",
    epilog=examples(
        "lastbit list --state open --label team:search",
        "lastbit list --key-prefix catalog- --outcome failed --since 24h",
        "lastbit list --failed --since 24h",
        "lastbit list --since 2026-05-04 --until 2026-05-05 --sort failed",
        "lastbit list --limit 100 --jq .next",
    ),
)
@state_option
@filter_options
@click.option(
    "--sort",
    "order",
    type=click.Choice(list(batch_list.ORDERS)),
    default="opened",
    show_default=True,
    help="What to sort by: the newest or largest first, but progress and key in ascending order.",
)
@click.option("--reverse", "is_reversed", is_flag=True, help="Reverse the order.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="Maximum number of batches.")
@click.option("--cursor", help="Continue a list: the `next` of its --json output.")
@session
def list_batches(
    s: Session,
    state: str | None,
    filters: Filters,
    order: str,
    is_reversed: bool,
    limit: int,
    cursor: str | None,
) -> None:
    """List batches, newest first.

    The service applies the filters. --sort and --reverse read all batches that match, a thousand per call.
    In JSON, `more` is true if more batches match than are listed.
    """
    is_sorted = order != "opened" or is_reversed
    if is_sorted and cursor is not None:
        raise click.UsageError("--cursor can't be combined with --sort or --reverse: it continues a list newest first")
    following: str | None = None
    with s.output.counter("batches read", is_shown=is_sorted) as count:
        reader = batch_list.Reader(s.client.driver, query(filters, state), count)
        if is_sorted:
            shown, has_more = reader.ordered(limit, order, is_reversed)
        else:
            shown, following = reader.newest(limit, cursor)
            has_more = following is not None
    if s.output.as_json:
        s.output.document({"batches": shown, "more": has_more, "next": following})
        return
    if shown:
        s.output.show(rendering.batch_table(shown, s.output.console.width))
    else:
        s.output.say("no batches")
    if following is not None:
        s.output.say(f"[dim]There are more: use --limit, or continue with --cursor {safe(following)}.[/]")
    elif has_more:
        s.output.say("[dim]There are more; --limit shows more of them.[/]")


@click.command(epilog=examples("lastbit counts", "lastbit counts --key-prefix catalog- --since 24h"))
@filter_options
@session
def counts(s: Session, filters: Filters) -> None:
    """Count batches by state.

    In JSON, `exact` is false if there are more than the service counts in one call.
    """
    counts = s.client.counts(**filters)
    width = max(len(f"{number:,}") for number in (*counts.states.values(), counts.total))
    rows = [*counts.states.items(), ("total", counts.total)]
    lines = [f"{safe(name):9}  {number:>{width},}" for name, number in rows]
    if not counts.exact:
        lines.append("[dim]There are more batches: the service did not count all of them.[/]")
    s.output.answer(counts, *lines)
