"""The jobs that the tests' workers run. Their effects are in the broker's Redis: `runs` counts the runs of each job,
and a list of the name `begun:WORD` receives the process id when the job for it has begun."""

from __future__ import annotations

import os
import signal
import time

import redis
from rq import Queue, Retry, get_current_job

from lastbit.integrations import Skipped, current_batch, current_item

URL = os.environ["TESTS_REDIS"]
store = redis.Redis.from_url(URL)
queue = Queue(connection=store)


def run() -> int:
    """Count this run of the current job, and return how many there were."""
    job = get_current_job()
    assert job is not None
    return int(store.hincrby("runs", job.id, 1))


def succeeds(number: int = 0) -> int:
    run()
    return number


def notes_its_batch(word: str, copies: int = 1) -> None:
    """At the end of a batch."""
    run()
    store.rpush("ended", f"{current_batch()}:{word * copies}")


def notes_its_item() -> None:
    store.rpush("items", current_item())


def succeeds_at_the_third_run() -> None:
    if run() < 3:
        raise RuntimeError("not yet")


def returns_retry_twice() -> Retry | None:
    return Retry(max=5) if run() < 3 else None


def always_returns_retry() -> Retry:
    run()
    return Retry(max=1)


def skips_itself(reason: str | None = None) -> None:
    run()
    raise Skipped(reason)


def skips_itself_and_fails() -> None:
    try:
        skips_itself()
    finally:
        fails()


def fails() -> None:
    run()
    raise ValueError("no such picture")


def fails_at_first_if_wrong(word: str) -> None:
    if run() == 1 and word == "wrong":
        raise ValueError(word)


def exceeds_its_time() -> None:
    time.sleep(60)


def kills_itself() -> None:
    run()
    os.kill(os.getpid(), signal.SIGKILL)


def kills_itself_at_first() -> None:
    if run() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def waits_in_its_first_run(word: str) -> None:
    if run() == 1:
        store.rpush(f"begun:{word}", os.getpid())
        time.sleep(3600)


def waits_for_a_go(word: str) -> None:
    run()
    store.rpush(f"begun:{word}", os.getpid())
    store.blpop([f"go:{word}"], 60)
