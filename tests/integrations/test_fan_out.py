"""The fan-out that all adapters share: a producer that dies anywhere, and is run again, sends everything once, except
for at most one chunk."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from itertools import chain, pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastbit import AsyncClient, Client, ItemId, errors
from lastbit.integrations import _fan_out, fan_out, fan_out_async
from lastbit.retry import Retry
from tests.mutants import mutant


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


class Interrupted(Broker):
    """Someone else extends the batch, perhaps, before a chunk is sent."""

    def __init__(self, client: Client, extensions: list[int]) -> None:
        super().__init__()
        self._client = client
        self._extensions = extensions

    def send(self, pairs: Any) -> Any:
        if self._extensions and (count := self._extensions.pop(0)):
            self._client.batch(ItemId.parse(pairs[0][0]).batch).extend(count)
        return super().send(pairs)


@mutant(
    "a-handle-has-the-ids-of-others",
    "lastbit.integrations._fan_out:_add_between",
    "len(numbers) == len(chunks) * plan.chunk",
    "True",
)
@mutant(
    "a-handle-joins-ids-across-those-of-others",
    "lastbit.integrations._fan_out:_add",
    "runs[-1].numbers.stop == ids.numbers.start",
    "True",
)
@settings(max_examples=60)
@given(
    count=st.integers(0, 60),
    chunk=st.integers(1, 9),
    extensions=st.lists(st.integers(0, 2), max_size=60),
    deaths=st.lists(st.integers(0, 60), max_size=2),
)
@example(count=60, chunk=5, extensions=[0, 0, 0, 3], deaths=[50])
@example(count=12, chunk=5, extensions=[0, 0, 2], deaths=[])
def test_the_handle_has_the_ids_of_its_messages(
    service_url: str, count: int, chunk: int, extensions: list[int], deaths: list[int]
) -> None:
    """In their order, whoever else extends the batch, after each rerun, and when the batch is complete."""
    with Client(service_url) as client:
        broker = Interrupted(client, extensions)
        options: dict[str, Any] = {"idempotency_key": str(uuid.uuid4()), "chunk": chunk}
        for moment in deaths:
            with contextlib.suppress(Died):
                fan_out(client, numbers(count, moment), broker.send, seal=False, **options)
        batch = fan_out(client, numbers(count), broker.send, **options)
        items = {message: item for item, message in broker.sent}
        expected = [items[number] for number in range(count)]
        calls = len(broker.calls)
        assert list(batch.item_ids()) == expected
        assert all(run.numbers.stop < next_run.numbers.start for run, next_run in pairwise(batch.issued))
        client.ack(chain.from_iterable(pending.ids for pending in batch.pending()))
        assert batch.refresh().complete
        rerun = fan_out(client, numbers(count), broker.send, **options)
        assert list(rerun.item_ids()) == expected
        assert len(broker.calls) == calls


COMPARED = (
    "are not those of an earlier run with the idempotency key '{}', or come in another order: none of them was sent"
)


@pytest.mark.parametrize(
    ("messages", "chunk", "start", "end"),
    [
        (range(25), 5, 0, 5),
        (range(24), 10, 20, 24),
        (range(26), 10, 20, 26),
        (range(10), 10, 10, None),
        ([], 10, 0, None),
        (range(24, -1, -1), 10, 0, 10),
        ([*range(10), 11, 10, *range(12, 25)], 10, 10, 20),
        ([*range(23), 24, 23], 10, 20, 25),
        ([*range(9), 10, 9, *range(11, 25)], 10, 0, 10),
        ([*range(24), "24"], 10, 20, 25),
    ],
)
def test_a_rerun_with_other_messages_is_refused(
    client: Client, messages: Any, chunk: int, start: int, end: int | None, run_key: str
) -> None:
    """With chunks of another size, fewer or more messages, others, or another order. Nothing is sent or issued, and the
    batch is not sealed. The error says where the first difference is, and what to do."""
    broker = Broker()
    batch = fan_out(client, numbers(25), broker.send, idempotency_key=run_key, chunk=10, seal=False)
    with pytest.raises(errors.MessagesDiffer) as excinfo:
        fan_out(client, messages, broker.send, idempotency_key=run_key, chunk=chunk)
    assert (excinfo.value.start, excinfo.value.end) == (start, end)
    compared = "had more than these" if end is None else f"{start} to {end - 1} {COMPARED.format(run_key)}"
    assert compared in str(excinfo.value)
    assert "sort the messages, or pass identify=" in str(excinfo.value)
    assert len(broker.sent) == 25
    assert (batch.refresh().state, batch.items) == ("open", 25)


def test_a_rerun_may_have_more_messages_after_full_chunks(client: Client, run_key: str) -> None:
    """The chunks that an earlier run has issued are as they were, and the others are new."""
    broker = Broker()
    fan_out(client, numbers(20), broker.send, idempotency_key=run_key, chunk=10, seal=False)
    batch = fan_out(client, numbers(35), broker.send, idempotency_key=run_key, chunk=10)
    assert dict(broker.sent) == {f"{batch.id}:0:{number}": number for number in range(35)}
    assert broker.calls == [10, 10, 10, 10, 5]


@mutant(
    "a-rerun-is-not-compared",
    "lastbit.integrations._fan_out:_steps",
    "None if digest is None else digest.after(messages)",
    "None",
)
@mutant(
    "a-chunk-vouches-only-for-itself",
    "lastbit.integrations._digests:Digest.after",
    "for message in messages:\n    value = message if self._identify is None else self._identify("
    "message)\n    try:\n        self._hash.update(_written(value))\n    except TypeError as error:\n      "
    "  raise errors.InvalidArgument(f\"message {self._count} can't be compared with that of a rerun, "
    "because {error}: pass identify=, a function that returns what stands for a message: text, bytes, "
    'a number or a tuple of them") from None\n    self._count += 1',
    "self._hash = hashlib.blake2b(digest_size=16)\nfor message in messages:\n    value = message if "
    "self._identify is None else self._identify(message)\n    try:\n        self._hash.update(_written("
    'value))\n    except TypeError as error:\n        raise errors.InvalidArgument(f"message '
    "{self._count} can't be compared with that of a rerun, because {error}: pass identify=, a function "
    'that returns what stands for a message: text, bytes, a number or a tuple of them") from None\n    '
    "self._count += 1",
)
@mutant(
    "a-rerun-sends-before-it-has-compared", "lastbit.integrations._fan_out:_steps", "number >= first_unsent", "True"
)
@settings(max_examples=60)
@given(
    count=st.integers(1, 60),
    chunk=st.integers(1, 9),
    runs=st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.randoms(), st.integers(0, 4)), max_size=5),
    own=st.booleans(),
)
def test_reruns_in_any_order_lose_no_message(
    service_url: str, count: int, chunk: int, runs: list[tuple[int, bool, Random, int]], own: bool
) -> None:
    """Each run exchanges some messages and dies at some moment. It is refused, before anything is sent or issued,
    exactly if the messages that have items come in another order. In the end each message has one item, and was sent
    with it."""
    with Client(service_url) as client:
        broker = Broker()
        shared = client.open(items=1)
        place: dict[str, Any] = {"key": "rerun"} if own else {"batch": shared, "seal": False}
        options: dict[str, Any] = {"idempotency_key": f"run-{shared.id}", "chunk": chunk, **place}
        batch = client.open(key="rerun", idempotency_key=options["idempotency_key"]) if own else shared
        messages = list(range(count))
        base = 0 if own else 1

        def issued() -> int:
            return batch.refresh().items - base

        for moment, in_send, random, exchanges in runs:
            order = messages.copy()
            for _ in range(exchanges):
                one, other = random.randrange(count), random.randrange(count)
                order[one], order[other] = order[other], order[one]
            before, sent = issued(), len(broker.sent)
            broker.dies_at = sent + moment if in_send else None
            source = (order[number] for number in numbers(count, None if in_send else moment))
            refused = False
            try:
                fan_out(client, source, broker.send, **options)
            except Died:
                pass
            except errors.MessagesDiffer:
                refused = True
            differ = order[:before] != messages[:before]
            assert refused <= differ
            if differ:  # also if it died while it compared
                assert (issued(), len(broker.sent)) == (before, sent)
            else:
                messages = order
            if in_send or moment >= count:
                assert refused == differ
        broker.dies_at = None
        fan_out(client, messages, broker.send, **options)
        assert dict(broker.sent) == {f"{batch.id}:0:{base + number}": messages[number] for number in range(count)}
        assert issued() == count


def test_a_long_rerun_asks_few_times(client: Client, run_key: str) -> None:
    """And is refused early: a difference in the sixth of a hundred chunks is found in the ninth."""
    broker = Broker()
    taken: list[int] = []

    def taking(messages: list[int]) -> Iterator[int]:
        for message in messages:
            taken.append(message)
            yield message

    with pytest.raises(Died):
        fan_out(client, numbers(1000, 995), broker.send, idempotency_key=run_key, chunk=10)
    messages = [*range(50), 51, 50, *range(52, 1000)]
    with pytest.raises(errors.MessagesDiffer, match=r"messages 50 to 89 are not those"):
        fan_out(client, taking(messages), broker.send, idempotency_key=run_key, chunk=10)
    assert len(taken) == 90
    requests: list[str] = []
    with Client(client.url, transport=Noting(requests)) as noted:
        batch = fan_out(noted, numbers(1000), broker.send, idempotency_key=run_key, chunk=10)
    assert len(requests) < 35
    assert dict(broker.sent) == {f"{batch.id}:0:{number}": number for number in range(1000)}


class Noting(httpx.HTTPTransport):
    """Notes the requests. `without_digests`: answers like a service of an earlier release."""

    def __init__(self, requests: list[str], without_digests: bool = False) -> None:
        super().__init__()
        self._requests = requests
        self._without_digests = without_digests

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._requests.append(f"{request.method} {request.url.path}")
        if self._without_digests and b'"digest"' in request.content:
            # As the service answers a field that it doesn't know, with the name of this one.
            content = request.content.replace(b'"digest"', b'"digast"')
            headers = {**request.headers, "content-length": str(len(content))}
            response = super().handle_request(httpx.Request("POST", request.url, headers=headers, content=content))
            text = response.read().replace(b"digast", b"digest")
            return httpx.Response(
                response.status_code, headers={"content-type": "application/problem+json"}, content=text
            )
        return super().handle_request(request)


def test_a_service_of_an_earlier_release_compares_the_counts_only(client: Client, run_key: str) -> None:
    """It refuses the field, so a chunk is issued without it, as by an earlier client. A later service accepts such
    chunks in any order, and compares those that it has issued itself."""
    broker = Broker()
    options: dict[str, Any] = {"idempotency_key": run_key, "chunk": 10}
    with Client(client.url, transport=Noting([], without_digests=True)) as earlier, pytest.raises(Died):
        fan_out(earlier, numbers(45, 25), broker.send, **options)
    assert len(broker.sent) == 20
    with pytest.raises(Died):
        fan_out(client, numbers(45, 35), broker.send, **options)
    with pytest.raises(errors.MessagesDiffer, match="messages 20 to 29 are not those"):
        fan_out(client, [1, 0, *range(2, 45)], broker.send, **options)
    batch = fan_out(client, numbers(45), broker.send, **options)
    assert dict(broker.sent) == {f"{batch.id}:0:{number}": number for number in range(45)}


def test_two_producers_with_one_key_and_other_orders_do_not_mix(client: Client, run_key: str) -> None:
    """The second one begins while the first one sends: it is refused, and sends nothing."""
    broker = Broker()
    refusals: list[str] = []

    def send(pairs: Any) -> Any:
        with pytest.raises(errors.MessagesDiffer) as excinfo:
            fan_out(client, range(24, -1, -1), broker.send, idempotency_key=run_key, chunk=10)
        refusals.append(str(excinfo.value))
        return broker.send(pairs)

    batch = fan_out(client, numbers(25), send, idempotency_key=run_key, chunk=10)
    assert len(refusals) == 3
    assert broker.sent == [(f"{batch.id}:0:{number}", number) for number in range(25)]


def test_what_changes_with_each_run_is_left_out(client: Client, run_key: str) -> None:
    """By `identify`, which also makes any object comparable."""
    broker = Broker()

    def stamped() -> list[Any]:
        return [(number, object()) for number in range(25)]

    options: dict[str, Any] = {"idempotency_key": run_key, "chunk": 10}
    with pytest.raises(errors.InvalidArgument, match=r"message 0 can't be compared .* pass identify="):
        fan_out(client, stamped(), lambda pairs: [], **options)
    sent: list[Any] = []
    for _ in range(2):
        fan_out(client, stamped(), lambda pairs: sent.extend(pairs) or [], identify=lambda pair: pair[0], **options)
    assert [number for _, (number, _) in sent] == [*range(25), *range(20, 25)]
    with pytest.raises(errors.MessagesDiffer):
        fan_out(client, stamped()[::-1], broker.send, identify=lambda pair: pair[0], **options)
    fan_out(client, stamped(), lambda pairs: [])  # without a key, nothing is compared


def test_a_fan_out_into_a_cancelled_batch_sends_nothing(client: Client, run_key: str) -> None:
    """The error says how to go on; once the batch is reopened, a rerun does."""
    broker = Broker()
    batch = fan_out(client, numbers(3), broker.send, idempotency_key=run_key, seal=False)
    batch.cancel(reason="a mistake")
    with pytest.raises(errors.BatchEnded, match=f"was cancelled: 'a mistake'; `lastbit reopen {batch.id}`") as ended:
        fan_out(client, numbers(3), broker.send, idempotency_key=run_key)
    assert (ended.value.status, ended.value.code) == (409, "batch_cancelled")
    assert len(broker.sent) == 3
    batch.reopen()
    assert fan_out(client, numbers(3), broker.send, idempotency_key=run_key).state == "sealed"


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
        ({"batch": 7, "key": "other", "labels": {}}, r"give either batch, or .* \(key, labels\)"),
        ({"batch": 7, "parent": "7:0:0"}, r"give either batch, or .* \(parent\)"),
        ({"parent": "7:0:0", "deadline": timedelta(hours=1)}, "a rerun must give the same one: pass a datetime"),
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
            with pytest.raises(errors.MessagesDiffer, match="messages 0 to 9 are not those"):
                await fan_out_async(client, range(24, -1, -1), send, idempotency_key=run_key, chunk=10)
            batch = await fan_out_async(client, messages(), send, idempotency_key=run_key, chunk=10)
            assert (await batch.refresh()).items == 25

    asyncio.run(run())
    assert sorted(dict(broker.sent).values()) == list(range(25))
    assert len(broker.sent) == 25 + 4
