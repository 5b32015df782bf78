"""The judgement of a batch's end, as a pure function: what a change makes of the batch, which events tell of it, and
what the batch then owes the item that it stands for. The change may be acks, failures and skips, a seal, an open, a new
tolerance, other counts after a repair, a cancellation, an expiry, or a reopen.

    a sealed batch without pending items                          → complete
    failures beyond the tolerance                                 → exceeded, and that stays
    a live batch with such failures that is to be cancelled then  → cancelled
    a complete batch in which a repair finds pending items        → sealed again, and judged like the others
    a batch that ended early and is reopened                      → open or sealed again, and judged like the others
"""

from __future__ import annotations

from typing import Any, NamedTuple

from core.batches.lifecycle import LIVE, TAKES_ACKS, Duty, State, Verb, completes
from core.batches.tolerance import OnExceeded, Tolerance


def owed(*, succeeded: bool) -> Verb:
    """The verb that a batch that has ended owes its parent."""
    return Verb.ACK if succeeded else Verb.FAIL


class Standing(NamedTuple):
    """What decides about the end of a batch."""

    state: State
    items: int
    acked: int
    failed: int
    skipped: int
    tolerance: Tolerance
    on_exceeded: OnExceeded
    exceeded: bool
    """Its failures are beyond its tolerance, or have been."""

    @property
    def resolved(self) -> int:
        return self.acked + self.failed + self.skipped

    @property
    def complete(self) -> bool:
        return self.state is State.COMPLETE

    @property
    def succeeded(self) -> bool:
        return self.complete and self.tolerance.succeeds(self.items, self.failed)


class Transition(NamedTuple):
    """A batch before a change, and after it."""

    before: Standing
    after: Standing

    @property
    def is_quiet(self) -> bool:
        """Only counts have changed, and the batch is not complete: nothing else is to be done."""
        before, after = self.before, self.after
        return after.state is before.state and after.exceeded is before.exceeded and not after.complete

    @property
    def completed(self) -> bool:
        return self.after.complete and not self.before.complete

    @property
    def succeeded(self) -> bool:
        return self.after.succeeded and not self.before.succeeded

    @property
    def reopened(self) -> bool:
        return self.before.state not in LIVE and self.after.state in LIVE

    @property
    def ended_early(self) -> bool:
        """It was cancelled, or has expired."""
        return self.after.state is not self.before.state and self.after.state not in TAKES_ACKS

    def events(self) -> list[str]:
        """The names of the events, in their order."""
        happenings = {
            "failures_exceeded": self.after.exceeded and not self.before.exceeded,
            str(self.after.state): self.ended_early,
            "completed": self.completed,
            "succeeded": self.succeeded,
        }
        return [name for name, has_happened in happenings.items() if has_happened]

    def debt(self) -> Verb | None:
        """What the batch owes from now on, if it stands for an item of another one. None: what it owed before."""
        if self.ended_early:
            return owed(succeeded=False)
        if self.completed or (self.after.complete and self.after.succeeded is not self.before.succeeded):
            return owed(succeeded=self.after.succeeded)
        return None

    def columns(self, now: Any, *, is_nested: bool, has_children: bool) -> dict[str, Any]:
        """The changed columns of its row, without those that name the request: `completed_by` and `succeeded_by` are
        only removed here."""
        columns: dict[str, Any] = {}
        if self.reopened:
            columns |= dict.fromkeys(("ended_at", "completed_by", "succeeded_by", "parent_due"))
        if self.before.succeeded and not self.after.succeeded:
            columns["succeeded_by"] = None
        if self.after.state is not self.before.state:
            columns["state"] = self.after.state
        if self.completed or self.ended_early:
            columns["ended_at"] = now
        if self.after.exceeded is not self.before.exceeded:
            columns["exceeded"] = self.after.exceeded
        if self.ended_early and has_children:
            columns |= {"children_due": Duty.END, "children_told": 0}
        debt = self.debt() if is_nested else None
        if debt is not None:
            columns["parent_due"] = debt
        return columns


def settle(before: Standing, change: Standing) -> Transition:
    """Judge the batch `before`, in which a `change` has been made."""
    state = change.state
    if completes(state, change.items, change.resolved):
        state = State.COMPLETE
    is_passed = change.tolerance.is_passed(change.items, change.failed, sealed=state is not State.OPEN)
    if is_passed and state in LIVE and change.on_exceeded is OnExceeded.CANCEL:
        state = State.CANCELLED
    is_exceeded = change.exceeded or (is_passed and change.state in TAKES_ACKS)
    if state is not change.state or is_exceeded is not change.exceeded:
        change = change._replace(state=state, exceeded=is_exceeded)
    return Transition(before, change)
