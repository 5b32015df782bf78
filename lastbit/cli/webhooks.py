"""`lastbit webhooks`: create webhooks, show their deliveries, send events again, and rotate secrets."""

from __future__ import annotations

from itertools import islice

import click

from lastbit import webhooks as model
from lastbit.cli.app import Session, confirm, end, examples, session, yes_option
from lastbit.cli.arguments import LIMIT, WEBHOOK, Duration, Whole
from lastbit.cli.faults import NOT_SUCCEEDED, not_repeatable
from lastbit.cli.output import safe
from lastbit.cli.rendering import number

STYLES = {"active": "green", "disabled": "red", "pending": "yellow", "delivered": "green", "dead": "red"}


@click.group(epilog=examples("lastbit webhooks create https://example.com/hook", "lastbit webhooks list"))
def webhooks() -> None:
    """Send signed events to a URL, each at least once."""


@webhooks.command(epilog=examples("lastbit webhooks create https://example.com/hook --type batch.completed"))
@click.argument("target", metavar="URL")
@click.option("--type", "types", multiple=True, help="Only events of this type; repeat to allow several types.")
@click.option("--label", help="Your name for the webhook.")
@session
def create(s: Session, target: str, types: tuple[str, ...], label: str | None) -> None:
    """Send new events to URL: all, or those of --type. The secret is shown only once."""
    not_repeatable()
    webhook = s.client.webhooks.create(target, types=types or None, label=label)
    s.output.answer(
        webhook, _line(webhook), f"secret {webhook.secret}\n[dim]Keep it for the receiver: it is not shown again.[/]"
    )


@webhooks.command("list", epilog=examples("lastbit webhooks list"))
@session
def list_webhooks(s: Session) -> None:
    """List webhooks, newest first."""
    all_webhooks = list(s.client.webhooks.list())
    s.output.listing("webhooks", all_webhooks, _line, "no webhooks")


@webhooks.command(epilog=examples("lastbit webhooks delete 1"))
@click.argument("webhook", type=WEBHOOK)
@yes_option
@session
def delete(s: Session, webhook: int, yes: bool) -> None:
    """Delete WEBHOOK with its deliveries."""
    confirm(yes, lambda: f"Delete webhook {webhook} with its deliveries?")
    s.client.webhooks.delete(webhook)
    s.output.answer({"deleted": webhook}, f"webhook {webhook} is deleted")


@webhooks.command(epilog=examples("lastbit webhooks deliveries 1 --state dead"))
@click.argument("webhook", type=WEBHOOK)
@click.option("--state", type=click.Choice(["pending", "delivered", "dead"]), help="Only deliveries in this state.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="Maximum number of deliveries.")
@session
def deliveries(s: Session, webhook: int, state: str | None, limit: int) -> None:
    """Show the deliveries of WEBHOOK, newest event first."""
    matching = s.client.webhooks.deliveries(webhook, state=state, page_size=min(limit, 1000))
    page = list(islice(matching, limit))
    s.output.listing("deliveries", page, _delivery, "no deliveries")


@webhooks.command(epilog=examples("lastbit webhooks redeliver 1", "lastbit webhooks redeliver 1 --position 4711"))
@click.argument("webhook", type=WEBHOOK)
@click.option("--position", type=Whole(min=1), help="The event's position in the feed.")
@click.option("--event", help="The event's id.")
@session
def redeliver(s: Session, webhook: int, position: int | None, event: str | None) -> None:
    """Send events to WEBHOOK again.

    Sends the event of --position or --event, or without these all events whose deliveries are dead.
    """
    if position is not None and event is not None:
        raise click.UsageError("--position and --event exclude each other")
    count = s.client.webhooks.redeliver(webhook, position=position, event=event)
    s.output.answer({"redelivered": count}, f"{count:,} due again" if count else "no dead deliveries")


@webhooks.command(epilog=examples("lastbit webhooks test 1"))
@click.argument("webhook", type=WEBHOOK)
@session
def test(s: Session, webhook: int) -> None:
    """Send a test event to WEBHOOK now, and show the outcome."""
    outcome = s.client.webhooks.test(webhook)
    if s.output.as_json:
        s.output.document(outcome)
    else:
        verdict = "[green]delivered[/]" if outcome.delivered else "[red]not delivered[/]"
        s.output.say(f"{safe(outcome.event)}  {verdict}: {_answer(outcome)}")
    if not outcome.delivered:
        end(NOT_SUCCEEDED)


@webhooks.command(
    epilog=examples("lastbit webhooks rotate-secret 1", "lastbit webhooks rotate-secret 1 --overlap 0 --yes")
)
@click.argument("webhook", type=WEBHOOK)
@click.option(
    "--overlap",
    type=Duration("7d"),
    metavar="TIME",
    default="1d",
    show_default=True,
    help="How long the earlier secrets stay valid, at most 7d.",
)
@yes_option
@session
def rotate_secret(s: Session, webhook: int, overlap: int, yes: bool) -> None:
    """Give WEBHOOK a new secret, which is shown only once.

    Until the overlap is over, each event is signed with the earlier secrets too. With --overlap 0, they end at once.
    """
    confirm(yes, lambda: f"Give webhook {webhook} a new secret?")
    result = s.client.webhooks.rotate_secret(webhook, overlap=overlap)
    until = result.overlap_until
    end = (
        "The earlier secrets have ended."
        if until is None
        else f"Earlier secrets sign until {until:%Y-%m-%d %H:%M} UTC."
    )
    s.output.answer(
        result,
        _line(result),
        f"secret {result.secret}\n[dim]Keep it for the receiver: it is not shown again. {end}[/]",
    )


def _state(state: str) -> str:
    return f"[{STYLES.get(state, 'default')}]{safe(state)}[/]"


def _line(webhook: model.Webhook) -> str:
    types = "all events" if webhook.types is None else ", ".join(map(safe, webhook.types))
    label = f" {safe(webhook.label)}" if webhook.label else ""
    return f"[bold]webhook {webhook.id}[/]{label}  {_state(webhook.state)}  {safe(webhook.url)}  {types}"


def _delivery(delivery: model.Delivery) -> str:
    last = f", last {_answer(delivery.log[-1])}" if delivery.log else ""
    return (
        f"[bold]{delivery.position:,}[/] {safe(delivery.event)}  {safe(delivery.type)}  {_state(delivery.state)}, "
        f"{number(delivery.attempts, 'attempt')}{last}"
    )


def _answer(attempt: model.Attempt | model.Tested) -> str:
    parts = [str(attempt.status)] if attempt.status is not None else []
    parts += [safe(attempt.error)] if attempt.error else []
    return f"{', '.join(parts)} in {attempt.milliseconds:,} ms"
