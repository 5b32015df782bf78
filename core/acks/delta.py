"""What a transaction changes of the counts of one batch."""

from __future__ import annotations

from dataclasses import dataclass

from core.acks.call import Unit


@dataclass(slots=True)
class BatchDelta:
    """The changes of a flush to one batch."""

    acked: int = 0
    failed: int = 0
    skipped: int = 0
    filled: int = 0
    """Groups that are full after a change."""
    overrides: bool = False
    """Some of the changed items had failed or were skipped."""
    is_moved: bool = False
    """The changes were committed earlier (see `core.enlisted`), so they count in any state, and no unit made them."""
    last_resolver: Unit | None = None
    """The last unit that resolved a pending item. If the batch completes, this unit completed it."""
    last_changer: Unit | None = None
    journal_next: int | None = None
    """The new `journal_next` of a journaled batch."""

    @property
    def resolved(self) -> int:
        """The number of items that were pending."""
        return self.acked + self.failed + self.skipped

    def add(self, counts: BatchDelta) -> None:
        """Add the counts of another one."""
        self.acked += counts.acked
        self.failed += counts.failed
        self.skipped += counts.skipped
        self.filled += counts.filled
