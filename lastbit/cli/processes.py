"""`lastbit processes` and `lastbit commands`: instances, parked events, and issued commands."""

from __future__ import annotations

import json
from itertools import islice

import click

from lastbit import errors
from lastbit.cli.app import Session, confirm, ended_by_signals, examples, session, yes_option
from lastbit.cli.arguments import LIMIT, Whole
from lastbit.cli.faults import ending_without_a_reader
from lastbit.cli.output import plain_text, safe
from lastbit.cli.rendering import number
from lastbit.processes.models import Instance, IssuedCommand, ProcessSummary

STYLES = {
    "running": "yellow",
    "finished": "green",
    "handled": "green",
    "parked": "red",
    "retrying": "yellow",
    "late": "dim",
}


class NotParked(errors.InvalidArgument):
    """The instance has no parked event of this id."""

    def __str__(self) -> str:
        instance, event = self.args
        return f"--event: {instance!r} has no parked event with the id {event!r}"


@click.group(epilog=examples("lastbit processes list", "lastbit processes instances ship-order --status parked"))
def processes() -> None:
    """Show process managers, and retry their parked events."""


@processes.command("list", epilog=examples("lastbit processes list"))
@session
def list_processes(s: Session) -> None:
    """List processes, with their numbers of instances."""
    process_list = s.client.processes.list()
    s.output.listing("processes", process_list, _summary, "no processes")


@processes.command(epilog=examples("lastbit processes instances ship-order --status parked"))
@click.argument("process")
@click.option("--status", type=click.Choice(["running", "finished", "parked"]), help="Only instances with this status.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="Maximum number of instances.")
@session
def instances(s: Session, process: str, status: str | None, limit: int) -> None:
    """List the instances of PROCESS by name.

    The status parked selects those that have parked events.
    """
    matching = s.client.processes.instances(process, status=status, page_size=min(limit, 1000))
    instances = list(islice(matching, limit))
    s.output.listing("instances", instances, _line, "no instances")


@processes.command(epilog=examples("lastbit processes show ship-order order-1045"))
@click.argument("process")
@click.argument("instance")
@session
def show(s: Session, process: str, instance: str) -> None:
    """Show the state of INSTANCE, its events, timers and commands."""
    instance_read = s.client.processes.get(process, instance)
    if s.output.as_json:
        s.output.document(instance_read)
        return
    s.output.say(_line(instance_read))
    s.output.say(f"state {safe(json.dumps(instance_read.state, ensure_ascii=False))}")
    for event in reversed(instance_read.history):
        s.output.say(f"[bold]{event.position:,}[/] {safe(event.event)}  {_status(event.status)}")
        if event.error is not None:
            error = safe(event.error.rstrip(), keep="\n")
            s.output.say(f"[dim]{error}[/]")
        elif event.status == "parked":
            s.output.say("[dim]It waits behind an earlier event.[/]")
    for timer in instance_read.timers:
        s.output.say(f"timer {safe(timer.timer)}  due {timer.due_at:%Y-%m-%d %H:%M:%S} UTC")
    for command in reversed(instance_read.commands):
        s.output.say(_command(command))


@processes.command(epilog=examples("lastbit processes retry ship-order order-1045"))
@click.argument("process")
@click.argument("instance")
@click.option("--event", help="Only the event with this id.")
@session
def retry(s: Session, process: str, instance: str, event: str | None) -> None:
    """Retry the parked events of INSTANCE.

    An event that is being retried, or was handled, is left alone, so this can be repeated.
    """
    count = s.client.processes.retry(process, instance, event=event)
    if event is None or count:
        text = f"{number(count, 'event')} will be handled again" if count else "none of its events is parked"
        s.output.answer({"retrying": count}, text)
        return
    # A retry of this event may have been applied before, by an attempt whose response was lost.
    history = s.client.processes.get(process, instance).history
    status = next((received.status for received in history if received.event == event), None)
    if status is None:
        raise NotParked(instance, event)
    s.output.answer({"retrying": 0, "status": status}, f"the event is not parked: it is {_status(status)}")


@processes.command(epilog=examples("lastbit processes delete ship-order"))
@click.argument("process")
@yes_option
@session
def delete(s: Session, process: str, yes: bool) -> None:
    """Delete PROCESS with its instances. The commands that it issued are kept."""
    confirm(yes, lambda: f"Delete the process {process} with its instances?")
    s.client.processes.delete(process)
    s.output.answer({"deleted": process}, f"process {safe(process)} is deleted")


@click.command(epilog=examples("lastbit commands --process ship-order", "lastbit commands --follow --json"))
@click.option("--after", type=Whole(min=0), default=0, show_default=True, help="Start after this position.")
@click.option("--type", "types", multiple=True, help="Only commands of this type; repeat to allow several types.")
@click.option("--process", help="Only commands of this process.")
@click.option("--limit", type=LIMIT, help="Maximum number of commands.  [default: 50; with --follow: no limit]")
@click.option("--follow", is_flag=True, help="Go on with new commands as they arrive.")
@session
def commands(
    s: Session, after: int, types: tuple[str, ...], process: str | None, limit: int | None, follow: bool
) -> None:
    """Show the commands that processes issued, in commit order.

    With --follow and --json, each command is a JSON document on its own line.
    """
    if follow:
        with ended_by_signals(), ending_without_a_reader():
            for command in islice(s.client.processes.follow(after=after, types=types, process=process), limit):
                s.output.answer(command, _command(command))
        return
    issued: list[IssuedCommand] = []
    while True:
        size = min((limit or 50) - len(issued), 1000)
        page = s.client.processes.commands(after=after, types=types, process=process, limit=size)
        issued += page.commands
        after = page.next
        if len(issued) >= (limit or 50) or after >= page.last:
            break
    if s.output.as_json:
        s.output.document({"commands": issued, "next": after, "last": page.last})
        return
    for command in issued:
        s.output.say(_command(command))
    if not issued:
        s.output.say("no commands")
        if process is not None:
            try:
                next(s.client.processes.instances(process, page_size=1), None)
            except errors.ProcessNotFound:  # a deleted one has commands, so it can't be refused first
                click.echo(f"There is no process {plain_text(process)} now.", err=True)
    elif after < page.last:
        s.output.say(f"[dim]There may be more: continue with --after {after}.[/]")


def _status(status: str) -> str:
    return f"[{STYLES.get(status, 'default')}]{safe(status)}[/]"


def _summary(process: ProcessSummary) -> str:
    parked = f", [red]{number(process.parked, 'parked event')}[/]" if process.parked else ""
    unnamed = f", {number(process.unnamed, 'event')} without an instance" if process.unnamed else ""
    return (
        f"[bold]{safe(process.name)}[/]  {process.running:,} running, {process.finished:,} finished{parked}, "
        f"{number(process.timers, 'timer')}{unnamed}, handled up to position {process.floor:,}"
    )


def _line(instance: Instance) -> str:
    parked = f"  [red]{number(instance.parked, 'parked event')}[/]" if instance.parked else ""
    return f"[bold]{safe(instance.instance)}[/]  {_status(instance.status)}, version {instance.version:,}{parked}"


def _command(command: IssuedCommand) -> str:
    data = "" if command.data is None else f"  {safe(json.dumps(command.data, ensure_ascii=False))}"
    return (
        f"[bold]{command.position:,}[/] {safe(command.type)}  {safe(command.process)} {safe(command.instance)}"
        f"{data}  [dim]{command.id}[/]"
    )
