"""Failures by reason, redrives and their followers, in the SDK and on the command line."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import uuid

import pytest

from lastbit import BatchHandle, Client, Conflict, Redrive
from tests.sdk.conftest import Way

ITEMS = 300


@pytest.fixture
def batch(client: Client) -> BatchHandle:
    """Items 0 to 9 failed with "slow", 100 without a reason."""
    batch = client.open(key=f"catalog-{uuid.uuid4()}", items=ITEMS, group_size=64, labels={"team": "search"})
    assert batch.ids is not None
    client.fail(batch.ids[:10], reason="slow")
    client.fail(batch.ids[100])
    return batch


def test_failures_are_counted_by_reason(client: Client, batch: BatchHandle) -> None:
    summary = batch.failure_reasons()
    assert batch.ids is not None
    assert (summary.failed, summary.examined, summary.exact) == (11, 11, True)
    slow, without = summary.reasons
    assert (slow.reason, slow.count, slow.items) == ("slow", 10, tuple(batch.ids[:5]))
    assert slow.first_at is not None
    assert slow.last_at is not None
    assert slow.first_at <= slow.last_at
    assert (without.reason, without.count, without.first_at, without.items) == (None, 1, None, (batch.ids[100],))
    assert batch.failure_reasons(limit=1).reasons == (slow,)


def test_a_follower_sends_the_items_again_until_the_batch_succeeds(client: Client, batch: BatchHandle) -> None:
    """It gets the redrives after its position, in order, with all that the operator gave."""
    assert batch.ids is not None
    before = client.events(batch=batch.id).next
    answer = batch.redrive(reason="slow", note="the disk is back")
    assert (answer.count, answer.more, [part.count for part in answer.ranges]) == (10, False, [10])
    batch.redrive(items=batch.ids[100])
    batch.seal()
    client.ack(id for id in batch.ids if id not in (*batch.ids[:10], batch.ids[100]))
    assert batch.refresh().complete
    sent: list[Redrive] = []
    for redrive in client.redrives(after=before, batch=batch.id):
        sent.append(redrive)
        client.ack(client.batch(redrive.batch).redriven(redrive))
        if batch.refresh().succeeded:
            break
    first, second = sent
    assert (first.position, first.key, first.labels, first.count) == (
        answer.position,
        batch.info.key,
        {"team": "search"},
        10,
    )
    assert (first.reason, first.note, first.spans) == ("slow", "the disk is back", ((0, 10),))
    assert (second.reason, second.note, second.spans) == (None, None, ((100, 101),))
    assert batch.verify().ok
    with pytest.raises(Conflict, match="nothing to redrive") as error:
        batch.redrive()
    assert error.value.code == "nothing_failed"


def test_more_ranges_than_an_event_has_are_fetched(client: Client) -> None:
    """With and without a reason; items that were acked in the meantime are left out."""
    count = 2_500
    batch = client.open(items=count, group_size=64)
    assert batch.ids is not None
    odd, others = list(batch.ids[1::2]), list(batch.ids[0::20])
    client.fail(odd, reason="odd")
    client.fail(others, reason="other")
    for reason, expected in (("odd", odd), (None, sorted({*odd, *others}, key=batch_order))):
        answer = batch.redrive(reason=reason)
        assert (answer.count, answer.more) == (len(expected), True)
        redrive = next(iter(client.redrives(after=answer.position - 1, batch=batch.id)))
        assert list(batch.redriven(redrive)) == expected
    client.ack(odd[-1])
    assert odd[-1] not in set(batch.redriven(redrive))


def batch_order(item: str) -> tuple[int, ...]:
    return tuple(map(int, item.split(":")))


def test_the_async_client_does_the_same(way: Way, batch: BatchHandle) -> None:
    async def run() -> list[str]:
        async with way.async_client() as client:
            handle = client.batch(batch.id)
            assert (await handle.failure_reasons()).failed == 11
            answer = await handle.redrive(idempotency_key="again")
            assert await handle.redrive(idempotency_key="again") == answer
            async for redrive in client.redrives(after=answer.position - 1):
                return [id async for id in handle.redriven(redrive)]
        return []

    assert batch.ids is not None
    assert asyncio.run(run()) == [*batch.ids[:10], batch.ids[100]]


def lastbit(service_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lastbit", "--url", service_url, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_an_operator_redrives_on_the_command_line(service_url: str, client: Client, batch: BatchHandle) -> None:
    process = lastbit(service_url, "reasons", str(batch.id))
    assert process.returncode == 0, process.stderr
    for text in ("10 items  slow", "1 item  no reason given", f"{batch.id}:0:0 {batch.id}:0:1"):
        assert text in process.stdout
    assert json.loads(lastbit(service_url, "reasons", str(batch.id), "--json").stdout)["examined"] == 11
    process = lastbit(service_url, "redrive", str(batch.id), "--reason", "slow", "--note", "again", "--yes")
    assert "asked for 10 failed items again, at position" in process.stdout
    redrive = next(itertools.islice(client.redrives(batch=batch.id), 1))
    assert (redrive.count, redrive.note) == (10, "again")
    process = lastbit(service_url, "redrive", str(batch.id), "--reason", "fast", "--yes")
    assert process.returncode == 1
    assert "nothing to redrive" in process.stderr
