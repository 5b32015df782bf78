"""Commands that act on a selection of batches: cancel, reopen, delete and redrive with filters instead of a BATCH.

The selection is listed twice. First it is counted, which the user confirms; then it is listed again, and each batch
that was counted and still matches is acted on, by a call of its own. So a run changes no batch that the user has not
counted, whatever is opened meanwhile, and none that no longer matches. The service judges each batch once more, in the
transaction that changes it. A run that was stopped, or killed, is continued by running the command again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final, TypeVar

import click

from lastbit import errors
from lastbit.batch import BatchHandle
from lastbit.cli import faults
from lastbit.cli.app import Session, end
from lastbit.cli.filters import filter_options, state_option
from lastbit.cli.output import plain_text, safe
from lastbit.cli.rendering import number, title
from lastbit.models import Batch
from lastbit.search import Filters

F = TypeVar("F", bound=Callable[..., Any])

MOST: Final = 100_000
"""Maximum batches of one run; the newest are chosen."""
SHOWN: Final = 20
"""Maximum refusals that are shown one by one."""
IN_A_ROW: Final = 3
"""Batches in a row for which the service is overloaded, after which a run gives up."""

LIVE: Final = ("open", "sealed")

_CHANGED: Final = {
    "batch_not_found": "deleted",
    "batch_complete": "complete",
    "batch_expired": "expired",
    "batch_cancelled": "cancelled",
    "batch_live": "live",
    "state_conflict": "in another state",
    "nothing_failed": "with nothing failed to ask for",
    "nothing_pending": "with nothing pending to ask for, or changed too lately",
}
"""By the code of an error: what has become of a batch that no longer takes the action."""


@dataclass(frozen=True, slots=True)
class Action:
    """What is done to each batch. `states`: in which it can be done; without any, in all. `takes`: whether a batch in
    such a state needs it. `send`: the call, with the state in which the batch was counted. `done`: the participle.
    `again`: the options to add when the command is run again."""

    verb: str
    done: str
    send: Callable[[BatchHandle, str], object]
    question: Callable[[_Choice], str]
    states: tuple[str, ...] = ()
    takes: Callable[[Batch], bool] = lambda _: True
    again: str = ""


@dataclass(frozen=True, slots=True)
class Selection:
    """The options that choose batches; `all_batches` is `--all`."""

    filters: Filters
    state: str | None
    all_batches: bool

    def check(self, batch: int | None, *own_filters: str) -> bool:
        """Whether batches are chosen by filters, and not by naming one. `own_filters`: those that the command also has
        for one batch. Raises `click.UsageError`."""
        names = [name for name, value in self.filters.items() if value is not None and name not in own_filters]
        is_chosen = bool(names or self.state or self.all_batches)
        if batch is not None and is_chosen:
            raise click.UsageError("BATCH and filters exclude each other: name one batch, or choose batches by filters")
        is_filtered = is_chosen or any(self.filters.get(name) is not None for name in own_filters)
        if batch is None and not is_filtered:
            raise click.UsageError(
                "expected a BATCH, or filters that choose batches, such as --key-prefix; --all chooses all"
            )
        if self.all_batches and (self.state or any(value is not None for value in self.filters.values())):
            raise click.UsageError("--all and filters exclude each other: use one of them")
        return batch is None


def selection_options(command: F) -> F:
    """Adds the filters of `lastbit list` and `--all` to a command, and passes them as `selection`."""

    @state_option
    @filter_options
    @click.option("--all", "all_batches", is_flag=True, help="All batches, without a filter.")
    @wraps(command)
    def with_selection(*arguments: Any, filters: Filters, state: str | None, all_batches: bool, **options: Any) -> Any:
        return command(*arguments, selection=Selection(filters, state, all_batches), **options)

    return with_selection  # type: ignore[return-value]  # click replaces the signature


@dataclass(slots=True)
class _Choice:
    """The batches of a selection: their states by id, and the sums of their items."""

    states: dict[int, str] = field(default_factory=dict)
    pending: int = 0
    failed: int = 0
    more: bool = False

    def described(self) -> str:
        """`40 batches (1 open, 39 sealed)`."""
        by_state = Counter(self.states.values())
        parts = ", ".join(f"{count:,} {state}" for state, count in by_state.most_common())
        newest = "the newest " if self.more else ""
        return f"{newest}{number(len(self.states), 'batch', 'batches')} ({parts})"


@dataclass(slots=True)
class _Result:
    """How far a run got. `changed`: batches that were skipped, by what has become of them. `later`: batches that match
    now, and were not counted."""

    matched: int
    acted: int = 0
    changed: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    refusals: list[tuple[Batch, errors.ServiceError]] = field(default_factory=list)
    later: int = 0

    @property
    def finished(self) -> int:
        return self.acted + self.changed.total() + self.refused


def act(s: Session, selection: Selection, action: Action, *, yes: bool) -> None:
    """Count, ask, act, and say what was done. Ends the command with `faults.NOT_SUCCEEDED` if the service has refused
    it for a batch."""
    states = _states(selection, action)
    if not yes and (sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty()):
        raise click.UsageError("it would ask first, and this is not a terminal: add --yes")
    choice = _count(s, selection, states, action)
    if not choice.states:
        _show(s, action, _Result(0), is_whole=True)
        return
    if not yes:
        _confirm(action.question(choice), str(len(choice.states)))
    result = _Result(len(choice.states))
    try:
        _run(s, selection, states, action, choice, result)
    except (errors.LastbitError, KeyboardInterrupt) as error:
        document = _document(action, result, choice.more)
        faults.add_to_error(document)
        if s.output.as_json and isinstance(error, KeyboardInterrupt):
            s.output.document(document)
        elif not s.output.as_json:
            _show(s, action, result, is_whole=False)
            click.echo(_advice(action), err=True)
        raise
    _show(s, action, result, is_whole=True, has_more=choice.more)
    if result.refused:
        end(faults.NOT_SUCCEEDED)


def _advice(action: Action) -> str:
    return f"To go on, run the same command again{f' and add {action.again}' if action.again else ''}"


def _states(selection: Selection, action: Action) -> tuple[str | None, ...]:
    """The states in which batches are looked for. Raises `click.UsageError`."""
    if not action.states:
        return (selection.state,)
    if selection.state is not None:
        if selection.state not in action.states:
            *first_states, last = action.states
            names = f"{', '.join(first_states)} or {last}"
            raise click.UsageError(f"--state {selection.state}: only batches that are {names} can be {action.done}")
        return (selection.state,)
    # The service refuses a filter beside a state that it excludes.
    possible_states: tuple[str, ...] = action.states
    if selection.filters.get("outcome") in ("succeeded", "failed"):
        possible_states = ("complete",)
    elif selection.filters.get("unchanged_for") is not None:
        possible_states = LIVE
    return tuple(state for state in action.states if state in possible_states) or action.states


def _matching(
    s: Session, selection: Selection, states: tuple[str | None, ...], action: Action, page_size: int
) -> Iterator[Batch]:
    for state in states:
        for batch in s.client.batches(state=state, page_size=page_size, **selection.filters):
            if action.takes(batch):
                yield batch


def _count(s: Session, selection: Selection, states: tuple[str | None, ...], action: Action) -> _Choice:
    choice = _Choice()
    with s.output.counter("batches found") as count:
        for batch in _matching(s, selection, states, action, 1000):
            if batch.id in choice.states:  # it was sealed between two pages
                continue
            if len(choice.states) == MOST:
                choice.more = True
                break
            choice.states[batch.id] = sys.intern(batch.state)
            choice.pending += batch.pending
            choice.failed += batch.failed
            count(len(choice.states))
    return choice


def _confirm(question: str, word: str) -> None:
    """Raises `faults.Declined` unless the user types the word."""
    click.echo(plain_text(question, keep="\n"), err=True)
    try:
        answer = click.prompt(f"Type {word} to confirm", default="", show_default=False, err=True)
    except click.Abort as abort:
        if not isinstance(abort.__context__, EOFError):
            raise
        answer = ""
    if answer.strip().replace(",", "") != word:
        raise faults.Declined


def _run(
    s: Session,
    selection: Selection,
    states: tuple[str | None, ...],
    action: Action,
    choice: _Choice,
    result: _Result,
) -> None:
    waiting = dict(choice.states)
    busy_count = 0
    with s.output.counter(f"of {number(result.matched, 'batch', 'batches')} {action.done}") as count:
        for batch in _matching(s, selection, states, action, 100):
            state = waiting.pop(batch.id, None)
            if state is None:
                result.later += batch.id not in choice.states
                if choice.more and not waiting:
                    break
                continue
            try:
                action.send(s.client.batch(batch.id), state)
            except (errors.Unauthorized, errors.Forbidden):
                raise
            except errors.ServiceError as error:
                busy_count = busy_count + 1 if error.is_temporary else 0
                if busy_count == IN_A_ROW:
                    raise
                if error.code in _CHANGED:
                    result.changed[_CHANGED[error.code]] += 1
                else:
                    result.refused += 1
                    if len(result.refusals) < SHOWN:
                        result.refusals.append((batch, error))
            else:
                busy_count = 0
                result.acted += 1
                count(result.acted)
    if waiting:
        result.changed["no longer matching"] += len(waiting)


def _show(s: Session, action: Action, result: _Result, *, is_whole: bool, has_more: bool = False) -> None:
    if s.output.as_json:
        s.output.document(_document(action, result, has_more))
        return
    if not result.matched:
        s.output.say("no batch matches")
        return
    rest = "" if is_whole else f" of {result.matched:,}"
    s.output.say(
        f"[bold]{result.acted:,}{rest} {'batch' if result.acted == 1 and not rest else 'batches'}[/] {action.done}"
    )
    if result.changed:
        parts = ", ".join(f"{count:,} {cause}" for cause, count in result.changed.most_common())
        s.output.say(f"{result.changed.total():,} skipped, which changed meanwhile or don't need it: {parts}")
    if result.refused:
        s.output.say(f"[red]{result.refused:,} refused[/]{':' if result.refusals else ''}")
        for batch, error in result.refusals:
            s.output.say(f"  {title(batch.id, batch.key)}  {safe(error.detail)}")
        if result.refused > len(result.refusals):
            s.output.say(f"  [dim]and {result.refused - len(result.refusals):,} more[/]")
        if is_whole:
            s.output.say(f"[dim]{safe(_advice(action))}[/]")
    if is_whole and (result.later or has_more):
        remark = (
            "there are more batches that match"
            if has_more
            else f"{number(result.later, 'more batch', 'more batches')} matched later"
        )
        s.output.say(
            f"[dim]{remark}: run the command again for {'it' if result.later == 1 and not has_more else 'them'}[/]"
        )


def _document(action: Action, result: _Result, has_more: bool) -> dict[str, Any]:
    return {
        "action": action.verb,
        "matched": result.matched,
        "acted": result.acted,
        "skipped": dict(result.changed),
        "refused": result.refused,
        "refusals": [
            {"batch": batch.id, "key": batch.key, "code": error.code, "message": error.detail}
            for batch, error in result.refusals
        ],
        "later": result.later,
        "more": has_more,
        **({"again": action.again} if action.again else {}),
    }
