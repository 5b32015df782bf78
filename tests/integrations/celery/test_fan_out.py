"""The fan-out publishes each task once, with its item's id, to a broker that may refuse it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import chunks
from celery.signals import before_task_publish
from kombu import Queue

from lastbit import errors
from lastbit.integrations.celery import Lastbit
from lastbit.integrations.celery.publisher import Publisher
from tests.integrations.celery.workers import Place, outcomes
from tests.integrations.redrives import redriven
from tests.integrations.workers import wait_until
from tests.support.servers import free_port


@pytest.fixture(scope="module")
def place(new_place: Any) -> Iterator[Place]:
    place: Place = new_place()
    with place.worker() as worker:
        yield place
        assert worker.stop() == 0
    assert place.messages() == 0


def test_each_task_is_an_item(place: Place) -> None:
    task = place.task("succeed")
    batch = place.lastbit.fan_out((task for _ in range(25)), key="catalog", labels={"team": "search"}, chunk=10)
    assert (batch.info.key, batch.info.labels, batch.info.items) == ("catalog", {"team": "search"}, 25)
    assert outcomes(batch) == {}
    assert [place.runs(f"{batch.id}:0:{number}") for number in range(25)] == [1] * 25
    assert "task_id" not in task.options


def test_an_open_batch_takes_more(place: Place) -> None:
    batch = place.lastbit.fan_out([place.task("succeed")], seal=False)
    assert place.lastbit.fan_out([place.task("fail")], batch=batch) is batch
    assert outcomes(batch) == {f"{batch.id}:0:1": "ValueError: no such product"}


def test_the_same_run_publishes_nothing_again(place: Place) -> None:
    tasks = [place.task("succeed") for _ in range(3)]
    batch = place.lastbit.fan_out(tasks, idempotency_key="run-1")
    outcomes(batch)
    assert place.lastbit.fan_out(tasks, idempotency_key="run-1").id == batch.id
    assert [place.runs(f"{batch.id}:0:{number}") for number in range(3)] == [1] * 3


def test_chains_and_chords_end_with_their_last_task(place: Place) -> None:
    succeeding = chain(place.task("succeed"), place.task("retry_once"), app=place.app)
    failing = chain(place.task("fail"), place.task("succeed"), app=place.app)
    joined = chord([place.task("succeed"), place.task("succeed")], place.task("total"), app=place.app)
    broken = chord([place.task("succeed"), place.task("fail")], place.task("total"), app=place.app)
    batch = place.lastbit.fan_out([succeeding, failing, succeeding, joined, broken])
    reason = "not run, as an earlier task did not succeed: ValueError: no such product"
    assert outcomes(batch) == {f"{batch.id}:0:1": reason, f"{batch.id}:0:4": reason}
    assert place.runs(f"{batch.id}:0:2") == 2


def test_lost_tasks_are_published_again(place: Place) -> None:
    """Only those of pending items, each with its own arguments."""
    tasks = [place.task("succeed", number) for number in range(100)]
    batch, ids = place.open(100)
    lost = [2, 3, 64, 99]
    place.client.ack(item for number, item in enumerate(ids) if number not in lost)
    published: list[tuple[str, Any]] = []

    def note(body: Any, headers: Any, **_: object) -> None:
        published.append((headers["id"], body[0]))

    before_task_publish.connect(note)
    with pytest.raises(errors.InvalidArgument, match=f"item {ids[99]} has no message: there are only 99 messages"):
        place.lastbit.republish(batch, tasks[:99])
    assert published == []
    assert place.lastbit.republish(batch.id, iter(tasks)) == 4
    assert published == [(ids[number], (number,)) for number in lost]
    assert outcomes(batch) == {}
    assert place.lastbit.republish(batch, tasks) == 0


def test_redriven_tasks_are_published_again(place: Place) -> None:
    """Those of failed items. They run with their items' ids, and fail again."""
    tasks = [place.task("fail" if number % 2 else "succeed") for number in range(6)]
    batch = place.lastbit.fan_out(tasks)
    failed = {f"{batch.id}:0:{number}": "ValueError: no such product" for number in (1, 3, 5)}
    assert outcomes(batch) == failed
    assert place.lastbit.resend(redriven(place.client, batch), iter(tasks)) == 3
    runs = lambda: [place.runs(f"{batch.id}:0:{number}") for number in range(6)]  # noqa: E731
    wait_until(lambda: runs() == [1, 2] * 3, "they run again")
    assert outcomes(batch) == failed


app = Celery(set_as_current=False)
one, two = app.signature("succeed"), app.signature("succeed", args=(2,))
NO_END = "position 1: a group can't be an item, or its last part"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (group(one), NO_END),
        (chain(one, group(one, two)), NO_END),
        (chord([one, two], group(one, two)), NO_END),
        (chain(one, chord([one, two], group(one, two))), NO_END),
        (chunks(one, [(1,), (2,)], 1), NO_END),
        (chain(one, chunks(one, [(1,), (2,)], 1)), NO_END),
        ("succeed", r"position 1: expected a signature like task.s\(…\), not 'succeed'"),
    ],
)
def test_other_things_are_refused(place: Place, wrong: Any, message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        place.lastbit.fan_out([place.task("succeed"), wrong])


def test_tasks_that_the_broker_does_not_take_are_returned(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """And the log has the reason, which is often the wrong address."""
    port = free_port()
    app = Celery("nowhere", broker=f"redis://127.0.0.1:{port}", set_as_current=False)
    app.conf.update(task_publish_retry=False, broker_transport_options={"max_retries": 0})
    pairs = [(f"7:0:{number}", app.signature("succeed")) for number in range(3)]
    with Publisher(app, place.client) as publisher:
        assert publisher.send(pairs) == pairs
    assert "3 tasks wait" in caplog.text
    assert f"127.0.0.1:{port}" in caplog.text


@pytest.mark.slow
@pytest.mark.xdist_group("rabbitmq")
def test_rabbitmq_confirms_each_message(new_place: Any) -> None:
    """A full queue that refuses messages: without confirmations, they would be lost without an error."""
    place: Place = new_place("rabbitmq")
    with place.app.connection_for_write() as connection:
        arguments = {"x-max-length": 2, "x-overflow": "reject-publish"}
        connection.default_channel.queue_declare(place.queue, durable=True, auto_delete=False, arguments=arguments)
    place.app.conf.task_queues = [Queue(place.queue, routing_key=place.queue, queue_arguments=arguments)]
    pairs = [(f"7:0:{number}", place.task("succeed")) for number in range(4)]
    with Publisher(place.app, place.client) as publisher:
        assert publisher.send(pairs) == pairs[2:]


def test_an_app_has_one(place: Place) -> None:
    with pytest.raises(errors.InvalidArgument, match="has a Lastbit already: make one per app"):
        Lastbit(place.app)


def test_wrong_arguments_are_refused_at_once() -> None:
    app = Celery("wrong", set_as_current=False)
    with pytest.raises(errors.InvalidArgument, match="when_ignored is one of ack, fail, skip, not 'drop'"):
        Lastbit(app, when_ignored="drop")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="'nowhere' is not the address of a service"):
        Lastbit(app, "nowhere")
