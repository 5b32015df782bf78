"""Every way in which a message can end, with Dramatiq's own worker processes and a real Redis."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import dramatiq
import pytest
from dramatiq.results import ResultFailure

from lastbit import Client
from lastbit.integrations.dramatiq import fan_out, resend
from tests.integrations.conftest import TOKEN
from tests.integrations.dramatiq.conftest import StartWorker
from tests.integrations.redrives import redriven
from tests.integrations.workers import reasons_by_number as reasons
from tests.integrations.workers import wait_until


def queued(store: Any, queue: str = "default") -> int:
    """The number of messages that wait or are under way, of a queue without its delayed messages."""
    return int(store.hlen(f"dramatiq:{queue}.msgs"))


def test_each_ending_resolves_its_item(app: ModuleType, worker: StartWorker, client: Client, store: Any) -> None:
    """One batch with a message for each ending that needs no killing. A retried message stays pending until its last
    run, a skipped one is acked, and each failure has its exception as reason. Results are stored as usual."""
    unknown = dramatiq.Message("default", "unheard_of", (), {}, {})
    messages = [
        app.succeeds.message(1),
        app.succeeds_at_the_third_run.message(),
        app.exhausts_its_retries.message(),
        app.fails_as_expected.message(),
        app.exceeds_its_time.message(),
        app.is_too_old.message(),
        app.skipped.message(),
        unknown,
        app.succeeds.message_with_options(args=(1,), delay=50),
        app.doubles.message(4) | app.only_even.message(),
        app.doubles.message(-1) | app.only_even.message(),
        app.doubles.message(400) | app.only_even.message(),
        app.doubles.message(1) | app.doubles.message() | app.only_even.message(),
        app.is_retried_in_an_hour.message(),
    ]
    retried = len(messages) - 1
    with worker():
        batch = fan_out(messages, key="endings")
        app.succeeds.send(2)  # not an item's
        wait_until(lambda: batch.refresh().pending == 1, "all but one are resolved")
        wait_until(lambda: queued(store) == 0, "the broker has acked them")
        assert batch.refresh().pending == 1
        assert [pending.start for pending in batch.pending()] == [retried]
    assert reasons(batch) == {
        2: "ValueError: no such picture",
        3: "KeyError: 'picture'",
        4: "TimeLimitExceeded",
        5: "SkipMessage: Message age limit exceeded",
        7: "ActorNotFound: unheard_of",
        10: "ValueError: negative",
        11: "ValueError: odd or large",
    }
    succeeded, failed = (messages[number].copy(message_id=f"{batch.id}:0:{number}") for number in (0, 3))
    assert succeeded.get_result(backend=app.results) == 1
    with pytest.raises(ResultFailure, match="'picture'"):
        failed.get_result(backend=app.results)
    runs = {item: int(count) for item, count in store.hgetall("runs").items() if item.startswith(f"{batch.id}:")}
    assert runs == {f"{batch.id}:0:{number}": count for number, count in {0: 1, 1: 3, 2: 2, 8: 1, retried: 1}.items()}
    assert batch.verify().ok


def test_redriven_messages_run_again(app: ModuleType, worker: StartWorker, client: Client, store: Any) -> None:
    """Only the failed items run again, each with its own arguments."""
    messages = [app.fails_at_first_if_wrong.message(word) for word in ("wrong", "right", "wrong", "right")]
    with worker():
        batch = fan_out(messages)
        assert batch.wait(30).failed == 2
        assert resend(redriven(client, batch), iter(messages)) == 2
        wait_until(lambda: batch.refresh().succeeded, "the failed items are acked")
    assert [int(store.hget("runs", f"{batch.id}:0:{number}")) for number in range(4)] == [2, 1, 2, 1]


def test_a_refused_token_ends_the_workers(app: ModuleType, worker: StartWorker, tokens_url: str, store: Any) -> None:
    """With an exit code that a supervisor sees. The message returns to the queue."""
    with Client(tokens_url, token=TOKEN) as client, worker(LASTBIT_URL=tokens_url) as running:
        batch = client.open(items=1)
        app.broker.enqueue(app.succeeds.message(1).copy(message_id=batch.ids[0]))
        assert running.wait() == 1
        assert (queued(store), batch.refresh().pending) == (1, 1)


@pytest.mark.slow
def test_a_killed_workers_messages_are_run_again_and_count_once(
    app: ModuleType, worker: StartWorker, client: Client, store: Any
) -> None:
    """SIGKILL in the middle of the work, with other messages fetched and waiting. They stay pending until another
    worker gets them."""
    with worker() as first:
        batch = fan_out([app.waits_in_its_first_run.message("w") for _ in range(4)] + [app.succeeds.message(1)] * 8)
        for _ in range(4):
            store.blpop(["begun:w"], 30)
        first.kill()
    assert batch.refresh().acked == 0
    with worker():
        assert batch.wait(60).succeeded
        wait_until(lambda: queued(store) == 0, "the broker has acked them")
    assert [int(store.hget("runs", f"{batch.id}:0:{number}")) for number in range(12)] == [2] * 4 + [1] * 8
    assert batch.verify().ok


@pytest.mark.slow
def test_a_worker_that_is_killed_between_the_two_acks_counts_once(
    app: ModuleType, worker: StartWorker, client: Client, store: Any
) -> None:
    """The item is acked, but its message comes again."""
    with worker():
        batch = fan_out([app.killed_at_ack.message()], seal=False)
        wait_until(lambda: batch.refresh().acked == 1, "the item is acked")
        wait_until(lambda: store.get("acks") == "1", "the process is about to end")
    assert queued(store) == 1
    with worker():
        wait_until(lambda: queued(store) == 0, "the message is acked")
    assert store.hget("runs", f"{batch.id}:0:0") == "2"
    assert (batch.refresh().acked, batch.refresh().pending) == (1, 0)


@pytest.mark.slow
def test_a_stopped_worker_settles_what_it_finished_and_returns_the_rest(
    app: ModuleType, worker: StartWorker, client: Client, store: Any
) -> None:
    """On SIGTERM an interrupted actor is retried elsewhere. Finished messages are acked, although resolutions are
    gathered for longer than the worker lives."""
    with worker(TESTS_LINGER="3") as first:
        batch = fan_out([app.is_interrupted_in_its_first_run.message("i"), app.succeeds.message(1)])
        store.blpop(["begun:i"], 30)
        wait_until(lambda: store.hget("runs", f"{batch.id}:0:1"), "the other one has run")
        assert first.stop() == 0
    assert (batch.refresh().acked, batch.refresh().failed) == (1, 0)
    with worker():
        assert batch.wait(60).succeeded
    assert store.hget("runs", f"{batch.id}:0:0") == "2"
    assert store.hget("runs", f"{batch.id}:0:1") == "1"
