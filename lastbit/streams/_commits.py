"""The calls that commit a worker's progress: one partition's, or that of many partitions at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from lastbit import errors, groups
from lastbit._protocol import Flow, Service
from lastbit.groups import Commit, Committed
from lastbit.streams._membership import A, Membership, WindowCommit

STALE: Final = "stale_epoch"
MOST: Final = 1000
"""Maximum partitions in one call."""
BYTES: Final = 4 * 2**20
"""Approximate maximum bytes of one call: half of what the service accepts."""


def commit(
    service: Service, membership: Membership[A], assignment: A, snapshot: bytes, token: str | None, head: int | None
) -> Flow[Committed]:
    return groups.commit(for_a_lease(service, membership.ttl), assignment.fence, snapshot, token, head)


def commit_many(
    service: Service, membership: Membership[A], commits: Sequence[WindowCommit[A]], head: int | None
) -> Flow[list[A]]:
    """The flow's value: the assignments whose epoch is stale, which don't affect the others. Raises the error of a
    window that was refused for another reason."""
    stale: list[A] = []
    alone: Sequence[WindowCommit[A]] = commits
    if len(commits) > 1:
        alone = []
        for part in _parts(commits):
            fence = part[0].assignment.fence
            windows = [
                Commit(each.assignment.partition, each.assignment.epoch, each.snapshot, None, head) for each in part
            ]
            limited = for_a_lease(service, membership.ttl)
            results = yield from groups.commit_many(limited, fence.group, fence.worker, windows)
            codes = [(each, result.code) for each, result in zip(part, results, strict=True) if result.code is not None]
            stale += [each.assignment for each, code in codes if code == STALE]
            # A result has no more than the code of a refusal. The window alone is refused with the whole error.
            alone += [each for each, code in codes if code != STALE]
    for each in alone:
        try:
            yield from commit(service, membership, each.assignment, each.snapshot, None, head)
        except errors.StaleEpoch:
            stale.append(each.assignment)
    return stale


def for_a_lease(service: Service, ttl: float) -> Service:
    """The service, with retries only during one lease: after that, the partition is lost anyway."""
    return replace(service, retry=replace(service.retry, deadline=min(service.retry.deadline, ttl)))


def _parts(commits: Sequence[WindowCommit[A]]) -> Iterator[list[WindowCommit[A]]]:
    part: list[WindowCommit[A]] = []
    size = 0
    for each in commits:
        length = len(each.snapshot) * 4 // 3
        if part and (len(part) == MOST or size + length > BYTES):
            yield part
            part, size = [], 0
        part.append(each)
        size += length
    if part:
        yield part
