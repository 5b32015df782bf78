"""Consumer groups: workers share partitions, and commit positions under a fence."""

from __future__ import annotations

from datetime import timedelta

from core.consumer_groups import details, groups, leases, positions
from core.storage.database import Database
from lastbit.streams.snapshot import Snapshot


class ConsumerGroupService:
    """All methods but `put` and `page` raise `errors.ConsumerGroupNotFound`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(
        self, name: str, partitions: int, ttl: timedelta | None = None, release: timedelta | None = None
    ) -> tuple[groups.ConsumerGroup, bool]:
        """Returns the consumer group, and whether it is new. Raises `errors.PartitionsFixed`."""
        return self._database.write(groups.put, name, partitions, ttl, release, repeatable=True)

    def page(self, after: str | None, limit: int) -> list[groups.Summary]:
        """The consumer groups with a name above `after`, in the order of their names."""
        return self._database.snapshot(groups.page, after, limit)

    def get(self, name: str) -> details.Details:
        return self._database.snapshot(details.get, name)

    def delete(self, name: str) -> None:
        """Raises `errors.ConsumerGroupInUse`."""
        self._database.write(groups.delete, name)

    def sync(self, group: str, caller: leases.Caller) -> leases.Synced:
        """Raises `errors.SessionReplaced`, `InvalidRequest`."""
        return leases.synced(self._database, group, caller)

    def leave(self, group: str, worker: str, session: str | None = None) -> None:
        self._database.write(leases.leave, group, worker, session, repeatable=True)

    def commit(
        self, fence: positions.Fence, snapshot: Snapshot, *, token: str | None = None, head: int | None = None
    ) -> positions.Position:
        """Store a partition's position. Raises `errors.StaleEpoch`."""
        return self._database.write(
            lambda tx: positions.commit(tx, fence, snapshot, token=token, head=head), repeatable=True
        )
