"""The actors that the tests' workers run. Their effects are in the broker's Redis: `runs` counts the runs of each
message, and a list of the name `begun:WORD` receives an element when the actor for it has begun."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage, Middleware, SkipMessage, TimeLimit
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from lastbit.integrations import _endings, current_batch, current_item
from lastbit.integrations.dramatiq import LastbitMiddleware
from tests import mutants

mutants.from_environment()
URL = os.environ["TESTS_REDIS"]
store = redis.Redis.from_url(URL)
# A dead worker's messages are back after a second, as every call looks for them.
broker = RedisBroker(url=URL, heartbeat_timeout=1000, maintenance_chance=1_000_000)
dramatiq.set_broker(broker)
broker.middleware = [TimeLimit(interval=50) if isinstance(each, TimeLimit) else each for each in broker.middleware]


class Hooks(Middleware):
    """Skips messages of the actor `skipped`, and kills its process at the first ack of a message of `killed_at_ack`:
    the item is resolved then, and the message is still in the queue."""

    def before_process_message(self, broker: Any, message: Any) -> None:
        if message.actor_name == "skipped":
            raise SkipMessage

    def before_ack(self, broker: Any, message: Any) -> None:
        if message.actor_name == "killed_at_ack" and store.incr("acks") == 1:
            os.kill(os.getpid(), signal.SIGKILL)


results = RedisBackend(url=URL)
broker.add_middleware(Results(backend=results))
broker.add_middleware(Hooks())
broker.add_middleware(CurrentMessage())
_endings.TTL = 1.0  # type: ignore[misc]
_endings.LOOK = 0.1  # type: ignore[misc]
broker.add_middleware(
    LastbitMiddleware(
        linger=float(os.environ.get("TESTS_LINGER", "0.01")), app_name=os.environ.get("TESTS_APP", "dramatiq")
    )
)


def run() -> int:
    """Count this run of the current message, and return how many there were. It knows its item."""
    message = CurrentMessage.get_current_message()
    assert message is not None
    if message.message_id.startswith("batch:"):
        assert message.message_id.startswith(f"batch:{current_batch()}:")
    elif ":" in message.message_id:
        assert current_item() == message.message_id
    return int(store.hincrby("runs", message.message_id, 1))


@dramatiq.actor(max_retries=0)
def fails_at_first_if_wrong(word: str) -> None:
    if run() == 1 and word == "wrong":
        raise ValueError(word)


@dramatiq.actor(max_retries=0, store_results=True)
def succeeds(number: int) -> int:
    run()
    return number


@dramatiq.actor(max_retries=0)
def notes_the_end() -> None:
    """With the number of items of its batch that were handled before."""
    handled = [item for item in store.hkeys("runs") if item.startswith(f"{current_batch()}:".encode())]
    store.rpush("ended", f"{current_batch()} {len(handled)}")


@dramatiq.actor(max_retries=3, min_backoff=10)
def succeeds_at_the_third_run() -> None:
    if run() < 3:
        raise RuntimeError("not yet")


@dramatiq.actor(max_retries=3)
def is_retried_in_an_hour() -> None:
    run()
    raise dramatiq.errors.Retry("later", delay=3_600_000)


@dramatiq.actor(max_retries=1, min_backoff=10)
def exhausts_its_retries() -> None:
    run()
    raise ValueError("no such picture")


@dramatiq.actor(throws=(KeyError,), store_results=True)
def fails_as_expected() -> None:
    raise KeyError("picture")


@dramatiq.actor(max_retries=0, time_limit=100)
def exceeds_its_time() -> None:
    while True:
        time.sleep(0.01)


@dramatiq.actor(max_age=1)
def is_too_old() -> None:
    run()


@dramatiq.actor
def skipped() -> None:
    run()


@dramatiq.actor(max_retries=0)
def doubles(number: int) -> int:
    if number < 0:
        raise ValueError("negative")
    return 2 * number


@dramatiq.actor(max_retries=0)
def only_even(number: int) -> None:
    if number % 2 or number > 100:
        raise ValueError("odd or large")


@dramatiq.actor(max_retries=0)
def killed_at_ack() -> None:
    run()


@dramatiq.actor(max_retries=0)
def waits_in_its_first_run(word: str) -> None:
    """Until the list `end:WORD` gets an element, or forever."""
    if run() == 1:
        store.rpush(f"begun:{word}", 1)
        store.blpop([f"end:{word}"])


@dramatiq.actor(max_retries=3, min_backoff=3000, notify_shutdown=True)
def is_interrupted_in_its_first_run(word: str) -> None:
    if run() == 1:
        store.rpush(f"begun:{word}", 1)
        while True:
            time.sleep(0.01)
