"""An item is resolved by the outcome of a block of code."""

from __future__ import annotations

import asyncio
import logging

import pytest

from lastbit import AsyncClient, Client
from lastbit.integrations import Failed, Skipped, resolving, resolving_async
from tests.integrations.workers import reasons


def test_a_block_that_ends_acks_its_item(client: Client) -> None:
    """The ack is committed when the block is left."""
    batch = client.open(items=1, sealed=True)
    with resolving(client, batch.ids[0]):
        assert batch.refresh().pending == 1
    assert batch.refresh().succeeded


@pytest.mark.parametrize("kind", [ValueError, Failed])
def test_the_last_attempt_fails_the_item(client: Client, kind: type[Exception]) -> None:
    """The exception is the reason, and continues."""
    batch = client.open(items=1)
    with pytest.raises(kind), resolving(client, batch.ids[0]):
        raise kind("no picture")
    assert reasons(batch) == {batch.ids[0]: "no picture" if kind is Failed else "ValueError: no picture"}


class Wordless(Exception):
    """As an exception that lost an attribute when it was unpickled."""

    def __str__(self) -> str:
        raise AttributeError("message")


@pytest.mark.parametrize("error", [Wordless(), Failed(Wordless())], ids=["an exception", "the reason of Failed"])
def test_an_exception_that_has_no_text_fails_its_item(client: Client, error: Exception) -> None:
    """Its type is the reason, and it continues."""
    batch = client.open(items=1)
    with pytest.raises(type(error)) as caught, resolving(client, batch.ids[0]):
        raise error
    assert caught.value is error
    assert reasons(batch) == {batch.ids[0]: "Wordless"}


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_item_is_pending_until_the_next_attempt(client: Client, kind: type[BaseException]) -> None:
    """Also when the process is told to end, even in the last attempt."""
    batch = client.open(items=1)
    with pytest.raises(kind), resolving(client, batch.ids[0], final=kind is not ValueError):
        raise kind
    assert batch.refresh().pending == 1


def test_failed_needs_no_further_attempt(client: Client) -> None:
    """A reason is optional."""
    batch = client.open(items=1)
    with pytest.raises(Failed) as failure, resolving(client, batch.ids[0], final=False):
        raise Failed
    assert str(failure.value) == ""
    assert batch.refresh().failed == 1
    assert reasons(batch) == {}


@pytest.mark.parametrize("reason", [None, "not in the catalog any more"])
def test_skipped_skips_the_item_and_only_ends_the_block(client: Client, reason: str | None) -> None:
    """In any attempt."""
    batch = client.open(items=2, sealed=True)
    with resolving(client, batch.ids[0], final=False):
        raise Skipped(reason)

    async def skip() -> None:
        async with AsyncClient(client.url) as service, resolving_async(service, batch.ids[1]):
            raise Skipped(reason)

    asyncio.run(skip())
    assert (batch.refresh().skipped, batch.info.succeeded) == (2, True)
    assert {reason for span in batch.skipped() for reason in span.reasons.values()} == ({reason} if reason else set())


def test_a_long_reason_is_cut(client: Client) -> None:
    """The service refuses more than 4,000 characters."""
    batch = client.open(items=1)
    with pytest.raises(ValueError, match="x"), resolving(client, batch.ids[0]):
        raise ValueError("x" * 5000)
    assert len(reasons(batch)[batch.ids[0]]) == 4000


def test_an_item_of_a_cancelled_batch_is_logged(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """The task has ended; to run it again would not help."""
    batch = client.open(items=1)
    batch.cancel()
    with caplog.at_level(logging.WARNING, "lastbit.integrations"), resolving(client, batch.ids[0]):
        pass
    assert caplog.messages == [f"item {batch.ids[0]} was rejected: its batch was cancelled (cancelled)"]


def test_an_item_under_which_the_block_opens_a_batch_is_left_to_it(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the block raises. No warning alarms anybody: the nested batch resolves it."""
    batch = client.open(items=2, sealed=True)
    with caplog.at_level(logging.INFO, "lastbit.integrations"):
        with resolving(client, batch.ids[0]):
            done = client.open(items=1, sealed=True, parent=batch.ids[0])
        other = client.open(items=1, sealed=True, parent=batch.ids[1])
        with pytest.raises(ValueError, match="broken"), resolving(client, batch.ids[1]):
            raise ValueError("broken")
    assert (batch.refresh().pending, caplog.messages) == (2, [])
    client.ack([done.ids[0], other.ids[0]])
    assert batch.refresh().succeeded


def test_coroutines_resolve_items_too(service_url: str) -> None:
    """Acked, failed, or pending after a cancellation."""

    async def run() -> None:
        async with AsyncClient(service_url) as client:
            batch = await client.open(items=4)
            async with resolving_async(client, batch.ids[0]):
                pass
            with pytest.raises(ValueError, match="no picture"):
                async with resolving_async(client, batch.ids[1]):
                    raise ValueError("no picture")
            with pytest.raises(ValueError, match="later"):
                async with resolving_async(client, batch.ids[2], final=False):
                    raise ValueError("later")
            with pytest.raises(asyncio.CancelledError):
                async with resolving_async(client, batch.ids[3]):
                    raise asyncio.CancelledError
            info = await batch.refresh()
            assert (info.acked, info.failed, info.pending) == (1, 1, 2)

    asyncio.run(run())
