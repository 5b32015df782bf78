"""The fan-out that all adapters share: a producer that dies anywhere, and is run again, sends everything once, except
for at most one chunk."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastbit import AsyncClient, Client, errors
from lastbit.integrations import _fan_out, fan_out, fan_out_async
from lastbit.retry import Retry


class Died(BaseException):
    """The producer was killed."""


class Broker:
    """Stores what was sent. `dies_at`: the number of stored messages at which the producer dies."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.dies_at: int | None = None
        self.refused: dict[int, int] = {}
        """Message → how often it will be refused."""
        self.calls: list[int] = []

    def send(self, pairs: Any) -> Any:
        self.calls.append(len(pairs))
        refused_items = []
        for item, message in pairs:
            if self.dies_at is not None and len(self.sent) >= self.dies_at:
                raise Died
            if self.refused.get(message, 0) > 0:
                self.refused[message] -= 1
                refused_items.append((item, message))
            else:
                self.sent.append((item, message))
        return refused_items


@pytest.fixture
def client(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client:
        yield client


@pytest.fixture
def run_key() -> str:
    """An idempotency key of this test alone: the service is shared."""
    return str(uuid.uuid4())


def numbers(count: int, dies_at: int | None = None) -> Iterator[int]:
    """The messages; the producer dies while it makes the message `dies_at`."""
    for number in range(count):
        if number == dies_at:
            raise Died
        yield number


def test_each_message_gets_an_item_and_the_batch_is_sealed(client: Client) -> None:
    """The messages are sent in order, chunk by chunk, and the batch has the key and labels."""
    broker = Broker()
    batch = fan_out(client, numbers(25), broker.send, key="catalog", labels={"team": "search"}, chunk=10)
    assert broker.calls == [10, 10, 5]
    assert [message for _, message in broker.sent] == list(range(25))
    assert [item for item, _ in broker.sent] == [f"{batch.id}:0:{number}" for number in range(25)]
    info = batch.refresh()
    assert (info.state, info.items, info.key, info.labels) == ("sealed", 25, "catalog", {"team": "search"})


def test_an_open_batch_is_extended_and_stays_open(client: Client) -> None:
    """Given as a handle or as a number; without messages nothing is issued."""
    batch = client.open(items=3)
    broker = Broker()
    assert fan_out(client, numbers(4), broker.send, batch=batch, seal=False) is batch
    fan_out(client, numbers(2), broker.send, batch=batch.id, seal=False)
    fan_out(client, numbers(0), broker.send, batch=batch.id, seal=False)
    assert [item for item, _ in broker.sent] == [f"{batch.id}:0:{number}" for number in range(3, 9)]
    assert (batch.refresh().state, batch.items) == ("open", 9)


def test_an_empty_fan_out_is_complete(client: Client) -> None:
    """There is nothing to wait for."""
    assert fan_out(client, [], Broker().send).complete


@settings(max_examples=40)
@given(
    count=st.integers(0, 26),
    chunk=st.integers(1, 9),
    deaths=st.lists(st.tuples(st.booleans(), st.integers(0, 26)), max_size=4),
    own=st.booleans(),
)
def test_a_producer_that_dies_anywhere_is_run_again(
    service_url: str, count: int, chunk: int, deaths: list[tuple[bool, int]], own: bool
) -> None:
    """It dies while it sends, or while it makes messages. In the end each message has exactly one item, each run has
    repeated one chunk at most, and every item has its message."""
    with Client(service_url) as client:
        broker = Broker()
        shared = client.open(items=1)
        place: dict[str, Any] = {"key": "rerun"} if own else {"batch": shared, "seal": False}
        key = f"run-{shared.id}"
        runs = 1
        for in_send, moment in deaths:
            broker.dies_at = len(broker.sent) + moment if in_send else None
            try:
                batch = fan_out(
                    client,
                    numbers(count, None if in_send else moment),
                    broker.send,
                    idempotency_key=key,
                    chunk=chunk,
                    **place,
                )
            except Died:
                runs += 1
            else:
                runs += 1
        broker.dies_at = None
        batch = fan_out(client, numbers(count), broker.send, idempotency_key=key, chunk=chunk, **place)
        items = dict(broker.sent)
        assert sorted(items.values()) == list(range(count))
        assert batch.refresh().items == count + (not own)
        times = Counter(message for _, message in broker.sent)
        assert sum(times.values()) - count <= (runs - 1) * chunk
        if own:
            assert batch.state == ("sealed" if count else "complete")


def test_a_finished_fan_out_that_is_run_again_repeats_at_most_its_last_chunk(client: Client, run_key: str) -> None:
    """And nothing, once the batch is complete."""
    broker = Broker()
    batch = fan_out(client, numbers(25), broker.send, idempotency_key=run_key, chunk=10)
    assert fan_out(client, numbers(25), broker.send, idempotency_key=run_key, chunk=10).id == batch.id
    assert broker.calls == [10, 10, 5, 5]
    client.ack([item for item, _ in broker.sent])
    assert fan_out(client, numbers(25), broker.send, idempotency_key=run_key, chunk=10).complete
    assert broker.calls == [10, 10, 5, 5]


@pytest.mark.parametrize(("count", "chunk"), [(25, 5), (24, 10), (10, 10), (0, 10)])
def test_a_rerun_with_other_messages_is_refused(client: Client, count: int, chunk: int, run_key: str) -> None:
    """With chunks of another size, or fewer messages. Nothing is sent, and the batch is not sealed."""
    broker = Broker()
    batch = fan_out(client, numbers(25), broker.send, idempotency_key=run_key, chunk=10, seal=False)
    with pytest.raises((errors.IdempotencyKeyReused, errors.InvalidArgument)):
        fan_out(client, numbers(count), broker.send, idempotency_key=run_key, chunk=chunk)
    assert len(broker.sent) == 25
    assert batch.refresh().state == "open"


def test_a_fan_out_into_a_cancelled_batch_sends_nothing(client: Client, run_key: str) -> None:
    """The error is the service's."""
    broker = Broker()
    fan_out(client, numbers(3), broker.send, idempotency_key=run_key, seal=False).cancel()
    with pytest.raises(errors.BatchEnded, match="cancelled"):
        fan_out(client, numbers(3), broker.send, idempotency_key=run_key)
    assert len(broker.sent) == 3


def test_refused_messages_are_sent_again(client: Client) -> None:
    """Only these, and before the next chunk."""
    broker = Broker()
    broker.refused = {1: 1, 3: 2}
    fan_out(client, numbers(8), broker.send, chunk=4)
    assert broker.calls == [4, 2, 1, 4]
    assert [message for _, message in broker.sent] == [0, 2, 1, 3, 4, 5, 6, 7]


def test_a_broker_that_refuses_for_too_long_ends_the_fan_out(
    client: Client, monkeypatch: pytest.MonkeyPatch, run_key: str
) -> None:
    """The error has the items, and the batch stays open. The next run with the key sends the rest."""
    monkeypatch.setattr(_fan_out, "PATIENCE", Retry(attempts=3, base=0.001))
    broker = Broker()
    broker.refused = {5: 3}
    with pytest.raises(errors.MessagesRefused, match="refused 1 messages, the first one that of item") as excinfo:
        fan_out(client, numbers(8), broker.send, chunk=4, idempotency_key=run_key)
    batch = int(excinfo.value.items[0].split(":")[0])
    assert list(excinfo.value.items) == [f"{batch}:0:5"]
    assert client.batch(batch).refresh().state == "open"
    fan_out(client, numbers(8), broker.send, chunk=4, idempotency_key=run_key)
    assert set(dict(broker.sent).values()) == set(range(8))


def test_a_broker_may_be_away_for_most_of_a_minute(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that restarts takes longer than the client's eight attempts. The clock here is moved by the pauses."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(_fan_out, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    fan_out(client, numbers(3), lambda pairs: pairs if now < 45 else [])
    assert 45 <= now < 60
    now = 0.0
    with pytest.raises(errors.MessagesRefused):
        fan_out(client, numbers(3), lambda pairs: pairs)
    assert 45 < now <= 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "chunk is at least 1"),
        ({"batch": 7, "key": "other"}, "either these or batch"),
        ({"idempotency_key": "k" * 236}, "1 to 235 characters here, not 236"),
        ({"idempotency_key": ""}, "1 to 235 characters"),
    ],
)
def test_wrong_arguments_are_named(client: Client, options: dict[str, Any], message: str) -> None:
    """Before anything is opened."""
    with pytest.raises(errors.InvalidArgument, match=message):
        fan_out(client, [1], Broker().send, **options)


def test_progress_is_shown(client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain lines where standard error is no terminal."""
    monkeypatch.setattr("lastbit.progress.EVERY", 0.0)
    fan_out(client, numbers(25), Broker().send, chunk=10, progress=True)
    assert capsys.readouterr().err.splitlines() == [f"{count} messages sent" for count in (10, 20, 25)]


async def asynchronous_numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


@pytest.mark.parametrize("source", ["asynchronous", "plain"])
def test_the_asynchronous_fan_out_does_the_same(service_url: str, source: str, run_key: str) -> None:
    """Also after the producer has died; refused messages are sent again."""
    broker = Broker()
    broker.refused = {3: 1}

    async def send(pairs: Any) -> Any:
        await asyncio.sleep(0)
        return broker.send(pairs)

    async def run() -> None:
        async with AsyncClient(service_url) as client:

            def messages() -> Any:
                return asynchronous_numbers(25) if source == "asynchronous" else numbers(25)

            broker.dies_at = 14
            with pytest.raises(Died):
                await fan_out_async(client, messages(), send, idempotency_key=run_key, chunk=10)
            broker.dies_at = None
            batch = await fan_out_async(client, messages(), send, idempotency_key=run_key, chunk=10)
            assert (await batch.refresh()).items == 25

    asyncio.run(run())
    assert sorted(dict(broker.sent).values()) == list(range(25))
    assert len(broker.sent) == 25 + 4
