"""Updates of a batch, in the SDK and on the command line."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest

from lastbit import BatchHandle, Client, errors
from tests.sdk.conftest import Way
from tests.sdk.test_failures import lastbit

DEADLINE = datetime(2099, 5, 4, 17, 30, tzinfo=UTC)


@pytest.fixture
def batch(client: Client) -> BatchHandle:
    return client.open(items=4, labels={"team": "search", "trial": ""}, tolerated_failures=3, deadline=DEADLINE)


def test_what_is_left_out_stays_and_none_removes(client: Client, batch: BatchHandle) -> None:
    updated = batch.update(labels={"trial": None, "run": "2"}, tolerated_failure_percentage=50)
    assert updated == batch.info == client.batch(batch.id).refresh()
    assert (updated.labels, updated.tolerated_failures) == ({"team": "search", "run": "2"}, 3)
    assert (updated.tolerated_failure_percentage, updated.deadline) == (50, DEADLINE)
    updated = batch.update(labels=None, tolerated_failures=None, deadline=None)
    assert (updated.labels, updated.tolerated_failures, updated.deadline) == ({}, None, None)
    assert updated.tolerated_failure_percentage == 50
    before = datetime.now(UTC)
    deadline = batch.update(deadline=timedelta(hours=2)).deadline
    assert deadline is not None
    assert before + timedelta(hours=2) <= deadline <= datetime.now(UTC) + timedelta(hours=2)
    with pytest.raises(errors.InvalidRequest, match="expected a time in the future"):
        batch.update(deadline=timedelta(seconds=-60))
    with pytest.raises(errors.InvalidArgument, match="needs a time zone"):
        batch.update(deadline=datetime(2099, 5, 4))  # noqa: DTZ001


def test_a_lowered_tolerance_cancels(client: Client, batch: BatchHandle) -> None:
    assert batch.ids is not None
    client.fail(batch.ids[0])
    cancelled = batch.update(tolerated_failures=0, on_exceeded="cancel", idempotency_key="lower")
    assert (cancelled.state, cancelled.exceeded) == ("cancelled", True)
    assert batch.update(tolerated_failures=0, on_exceeded="cancel", idempotency_key="lower") == cancelled
    with pytest.raises(errors.BatchEnded):
        batch.update(labels={})


def test_the_async_client_does_the_same(way: Way, batch: BatchHandle) -> None:
    async def run() -> None:
        async with way.async_client() as client:
            handle = client.batch(batch.id)
            updated = await handle.update(labels={"team": None}, on_exceeded="cancel")
            assert (updated.labels, updated.on_exceeded) == ({"trial": ""}, "cancel")
            assert (await handle.update(on_exceeded=None)).on_exceeded == "continue"
            assert handle.info.deadline == DEADLINE

    asyncio.run(run())


def test_an_operator_updates_on_the_command_line(service_url: str, client: Client, batch: BatchHandle) -> None:
    def run(*options: str) -> str:
        process = lastbit(service_url, "update", str(batch.id), *options)
        assert process.returncode == 0, process.stderr
        return process.stdout

    assert "tolerates  1 failure and 5 %; is cancelled beyond them" in run(
        *("--tolerated-failures", "1", "--tolerated-failure-percentage", "5", "--on-exceeded", "cancel")
    )
    assert "deadline" not in run("--deadline", "none", "--label", "run:2", "--remove-label", "trial")
    output = json.loads(run("--tolerated-failures", "none", "--deadline", "2099-05-04T17:30Z", "--json"))
    assert (output["labels"], output["tolerated_failures"]) == ({"team": "search", "run": "2"}, None)
    assert (output["tolerated_failure_percentage"], output["deadline"]) == (5, "2099-05-04T17:30:00Z")
    for options, complaint in (([], "says what to change"), (["--deadline", "soon"], "is not a deadline")):
        process = lastbit(service_url, "update", str(batch.id), *options)
        assert process.returncode == 2
        assert complaint in process.stderr
