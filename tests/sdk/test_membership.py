"""The assignments of a consumer-group worker, step by step, with a test clock and without a service."""

from __future__ import annotations

import pytest

from lastbit import errors
from lastbit.groups import Granted, Synced
from lastbit.models import Fence
from lastbit.streams._membership import Call, Held, Lease, Membership, Sync
from lastbit.streams.errors import GroupReplaced
from tests.mutants import mutant

TTL = 9.0
RELEASE = 4.0


class Window:
    """A stand-in that records when it was closed."""

    floor = -1
    acks = 0

    def __init__(self) -> None:
        self.closed = False

    def snapshot(self) -> bytes:
        return b""

    def close(self) -> None:
        self.closed = True


class Worker:
    """A membership with a test clock and scripted answers of the service."""

    def __init__(self, partitions: int | None = None, *, follow: bool = False) -> None:
        self.now = 1000.0
        self.membership: Membership[Held] = Membership(
            self.make, lambda: self.now, lambda: 0.5, "g", partitions, follow
        )
        self.release = RELEASE

    def make(self, grant: Granted, lease: Lease) -> Held:
        return Held(Fence("g", grant.partition, "w", grant.epoch), None, Window(), lease)  # type: ignore[arg-type]

    def due(self) -> tuple[list[Sync], list[Call[Held]]]:
        steps = self.membership.due()
        return [step for step in steps if isinstance(step, Sync)], [step for step in steps if isinstance(step, Call)]

    def sync(self) -> Sync:
        """The sync that is due now, or the next one at its time."""
        syncs, calls = self.due()
        if not syncs:
            self.now = self.membership.deadline
            syncs, due_calls = self.due()
            calls += due_calls
        assert calls == []
        (sync,) = syncs
        return sync

    def answer(
        self, sync: Sync, *assigned: tuple[int, int], release: tuple[int, ...] = (), incarnation: str | None = "first"
    ) -> list[Call[Held]]:
        """The callbacks that are due after the answer `assigned` (partition, epoch)."""
        grants = tuple(Granted(partition, epoch, None, None, None, None) for partition, epoch in assigned)
        self.membership.done(sync, Synced(TTL, grants, release, self.release, incarnation and 4, incarnation))
        syncs, calls = self.due()
        self.early = syncs
        return calls

    def joined(self, *assigned: tuple[int, int]) -> list[Held]:
        calls = self.answer(self.sync(), *assigned)
        for call in calls:
            assert call.assigned
            self.membership.done(call, None)
        return [call.assignment for call in calls]


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_worker_syncs_three_times_a_lease(worker: Worker) -> None:
    """With some jitter, and never later than a third of a lease after the previous one was sent."""
    first = worker.sync()
    assert worker.answer(first) == []
    start = worker.now
    worker.sync()
    assert 0.8 * TTL / 3 <= worker.now - start <= TTL / 3


def test_an_assignment_has_one_callback(worker: Worker) -> None:
    """Repeated answers with the same assignment cause no second callback."""
    (assignment,) = worker.joined((3, 7))
    assert (assignment.partition, assignment.epoch, assignment.active, assignment.lost) == (3, 7, True, False)
    assert worker.answer(worker.sync(), (3, 7)) == []


def test_a_lease_counts_from_when_its_sync_was_sent(worker: Worker) -> None:
    """The service starts counting later, so the lease ends here first."""
    sync = worker.sync()
    sent_at = worker.now
    worker.now += 2
    (call,) = worker.answer(sync, (0, 1))
    assignment = call.assignment
    worker.membership.done(call, None)
    worker.now = sent_at + TTL - 0.001
    assert not assignment.lost
    worker.now = sent_at + TTL
    assert assignment.lost
    assert not assignment.active


def test_without_answers_all_partitions_are_lost_when_the_lease_ends(worker: Worker) -> None:
    """Windows are closed, and the callback runs once."""
    start = worker.now
    assignments = worker.joined((0, 1), (1, 1))
    while worker.now < start + TTL:
        syncs, calls = worker.due()
        assert calls == []
        for sync in syncs:
            worker.membership.done(sync, errors.ServiceUnreachable("", "", "", 1, 0.0))
        worker.now = worker.membership.deadline
    assert worker.now == start + TTL
    _, calls = worker.due()
    assert [(call.assigned, call.assignment) for call in calls] == [(False, assignment) for assignment in assignments]
    assert all(assignment.lost and assignment.window.closed for assignment in assignments)  # type: ignore[attr-defined]
    for call in calls:
        worker.membership.done(call, None)
    assert worker.membership.held == ()


def test_after_an_outage_unclaimed_partitions_are_assigned_again(worker: Worker) -> None:
    """With the same epoch, and after the earlier callbacks."""
    worker.joined((0, 1))
    worker.now += TTL
    syncs, (loss,) = worker.due()
    assert worker.answer(syncs[0], (0, 1)) == []
    worker.membership.done(loss, None)
    _, (reassignment,) = worker.due()
    assert reassignment.assigned
    assert reassignment.assignment is not loss.assignment
    assert reassignment.assignment.active


def test_an_answer_older_than_its_lease_is_ignored(worker: Worker) -> None:
    """The service may have reassigned every partition by then; another sync is due at once."""
    sync = worker.sync()
    worker.now += TTL
    assert worker.answer(sync, (0, 1)) == []
    assert worker.membership.held == ()
    assert len(worker.early) == 1


def test_a_requested_partition_is_drained_and_reported_at_once(worker: Worker) -> None:
    """Not only at the next heartbeat."""
    _, remaining = worker.joined((0, 1), (1, 1))
    (call,) = worker.answer(worker.sync(), (0, 1), (1, 1), release=(0,))
    leaving = call.assignment
    assert (call.assigned, leaving.partition, leaving.active, leaving.lost) == (False, 0, False, False)
    worker.membership.done(call, None)
    (sync,), calls = worker.due()
    assert calls == []
    assert sync.drained == ((0, 1),)
    assert leaving.window.closed  # type: ignore[attr-defined]
    assert worker.answer(sync, (1, 1)) == []
    assert worker.membership.held == (remaining,)
    assert worker.sync().drained == ()


def test_a_drain_beyond_its_deadline_is_lost(worker: Worker) -> None:
    """The service frees the partition then. `lost` becomes true during the callback, and no second callback follows."""
    worker.joined((0, 1))
    sync = worker.sync()
    (call,) = worker.answer(sync, (0, 1), release=(0,))
    worker.answer(worker.sync(), (0, 1), release=(0,))  # requested again: the deadline stays
    worker.now = sync.sent + RELEASE
    assert call.assignment.lost
    syncs, calls = worker.due()
    assert calls == []
    assert call.assignment.window.closed  # type: ignore[attr-defined]
    assert syncs == []
    worker.membership.done(call, None)
    assert worker.membership.held == ()
    (report,), _ = worker.due()
    assert report.drained == ((0, 1),), "the service may still be waiting"


@mutant(
    "a-drain-counts-from-the-response-that-arrived",
    "lastbit.streams._membership:Membership._answered",
    "asked_since + answer.release_within",
    "sync.sent + answer.release_within",
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_drain_whose_request_was_lost_has_the_time_that_the_service_gives(worker: Worker, is_late: bool) -> None:
    """It counts from the first sync without a response, which may have got the request."""
    worker.joined((0, 1))
    unanswered = worker.sync()
    worker.now += RELEASE if is_late else 1.0
    worker.membership.done(unanswered, errors.ServiceUnreachable("", "", "", 1, 0.0))
    (call,) = worker.answer(worker.sync(), (0, 1), release=(0,))
    if not is_late:
        assert not call.assignment.lost
        worker.now = unanswered.sent + RELEASE
    assert call.assignment.lost


@mutant(
    "a-sync-that-failed-is-not-handled-any-more",
    "lastbit.streams._membership:Membership._answered",
    "sync.sent if self._now() < self._late_until else math.inf",
    "math.inf",
)
def test_a_drain_counts_from_the_response_before_if_a_sync_has_failed(worker: Worker) -> None:
    """The service may handle the failed sync after that response, and its time begins then. A ttl after the failure
    that is over."""
    worker.joined((0, 1), (1, 1))
    worker.membership.done(worker.sync(), errors.ServiceUnreachable("", "", "", 1, 0.0))
    before = worker.sync()
    assert worker.answer(before, (0, 1), (1, 1)) == []
    worker.answer(worker.sync(), (0, 1), (1, 1), release=(0,))
    drained, other = worker.membership.held
    worker.now = before.sent + RELEASE - 0.001
    assert not drained.lost
    worker.now += 0.001
    assert drained.lost
    for _ in range(4):
        worker.due()
        last = worker.sync()
        worker.answer(last, (1, 1))
    worker.answer(last := worker.sync(), (1, 1), release=(1,))
    worker.now = last.sent + RELEASE - 0.001
    assert not other.lost


def test_a_late_report_frees_no_partition_that_was_assigned_again(worker: Worker) -> None:
    """A drain ends after the lease. Meanwhile the partition was assigned again under the same epoch."""
    worker.joined((0, 1))
    (drain,) = worker.answer(worker.sync(), (0, 1), release=(0,))
    worker.now += TTL
    (sync,), _ = worker.due()
    assert worker.answer(sync, (0, 1)) == []
    worker.membership.done(drain, None)
    _, (again,) = worker.due()
    assert (again.assigned, again.assignment.active) == (True, True)
    assert worker.sync().drained == ()


@pytest.mark.parametrize("share", [3, 1 / 8])
def test_a_changed_release_time_applies_from_the_next_answer(worker: Worker, share: float) -> None:
    """It applies to later releases; for earlier ones it only shortens the remaining time."""
    worker.joined((0, 1), (1, 1))
    first_sync = worker.sync()
    (call,) = worker.answer(first_sync, (0, 1), (1, 1), release=(0,))
    worker.release = share * RELEASE
    second_sync = worker.sync()
    assert worker.answer(second_sync, (0, 1), (1, 1), release=(0,)) == []
    worker.now = min(first_sync.sent + RELEASE, second_sync.sent + worker.release) - 0.001
    assert not call.assignment.lost
    worker.now += 0.001
    assert call.assignment.lost
    worker.membership.stop()
    assert worker.membership._stop_by == worker.now + worker.release


def test_another_epoch_is_lost_and_assigned(worker: Worker) -> None:
    """The loss comes before the new assignment, because another worker had the partition in between."""
    (before,) = worker.joined((0, 1))
    (loss,) = worker.answer(worker.sync(), (0, 3))
    assert (loss.assigned, loss.assignment, before.lost) == (False, before, True)
    assert worker.due()[1] == []
    worker.membership.done(loss, None)
    (after,) = worker.due()[1]
    assert (after.assigned, after.assignment.epoch, after.assignment.active) == (True, 3, True)


def test_a_partition_missing_from_an_answer_is_lost(worker: Worker) -> None:
    """An answer lists every held partition."""
    (assignment,) = worker.joined((0, 1))
    (call,) = worker.answer(worker.sync())
    assert (call.assigned, call.assignment, assignment.lost) == (False, assignment, True)


@mutant(
    "an-outdated-response-returns-a-refused-partition",
    "lastbit.streams._membership:Membership._take",
    "epoch <= refused_epoch and sent <= refused_at",
    "False",
)
def test_a_stale_epoch_is_not_accepted_from_an_earlier_sync(worker: Worker) -> None:
    """Its answer may still list the partition; the next one does not."""
    (assignment,) = worker.joined((0, 1))
    under_way = worker.sync()
    worker.membership.fence(assignment)
    assert assignment.lost
    (call,) = worker.answer(under_way, (0, 1))
    assert (call.assigned, call.assignment) == (False, assignment)
    worker.membership.done(call, None)
    assert worker.due()[1] == []
    assert [call.assigned for call in worker.answer(worker.sync(), (0, 2))] == [True]


@mutant(
    "a-refused-epoch-is-never-accepted-again",
    "lastbit.streams._membership:Membership._take",
    "epoch <= refused_epoch and sent <= refused_at",
    "epoch <= refused_epoch",
)
def test_a_partition_is_accepted_again_if_the_service_forgot_that_another_worker_had_it(worker: Worker) -> None:
    """As after a failover to a replica that lacks the last commits."""
    (before,) = worker.joined((0, 5))
    under_way = worker.sync()
    worker.membership.fence(before)
    (loss,) = worker.answer(under_way, (0, 5))
    worker.membership.done(loss, None)
    worker.now += 0.1
    (again,) = worker.answer(worker.sync(), (0, 5))
    assert (again.assigned, again.assignment.epoch, again.assignment.active) == (True, 5, True)
    assert (before.lost, before.active) == (True, False)


def test_many_commits_leave_out_what_is_lost(worker: Worker) -> None:
    """And a stale one among them loses its partition only."""
    lost, stale, good = worker.joined((0, 1), (1, 1), (2, 1))
    worker.membership.fence(lost)
    commits = worker.membership.committing([lost, stale, good])
    assert [commit.assignment for commit in commits] == [stale, good]
    worker.membership.committed(commits, [stale])
    assert worker.membership.held == (good,)
    assert not good.uncommitted


def test_a_lease_that_ends_while_commits_are_computed_leaves_out_the_rest(worker: Worker) -> None:
    """Snapshots of large windows take a while. The partitions are lost, but the worker goes on."""
    first, second = worker.joined((0, 1), (1, 1))

    def slow() -> bytes:
        worker.now += TTL
        return b"slow"

    first.window.snapshot = slow  # type: ignore[method-assign, assignment]
    assert [each.assignment for each in worker.membership.committing([first, second])] == [first]
    assert second.lost


def test_a_released_partition_is_not_accepted_again_from_an_older_answer(worker: Worker) -> None:
    """The answer was under way when the drain ended."""
    worker.joined((0, 1))
    (call,) = worker.answer(worker.sync(), (0, 1), release=(0,))
    under_way = worker.sync()
    worker.membership.done(call, None)
    assert worker.answer(under_way, (0, 1), release=(0,)) == []
    (report,) = worker.early
    assert report.drained == ((0, 1),)
    assert worker.answer(report) == []
    assert worker.membership.held == ()


def test_an_unanswered_sync_is_repeated(worker: Worker) -> None:
    """With the whole earlier content."""
    worker.joined((0, 1))
    (call,) = worker.answer(worker.sync(), (0, 1), release=(0,))
    worker.membership.done(call, None)
    sync = worker.sync()
    worker.membership.done(sync, errors.ServiceUnreachable("", "", "", 1, 0.0))
    assert worker.sync().drained == sync.drained == ((0, 1),)


def test_a_partition_requested_back_before_its_callback_needs_none(worker: Worker) -> None:
    """A partition that was assigned and requested back before any work on it is drained as it is."""
    (loss,) = worker.answer(worker.sync(), (0, 1))
    worker.answer(worker.sync(), (0, 2))  # while the callback of epoch 1 runs
    worker.answer(worker.sync(), (0, 2), release=(0,))
    assert worker.early[0].drained == ((0, 2),)
    worker.membership.done(loss, None)
    _, calls = worker.due()
    assert [(call.assigned, call.assignment.epoch) for call in calls] == [(False, 1)]


def test_stopping_releases_all_partitions_and_accepts_no_more(worker: Worker) -> None:
    """The service is notified at once, and of each partition once it is drained; the last one ends it."""
    worker.joined((0, 1), (1, 1))
    worker.membership.stop()
    (asking,), calls = worker.due()
    assert [call.assigned for call in calls] == [False, False]
    assert worker.answer(asking, (0, 1), (1, 1), (2, 1), release=(0, 1)) == []
    worker.membership.done(calls[0], None)
    (report,), _ = worker.due()
    assert report.drained == ((0, 1),)
    assert worker.answer(report, (1, 1), (2, 1), release=(1,)) == []
    assert not worker.membership.over
    worker.membership.done(calls[1], None)
    assert worker.membership.over
    assert worker.due() == ([], [])
    assert not worker.membership.gone


@mutant(
    "a-worker-that-keeps-its-partitions-requests-others",
    "lastbit.streams._membership:Membership.stop",
    "sum(assignment.active for assignment in self.held)",
    "9999",
)
@mutant(
    "a-worker-that-failed-keeps-its-partitions",
    "lastbit.streams._membership:Membership.last_sync",
    "self.error is None",
    "True",
)
@pytest.mark.parametrize("fails", [False, True])
def test_stopping_can_keep_the_partitions_that_were_not_asked_back(worker: Worker, fails: bool) -> None:
    """All are drained, and the lease is renewed once more; the service decides which of them are free. After a failure
    the worker leaves."""
    worker.joined((0, 1), (1, 1), (2, 1))
    (asked_back,) = worker.answer(worker.sync(), (0, 1), (1, 1), (2, 1), release=(2,))
    worker.membership.stop(leave=False)
    (sync,), calls = worker.due()
    assert (sync.limit, sync.drained) == (2, ())
    assert [call.assignment.partition for call in calls] == [0, 1]
    assert worker.answer(sync, (0, 1), (1, 1), (2, 1), release=(2,)) == []
    for call in (asked_back, *calls):
        worker.membership.done(call, ValueError("no") if fails and call is asked_back else None)
    assert worker.membership.over
    renewal = worker.membership.last_sync()
    assert (renewal is None) == fails
    if renewal is not None:
        assert (renewal.limit, renewal.drained) == (2, ((0, 1), (1, 1), (2, 1)))
    worker.membership.stop()
    assert worker.membership.last_sync() == renewal


def test_stopping_does_not_wait_for_a_drain_that_never_ends(worker: Worker) -> None:
    """It waits for the release time plus a short margin."""
    worker.joined((0, 1))
    worker.membership.stop()
    _, (call,) = worker.due()
    worker.now += RELEASE
    worker.due()
    assert call.assignment.lost
    assert not worker.membership.over
    worker.now = worker.membership.deadline
    assert worker.membership.over


def test_a_callback_that_raises_ends_the_membership(worker: Worker) -> None:
    """The other partitions are released; the failing one is neither reported as drained nor called again."""
    first, second = worker.answer(worker.sync(), (0, 1), (1, 1))
    worker.membership.done(second, None)
    worker.membership.done(first, ValueError("no"))
    (sync,), (call,) = worker.due()
    assert (call.assigned, call.assignment) == (False, second.assignment)
    assert worker.answer(sync, (0, 1), (1, 1), release=(0, 1)) == []
    worker.membership.done(call, None)
    assert worker.membership.over
    assert first.assignment.window.closed  # type: ignore[attr-defined]
    assert isinstance(worker.membership.error, ValueError)


def test_a_refusal_ends_the_membership(worker: Worker) -> None:
    """Every assignment is lost because the service doesn't know the worker; no leave request is sent."""
    worker.joined((0, 1))
    sync = worker.sync()
    worker.membership.done(sync, errors.ConsumerGroupNotFound(404, "consumer_group_not_found", "no"))
    _, (call,) = worker.due()
    assert call.assignment.lost
    worker.membership.done(call, None)
    assert worker.membership.over
    assert worker.membership.gone
    assert isinstance(worker.membership.error, errors.ConsumerGroupNotFound)


def test_another_group_of_the_same_name_ends_the_membership(worker: Worker) -> None:
    """No partition of it is taken, and no other sync is sent; a response of an earlier release shows no group."""
    worker.joined((0, 1), (1, 1))
    assert worker.answer(worker.sync(), (0, 1), (1, 1), incarnation=None) == []
    calls = worker.answer(worker.sync(), (0, 1), (1, 3), (2, 3), incarnation="second")
    assert [(call.assigned, call.assignment.lost) for call in calls] == [(False, True)] * 2
    for call in calls:
        worker.membership.done(call, None)
    assert worker.membership.over
    assert not worker.membership.gone
    assert worker.early == []
    assert isinstance(worker.membership.error, GroupReplaced)


@mutant(
    "a-worker-keeps-what-it-had-of-another-group",
    "lastbit.streams._membership:Membership._identified",
    "self._lose_all()",
    "pass",
)
def test_a_worker_that_follows_a_name_loses_what_it_had_of_the_earlier_group() -> None:
    """Even at the same epochs, which are used again if a failover has lost the group that had them."""
    worker = Worker(follow=True)
    (earlier,) = worker.joined((0, 1))
    (loss,) = worker.answer(worker.sync(), (0, 1), incarnation="second")
    assert (loss.assigned, loss.assignment, earlier.lost) == (False, earlier, True)
    worker.membership.done(loss, None)
    (call,) = worker.due()[1]
    assert (call.assigned, call.assignment.active) == (True, True)
    worker.membership.done(call, None)
    assert worker.answer(worker.sync(), (0, 1), incarnation="second") == []


def test_a_group_with_another_number_of_partitions_is_not_joined() -> None:
    """If the worker has named one."""
    worker = Worker(partitions=3)
    assert worker.answer(worker.sync(), (0, 1)) == []
    assert worker.membership.over
    assert isinstance(worker.membership.error, errors.PartitionsFixed)
    worker = Worker(partitions=4)
    assert len(worker.joined((0, 1))) == 1


def test_after_a_refusal_no_drain_is_reported(worker: Worker) -> None:
    """The service doesn't know the worker, even if another partition keeps it from ending."""
    worker.joined((0, 1), (1, 1))
    (drain,) = worker.answer(worker.sync(), (0, 1), (1, 1), release=(0,))
    worker.membership.done(worker.sync(), errors.ConsumerGroupNotFound(404, "consumer_group_not_found", "no"))
    syncs, _ = worker.due()
    worker.membership.done(drain, None)
    assert not worker.membership.over
    assert syncs == worker.due()[0] == []


@pytest.mark.parametrize(
    "error",
    [
        errors.ServiceUnreachable("", "", "", 1, 0.0),
        errors.Unavailable(503, "unavailable", ""),
        errors.RateLimited(429, "rate_limited", ""),
        errors.ServiceError(500, "internal", ""),
        errors.UnexpectedAnswer("", "", 200, ""),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_temporary_error_is_retried_soon(worker: Worker, error: errors.LastbitError) -> None:
    """After pauses that leave time for several tries within a lease."""
    worker.joined((0, 1))
    start = worker.now
    for _ in range(5):
        worker.membership.done(worker.sync(), error)
    worker.sync()
    assert worker.now - start < TTL
    assert worker.membership.error is None
