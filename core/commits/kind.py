"""What the operations of one kind do in a transaction that several kinds share (see `core.writes`)."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from core import errors
from core.commits.operation import Done, Operation
from core.storage.statements import Pipeline


class Kind(abc.ABC):
    """The operations of one kind in one transaction: at least one. `core.writes` makes it and calls its methods in the
    order in which they stand here, each for all kinds before the next one."""

    handles: ClassVar[tuple[type[Operation], ...]]
    """The classes of its operations."""
    locks: ClassVar[tuple[str, ...]]
    """The tables in which it locks rows after the fences, in their order (see `lock_order`)."""

    def __init__(self, pipeline: Pipeline, operations: Sequence[Any]) -> None:
        self.pipeline = pipeline
        self.operations = operations
        self.outcomes: dict[Operation, Done] = {}
        """Has all of them after `finish`. A refused operation changes nothing."""

    def fences(self) -> Sequence[Any]:
        """The `positions.Fence`s that its operations depend on. They are locked first."""
        return ()

    def prepare(self) -> None:  # noqa: B027  # most kinds read when they judge
        """Let the next round trip lock and read what it needs."""

    @abc.abstractmethod
    def judge(self, refused: Mapping[Any, errors.CoreError]) -> None:
        """Judge the operations in their order, and let the next round trip write what they change. `refused` has the
        fences that don't hold."""

    def has_events(self) -> bool:
        """Whether `finish` will return any."""
        return False

    def batches(self) -> Collection[int]:
        """Existing batches, under the locks of their rows, that the events may belong to."""
        return ()

    def look(self) -> None:  # noqa: B027  # most kinds need nothing of the feed
        """If there are events: let the round trip that locks the feed's head read what it needs under that lock."""

    def finish(self, position: int) -> Sequence[Any]:
        """Complete the outcomes, and return the `feed.NewEvent`s of the service, whose positions follow this one. With
        events, the feed's head is locked: this locks nothing more."""
        return ()

    def refuse(self, refused: Mapping[Any, errors.CoreError]) -> None:
        """Refuse the operations whose `fence` doesn't hold."""
        for operation in self.operations:
            if operation.fence in refused:
                self.outcomes[operation] = Done(error=refused[operation.fence])

    def remaining(self) -> list[Any]:
        """The operations that are not refused."""
        return [operation for operation in self.operations if operation not in self.outcomes]
