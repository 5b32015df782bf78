"""`tally.apply_ranges`, and the buffer that counts by ranges."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import pytest

from lastbit import (
    AsyncClient,
    Client,
    Conflict,
    InvalidArgument,
    RangeResult,
    Retry,
    ServiceUnreachable,
    Source,
    SourceChain,
    SourceRewound,
    SubCounter,
    TallyRange,
    TallyValue,
)
from lastbit.tallies import ranges
from tests.mutants import mutant
from tests.sdk.conftest import scripted_service  # noqa: F401  # a fixture
from tests.sdk.test_tallies import Window, read

KINESIS: Final = 49590338271490256608559692538361571095921575989136588898


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client:
        yield client


def test_a_range_counts_once(client: Client) -> None:
    tally = client.tally("ranged")
    assert tally.apply_ranges([TallyRange("screws", 0, None, "5", {"r/1": 3, "r/2": 4})]) == [RangeResult("applied")]
    assert tally.apply_ranges(
        [TallyRange("screws", 0, None, "5", {"r/1": 3}), TallyRange("screws", 1, "3", "5", {"r/1": 100})]
    ) == [RangeResult("repeated"), RangeResult("moved", None)]
    assert tally.apply_ranges([TallyRange("screws", 0, None, "9", {"r/1": 3})]) == [RangeResult("moved", "5")]
    source = SubCounter("screws", 0, 0, None, None, 3, "5")
    assert tally.get("r/1") == TallyValue("r/1", 3, (source,))


def test_a_range_that_is_none_is_refused(client: Client) -> None:
    """By the service or before anything is sent."""
    tally = client.tally("refused-ranges")
    tally.apply([("k", 1, read(2))])
    with pytest.raises(Conflict, match="entries or ranges, not both"):
        tally.apply_ranges([TallyRange("screws", 0, None, "5", {"k": 1})])
    for wrong in (
        [("screws", 0, None, "5", {"k": 1})],
        [TallyRange("screws", 0, None, 5, {"k": 1})],  # type: ignore[arg-type]
        [TallyRange("screws", 0, 4, "5", {"k": 1})],  # type: ignore[arg-type]
        [TallyRange("screws", 0, None, "5", {"k": 1.5})],  # type: ignore[dict-item]
        [TallyRange("screws", 0, None, "5", {".": 1})],
        [TallyRange("screws", 0, None, "5", [("k", 1)])],  # type: ignore[arg-type]
        5,
    ):
        with pytest.raises(InvalidArgument):
            tally.apply_ranges(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="by is 'entry' or 'range'"):
        tally.buffer(by="offset")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="larger ones need ranges"):
        tally.apply([("k", 1, SourceChain().hop("shard", 0, KINESIS))])
    assert tally.value("k") == 1


def test_a_buffer_counts_what_others_have_not(client: Client) -> None:
    """Buffers that start before each other's positions. Offsets have 56 digits; the window tracks other numbers."""
    tally, window = client.tally("shards"), Window()
    with tally.buffer(by="range", every=60) as one_buffer, tally.buffer(window, by="range", every=60) as other_buffer:
        for number in range(20):
            one_buffer.add({"all": 1, f"k{number % 3}": number}, Source("shard", 0, KINESIS + number))
        one_buffer.flush()
        for number in range(10, 40):
            other_buffer.add(
                {"all": 1, f"k{number % 3}": number}, Source("shard", 0, KINESIS + number), window_offset=number
            )
        other_buffer.flush()
        assert window.acked == [*range(10, 40)]
        for number in range(20, 50):
            one_buffer.add({"all": 1, f"k{number % 3}": number}, Source("shard", 0, KINESIS + number))
    assert tally.value("all") == 50
    assert [tally.value(f"k{rest}") for rest in range(3)] == [sum(range(rest, 50, 3)) for rest in range(3)]
    assert tally.get("all").sources[0].position == str(KINESIS + 49)


@mutant(
    "a-late-message-is-a-repeat",
    "lastbit.tallies.ranges:_Latest.add",
    "position < self._lowest or position in self._known",
    "True",
)
def test_a_message_after_a_later_one_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look like a repeat. Repeats are none, nor is what came before the first message."""
    monkeypatch.setattr(ranges, "REMEMBERED", 3)
    tally, window = client.tally("lanes"), Window()
    with tally.buffer(window, by="range", every=60) as buffer:
        for offset in (5, 7, 5, 9, 3):
            buffer.add({"k": 1}, read(offset))
        for offset in (6, 8):
            with pytest.raises(InvalidArgument, match=f"offset {offset} of 'screws', partition 0, was added after"):
                buffer.add({"k": 1}, read(offset))
        buffer.add({"k": 1}, read(6, partition=1))
    assert window.acked == [5, 7, 5, 9, 3, 6]
    assert tally.value("k") == 5


@mutant(
    "a-lost-position-is-accepted",
    "lastbit.tallies.ranges:Counting._move",
    "known_position is not None and (position is None or position < known_position)",
    "False",
)
def test_a_source_that_goes_back_ends_the_buffer(client: Client) -> None:
    """What was counted in between would be missing."""
    tally, window = client.tally("restored"), Window()
    buffer = tally.buffer(window, by="range", every=60)
    buffer.add({"k": 1}, read(5))
    buffer.flush()
    tally.delete()
    buffer.add({"k": 1}, read(6))
    with pytest.raises(SourceRewound, match="was counted up to 5, but now it is not counted any more"):
        buffer.close()
    assert window.acked == [5]
    tally.apply_ranges([TallyRange("screws", 0, None, "someone's", {})])
    buffer = tally.buffer(window, by="range", every=60)
    buffer.add({"k": 1}, read(6))
    with pytest.raises(InvalidArgument, match="use apply_ranges"):
        buffer.close()


def test_products_of_a_message_are_counted_one_by_one(client: Client) -> None:
    """A range may end between them; those that came over another partition have a position of their own."""
    tally = client.tally("products")
    chains = [SourceChain().hop("orders", 3, 7, child) for child in range(4)]
    with tally.buffer(by="range", every=60) as buffer:
        for offset, (chain, partition) in enumerate(zip(chains[:3], (0, 1, 0), strict=True)):
            buffer.add({"k": 1}, chain.hop("items", partition, offset))
        buffer.flush()
        for offset, chain in enumerate(chains[2:]):
            buffer.add({"k": 1}, chain.hop("items", 0, 8 + offset))
    assert tally.value("k") == 4
    places = [(source.topic, source.partition) for source in tally.get("k").sources]
    assert places == [("orders>items/0", 3), ("orders>items/1", 3)]


def test_a_buffer_acks_a_range_only_after_its_answer(scripted_service: Any) -> None:  # noqa: F811
    """Its first answer is lost; then the service stands elsewhere."""
    answers = iter(
        [
            None,
            (200, {}, {"results": [{"status": "moved", "position": "4"}]}),
            None,
            (200, {}, {"results": [{"status": "repeated"}]}),
        ]
    )
    scripted_service.reply = lambda _: next(answers, None)
    window = Window()
    with Client(scripted_service.url, retry=Retry(attempts=2, base=0.001, cap=0.001)) as client:
        buffer = client.tally("t").buffer(window, by="range", every=60)
        for offset in range(8):
            buffer.add({"k": offset}, read(offset))
        assert window.acked == []
        buffer.flush()
        assert window.acked == [*range(8)]
        buffer.add({"k": 1}, read(8))
        with pytest.raises(ServiceUnreachable):
            buffer.close()
    assert window.acked == [*range(8)]
    bodies = [request.body["ranges"][0] for request in scripted_service.seen]
    place = {"topic": "screws", "partition": 0, "generation": 0}
    assert bodies[0] == bodies[1] == {**place, "after": None, "upto": "7", "totals": {"k": 28}}
    assert bodies[2] == bodies[3] == {**place, "after": "4", "upto": "7", "totals": {"k": 18}}
    assert bodies[4] == {**place, "after": "7", "upto": "8", "totals": {"k": 1}}


def test_the_async_client_counts_the_same(service_url: str) -> None:
    async def run() -> None:
        window = Window()
        async with AsyncClient(service_url) as client:
            tally = client.tally("async-ranges")
            results = await tally.apply_ranges([TallyRange("screws", 0, None, "5", {"k": 1})])
            assert results == [RangeResult("applied")]
            async with tally.buffer(window, by="range", every=0.005, most=20) as buffer:
                for offset in range(200):
                    await buffer.add({"k": 1} if offset % 2 else {}, read(offset))
            assert window.acked == [*range(200)]
            assert await tally.value("k") == 1 + sum(1 for offset in range(6, 200) if offset % 2)

    asyncio.run(run())
