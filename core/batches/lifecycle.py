"""The life cycle of a batch as pure functions: its states, the verbs that each state accepts, and the conditions for
being complete, idle or overdue. They use no clock and no database; the time is an argument.

    open ──seal──▶ sealed ──last item resolved──▶ complete
      │ ╲             │
      │  ╲──seal of a batch without pending items──▶ complete
      ├──cancel──▶ cancelled ◀──cancel──┤
      └──idle, or its deadline passed──▶ expired ◀──┘        deleting: being removed; unknown to callers

    cancelled, expired ──reopen──▶ open or sealed, as before
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from core import errors


class State(StrEnum):
    OPEN = "open"
    SEALED = "sealed"
    COMPLETE = "complete"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DELETING = "deleting"


class Cause(StrEnum):
    """Why a batch expired."""

    IDLE = "idle"
    DEADLINE = "deadline"


class Verb(StrEnum):
    """How an item is resolved."""

    ACK = "ack"
    FAIL = "fail"
    SKIP = "skip"


class Duty(StrEnum):
    """What a batch still has to do for its children (see `descendants`)."""

    END = "end"
    """It has ended, and its live descendants must end as well."""
    REVIVE = "revive"
    """It is live again. So must be the descendants that its end had ended; other children that have ended must resolve
    their items."""


LIVE: Final = frozenset({State.OPEN, State.SEALED})
TERMINAL: Final = frozenset({State.COMPLETE, State.EXPIRED, State.CANCELLED})
TAKES_ACKS: Final = LIVE | {State.COMPLETE}
"""States that accept acks. In a complete batch, an ack or a skip can override a failure, and the response to a repeat
reports the completion."""

_ENDED: Final[dict[State, type[errors.BatchEnded]]] = {
    State.SEALED: errors.BatchSealed,
    State.COMPLETE: errors.BatchComplete,
    State.EXPIRED: errors.BatchExpired,
    State.CANCELLED: errors.BatchCancelled,
}
_TAKES: Final[dict[str, frozenset[State]]] = {
    "extend": frozenset({State.OPEN}),
    "extend on behalf of an item": LIVE,
    "seal": frozenset({State.OPEN, State.SEALED, State.COMPLETE}),
    "nesting": frozenset({State.OPEN, State.SEALED}),
    "cancel": frozenset({State.OPEN, State.SEALED, State.CANCELLED}),
    "redrive": frozenset({State.OPEN, State.SEALED, State.COMPLETE}),
    "update": LIVE,
    "reopen": frozenset({State.EXPIRED, State.CANCELLED}),
}


def judge(verb: str, batch: int, state: State) -> None:
    """Raise the `errors.BatchEnded`, or `BatchLive`, that explains why the state refuses `verb`: extend, extend on
    behalf of an item, seal, cancel, redrive, update, nesting, reopen."""
    if state in _TAKES[verb]:
        return
    if verb == "reopen" and state in LIVE:
        raise errors.BatchLive(batch, state)
    raise _ENDED[state](batch, verb)


def completes(state: State, items: int, resolved: int) -> bool:
    """A sealed batch is complete as soon as every issued item is resolved."""
    return state is State.SEALED and resolved == items


def is_idle(
    state: State,
    updated_at: datetime,
    expires_in: int | None,
    *,
    now: datetime,
    open_idle: timedelta,
    sealed_idle: timedelta,
) -> bool:
    """Whether a live batch has been idle for too long. `expires_in` (seconds) is the batch's own limit and has
    precedence. `updated_at` is the time of the open, or of the last extend, seal, update, redrive, ack or fail with an
    effect."""
    if state not in LIVE:
        return False
    if expires_in is not None:
        limit = timedelta(seconds=expires_in)
    else:
        limit = open_idle if state is State.OPEN else sealed_idle
    return now - updated_at >= limit


def is_overdue(state: State, deadline: datetime | None, *, now: datetime) -> bool:
    """Whether a live batch has reached its deadline."""
    return state in LIVE and deadline is not None and now >= deadline
