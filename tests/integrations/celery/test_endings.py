"""Each way in which a task can end resolves its item in the documented way, or leaves it to a redelivery.

The tests of one broker and pool share a worker. At its end, the broker has no message left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from celery import VERSION, chain, chord
from celery.canvas import Signature

from lastbit import BatchHandle
from tests.integrations.celery.workers import PATIENCE, Place, outcomes

ACKED = None


@dataclass(frozen=True)
class Case:
    """`build` makes the signature of the items' ids; `expected` has a pattern of the reason for each item that fails.
    `runs`: of the first item's task."""

    build: Callable[[Place, Sequence[str]], Signature]
    expected: Sequence[str | None]
    runs: int = 1
    needs_processes: bool = False


def one(name: str, **options: Any) -> Callable[[Place, Sequence[str]], Signature]:
    """A single task."""
    return lambda place, ids: place.task(name, task_id=ids[0], **options)


def chained(*names: str, tracked: Sequence[int]) -> Callable[[Place, Sequence[str]], Signature]:
    """A chain, of which the tasks at these positions are items."""

    def build(place: Place, ids: Sequence[str]) -> Signature:
        tasks = [place.task(name) for name in names]
        for item, position in zip(ids, tracked, strict=True):
            tasks[position].set(task_id=item)
        return chain(*tasks, app=place.app)

    return build


def chorded(*header: str, tracked_header: bool) -> Callable[[Place, Sequence[str]], Signature]:
    """A chord with a body that is the last item; the tasks of its header are the others, or no items."""

    def build(place: Place, ids: Sequence[str]) -> Signature:
        tasks = [place.task(name) for name in header]
        if tracked_header:
            for item, task in zip(ids, tasks, strict=False):
                task.set(task_id=item)
        return chord(tasks, place.task("total", task_id=ids[-1]), app=place.app)

    return build


NOT_RUN = "^not run, as an earlier task did not succeed: "
NOT_RUN_EITHER = "^not run, as an earlier task was skipped: not in the catalog any more$"
TIME_LIMIT = "^hard time limit of 1 s exceeded$"
REDELIVERS_AFTER_TIME_LIMIT = VERSION >= (5, 5)
"""Earlier versions of Celery reject such a message."""

CASES = {
    "success": Case(one("succeed"), [ACKED]),
    "retry, then success": Case(one("retry_once"), [ACKED], runs=2),
    "retries exhausted": Case(
        one("retry_always"), [r"^ValueError: still no such product \(after 2 retries\)$"], runs=3
    ),
    "exception": Case(one("fail"), ["^ValueError: no such product$"]),
    "an exception that can't be pickled": Case(one("fail_strangely"), [r"Strange.*a file named \?!+$"]),
    "Ignore": Case(one("ignore"), [ACKED]),
    "Skipped": Case(one("skip"), ["^not in the catalog any more$"]),
    "Reject": Case(one("reject"), ["^Reject: .*unreadable"]),
    "Reject with requeue": Case(one("requeue_once"), [ACKED], runs=2),
    "rejected after a failure": Case(one("dead_letter"), ["^ValueError: for the dead letters$"]),
    "expired": Case(one("succeed", expires="2026-01-01T00:00:00Z"), ["^expired$"], runs=0),
    "countdown": Case(one("succeed", countdown=0.1), [ACKED]),
    "a base and a Request of its own": Case(one("own_base"), [ACKED]),
    "not registered": Case(one("nowhere"), [r"^no task for it: .*'nowhere'"], runs=0),
    "unreadable": Case(one("succeed", serializer="pickle"), ["^no task for it: ContentDisallowed"], runs=0),
    "SystemExit": Case(one("leave"), ["^(SystemExit: enough|WorkerLostError: .*SystemExit)"]),
    "child killed": Case(one("die"), ["^WorkerLostError: Worker exited prematurely: signal 9"], needs_processes=True),
    "child killed, with reject_on_worker_lost": Case(one("die_once"), [ACKED], runs=2, needs_processes=True),
    "child killed after its success was stored": Case(one("die_after_success"), [ACKED], needs_processes=True),
    "child left after its success was stored": Case(one("leave_after_success"), [ACKED], needs_processes=True),
    "hard time limit": Case(one("hang", time_limit=1), [TIME_LIMIT], needs_processes=True),
    "hard time limit, then redelivered": Case(
        one("hang_once", time_limit=1),
        [ACKED] if REDELIVERS_AFTER_TIME_LIMIT else [TIME_LIMIT],
        runs=2 if REDELIVERS_AFTER_TIME_LIMIT else 1,
        needs_processes=True,
    ),
    "replaced": Case(lambda place, ids: place.task("replace", "succeed", task_id=ids[0]), [ACKED], runs=2),
    "replaced by a failure": Case(
        lambda place, ids: place.task("replace", "fail", task_id=ids[0]), ["^ValueError: no such product$"], runs=2
    ),
    "replaced by a chain": Case(
        lambda place, ids: place.task("replace", "succeed", "retry_once", task_id=ids[0]), [ACKED], runs=2
    ),
    "replaced by a chain that fails": Case(
        lambda place, ids: place.task("replace", "fail", "succeed", task_id=ids[0]), [NOT_RUN + "ValueError"]
    ),
    "a task that publishes another": Case(one("spawn"), [ACKED]),
    "apply() inside of a task": Case(
        lambda place, ids: place.task("apply_inside", ids[1], task_id=ids[0]), [ACKED, ACKED]
    ),
    "each task of a chain": Case(chained("succeed", "retry_once", "succeed", tracked=[0, 1, 2]), [ACKED] * 3),
    "the last task of a chain": Case(chained("retry_once", "succeed", tracked=[1]), [ACKED]),
    "a chain that fails in an item": Case(
        chained("succeed", "fail", "succeed", "succeed", tracked=[0, 1, 2, 3]),
        [ACKED, "^ValueError", NOT_RUN + "ValueError: no such product", NOT_RUN + "ValueError"],
    ),
    "a chain that fails before its item": Case(
        chained("fail", "succeed", tracked=[1]), [NOT_RUN + "ValueError"], runs=0
    ),
    "a chain whose first task is ignored": Case(chained("ignore", "succeed", tracked=[1]), [ACKED], runs=0),
    "a chain whose first task skips itself": Case(
        chained("skip", "succeed", tracked=[0, 1]), ["^not in the catalog any more$", NOT_RUN_EITHER]
    ),
    "a chain whose first task dies": Case(
        chained("die", "succeed", tracked=[1]), [NOT_RUN + "WorkerLostError"], runs=0, needs_processes=True
    ),
    "chord": Case(chorded("succeed", "retry_once", tracked_header=True), [ACKED] * 3),
    "the body of a chord": Case(chorded("succeed", "succeed", tracked_header=False), [ACKED]),
    "a chord with a failure in its header": Case(
        chorded("succeed", "fail", tracked_header=True), [ACKED, "^ValueError", NOT_RUN + "ValueError"]
    ),
    "a chord with a failure in its untracked header": Case(
        chorded("succeed", "fail", tracked_header=False), [NOT_RUN + "ValueError"], runs=0
    ),
}
if VERSION >= (5, 7):
    CASES |= {
        "child killed, with retry_on_worker_lost": Case(one("die_and_retry"), [ACKED], runs=2, needs_processes=True),
        "child killed, with retry_on_worker_lost and acks_late": Case(
            one("die_and_retry_late"), [ACKED], runs=2, needs_processes=True
        ),
        "child always killed, with retry_on_worker_lost": Case(
            one("die_always"), ["^WorkerLostError: Worker exited prematurely"], runs=2, needs_processes=True
        ),
    }


class Setup(NamedTuple):
    broker: str
    pool: str
    acks_late: bool

    @property
    def has_processes(self) -> bool:
        return self.pool == "prefork"

    def __str__(self) -> str:
        return f"{self.broker}-{self.pool}-{'late' if self.acks_late else 'early'}"


QUICK = Setup("redis", "prefork", acks_late=True)
SLOW = Setup("rabbitmq", "prefork", acks_late=True)
NIGHTLY = [
    Setup("redis", "prefork", acks_late=False),
    Setup("redis", "threads", acks_late=True),
    Setup("redis", "threads", acks_late=False),
    Setup("redis", "solo", acks_late=False),
    Setup("rabbitmq", "prefork", acks_late=False),
    Setup("rabbitmq", "threads", acks_late=True),
    Setup("rabbitmq", "solo", acks_late=True),
    Setup("redis", "gevent", acks_late=True),
    Setup("sqs", "prefork", acks_late=True),
    Setup("sqs", "threads", acks_late=False),
]


class Started(NamedTuple):
    setup: Setup
    place: Place
    cases: dict[str, tuple[BatchHandle, Sequence[str]]]


SETUPS = [
    pytest.param(QUICK, marks=pytest.mark.xdist_group("celery")),
    pytest.param(SLOW, marks=[pytest.mark.slow, pytest.mark.xdist_group("rabbitmq")]),
    *(pytest.param(setup, marks=[pytest.mark.nightly, pytest.mark.xdist_group("rabbitmq")]) for setup in NIGHTLY),
]


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def started(request: pytest.FixtureRequest, new_place: Any) -> Iterator[Started]:
    """All cases at once, published before their worker starts."""
    setup: Setup = request.param
    place: Place = new_place(
        setup.broker,
        settings={"task_acks_late": setup.acks_late, "accept_content": ["json"]},
    )
    cases = {}
    for name, case in CASES.items():
        if setup.has_processes or not case.needs_processes:
            batch, ids = place.open(len(case.expected))
            case.build(place, ids).apply_async()
            cases[name] = (batch, ids)
    with place.worker(setup.pool) as worker:
        yield Started(setup, place, cases)
        for batch, _ in cases.values():  # some have no test in this process
            batch.wait(PATIENCE)
        place.wait_until_started(f"child of {cases['a task that publishes another'][1][0]}")
        assert worker.stop() == 0
    assert place.messages() == 0


@pytest.mark.parametrize("name", CASES)
def test_the_ending_resolves_the_item(started: Started, name: str) -> None:
    case = CASES[name]
    if name not in started.cases:
        return  # the pool has no child processes
    batch, ids = started.cases[name]
    reasons = outcomes(batch)
    assert set(reasons) == {item for item, pattern in zip(ids, case.expected, strict=True) if pattern is not ACKED}
    for item, pattern in zip(ids, case.expected, strict=True):
        if pattern is not ACKED:
            assert re.search(pattern, reasons[item]), reasons[item]
            assert len(reasons[item]) <= 4000
    assert started.place.runs(ids[0]) == case.runs
    if not any(case.expected):
        [completed] = started.place.client.events(types="batch.completed", batch=batch.id).events
        assert completed.data is not None
        assert completed.data["failed"] == 0, "it failed before it succeeded"
