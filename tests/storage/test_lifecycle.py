"""The rules of a batch's life, state by state."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from core import errors
from core.batches import lifecycle
from core.batches.lifecycle import State

NOW = datetime(2026, 1, 1, tzinfo=UTC)

REFUSED = [
    ("extend", State.SEALED, errors.BatchSealed),
    ("extend", State.COMPLETE, errors.BatchComplete),
    ("extend", State.EXPIRED, errors.BatchExpired),
    ("extend", State.CANCELLED, errors.BatchCancelled),
    ("seal", State.EXPIRED, errors.BatchExpired),
    ("seal", State.CANCELLED, errors.BatchCancelled),
    ("cancel", State.COMPLETE, errors.BatchComplete),
    ("cancel", State.EXPIRED, errors.BatchExpired),
]


@pytest.mark.parametrize("verb", ["extend", "seal", "cancel"])
@pytest.mark.parametrize("state", [state for state in State if state is not State.DELETING])
def test_each_verb_is_accepted_or_refused_in_each_state(verb: str, state: State) -> None:
    """It is accepted, or refused with the error that names the end."""
    refusals = {(v, s): kind for v, s, kind in REFUSED}
    if (verb, state) in refusals:
        with pytest.raises(refusals[verb, state]) as exception:
            lifecycle.judge(verb, 7, state)
        assert type(exception.value) is refusals[verb, state]
    else:
        lifecycle.judge(verb, 7, state)


def test_only_a_sealed_batch_completes() -> None:
    """Once every item is resolved."""
    assert lifecycle.completes(State.SEALED, 3, 3)
    assert lifecycle.completes(State.SEALED, 0, 0)
    assert not lifecycle.completes(State.SEALED, 3, 2)
    assert not lifecycle.completes(State.OPEN, 3, 3)


def test_a_batchs_own_expires_in_has_priority() -> None:
    """`expires_in` before the defaults, for open and sealed; an ended batch is never idle."""

    def idle(state: State, seconds: float, expires_in: int | None = None) -> bool:
        return lifecycle.is_idle(
            state,
            NOW - timedelta(seconds=seconds),
            expires_in,
            now=NOW,
            open_idle=timedelta(seconds=10),
            sealed_idle=timedelta(seconds=20),
        )

    assert [idle(State.OPEN, s) for s in (9, 10, 11)] == [False, True, True]
    assert [idle(State.SEALED, s) for s in (19, 20)] == [False, True]
    assert [idle(State.OPEN, s, 5) for s in (4, 5)] == [False, True]
    assert [idle(State.SEALED, s, 100) for s in (99, 100)] == [False, True]
    assert not any(idle(state, 1e6) for state in (State.COMPLETE, State.EXPIRED, State.CANCELLED))
