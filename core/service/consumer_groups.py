"""Consumer groups: workers share partitions, and commit positions under a fence."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from core.commits.operation import new_number, shared_number
from core.consumer_groups import details, groups, leases, positions
from core.errors import CoreError
from core.service.writes import WriteService
from core.storage.database import Database
from lastbit.streams.snapshot import Snapshot

OFFSET_BYTES: Final = 40
"""Approximate bytes of an outstanding offset that waits."""
COMMIT_COST: Final = 4
"""The cost of a commit without outstanding offsets, in the unit of `lanes.FLUSH_COST`."""
OFFSETS_OF_COST: Final = 50
"""The number of outstanding offsets that add one to the cost."""


class ConsumerGroupService:
    """All methods but `put` and `page` raise `errors.ConsumerGroupNotFound`."""

    def __init__(self, database: Database, write_service: WriteService) -> None:
        self._database = database
        self._writes = write_service

    def put(
        self, name: str, partitions: int, ttl: timedelta | None = None, release: timedelta | None = None
    ) -> tuple[groups.ConsumerGroup, bool]:
        """Returns the consumer group, and whether it is new. Raises `errors.PartitionsFixed`."""
        return self._database.write(groups.put, name, partitions, ttl, release)

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
        self._database.write(leases.leave, group, worker, session)

    def commit(
        self, fence: positions.Fence, snapshot: Snapshot, *, token: str | None = None, head: int | None = None
    ) -> positions.Committed:
        """Store a partition's position. Raises `errors.StaleEpoch`, `InvalidRequest`."""
        return committed(self._writes.run(commits_of([positions.Commit(fence, snapshot, token, head)])))


def commits_of(commits: Sequence[positions.Commit]) -> positions.CommitPositions:
    """The operation for `WriteService`; all commits are for one consumer group. Calls of one group are in one queue, as
    those of a tally are."""
    outstanding = sum([len(commit.snapshot.outstanding) for commit in commits])
    return positions.CommitPositions(
        batch=shared_number("group", commits[0].fence.group) if commits else new_number(),
        size=OFFSET_BYTES * outstanding,
        cost=COMMIT_COST * len(commits) + outstanding // OFFSETS_OF_COST,
        commits=commits,
    )


def committed(results: Sequence[positions.Committed | CoreError]) -> positions.Committed:
    """The result of a single commit. Raises its error."""
    (result,) = results
    if isinstance(result, CoreError):
        raise result
    return result
