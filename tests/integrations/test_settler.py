"""What the adapters of task queues share, and with it the resolver of all adapters: outages without new threads."""

from __future__ import annotations

import threading

import pytest

from lastbit import Client, Retry
from lastbit.integrations import _resolver
from lastbit.integrations._resolver import Verb
from lastbit.integrations._settler import Resolution, Settler
from tests.integrations.workers import wait_until
from tests.mutants import mutant
from tests.support.servers import running_service, sqlite_file
from tests.support.threads import no_more_threads, no_thread_left


def new_settler(client: Client, threads: int = 1) -> Settler:
    return Settler(client, lambda error: pytest.fail(str(error)), threads=threads, linger=0.02)


def test_items_are_sent_again_by_one_thread(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However many wait while the service is away. A thread for each might not be startable. All are resolved when it
    is back."""
    monkeypatch.setattr(_resolver, "PAUSE", 0.5)
    removed: list[str] = []
    with (
        sqlite_file() as url,
        running_service(url) as service,
        Client(service.url, retry=Retry(attempts=1)) as client,
    ):
        batch = client.open(items=300, sealed=True)
        service.stop(9)
        settler = new_settler(client)
        settler.start()
        threads = threading.active_count()
        for item in batch.ids:
            settler.settle([Resolution(item)], lambda: removed.append("message"))
        wait_until(lambda: "sent again" in caplog.text, "a call has failed")
        assert threading.active_count() <= threads + 1  # the acker's
        service.start()
        assert settler.drain(30)
        assert batch.refresh().acked == len(removed) == 300
    lines = [record for record in caplog.records if "sent again" in record.getMessage()]
    assert len(lines) < 100


@mutant(
    "a-skipped-item-is-acked-by-its-message",
    "lastbit.integrations._resolver:Resolver._send",
    'receiver.verb == "skip"',
    "False",
)
@mutant(
    "a-message-that-skips-its-item-stays",
    "lastbit.integrations._settler:Settler.settle",
    "self._resolver.skip(item, resolution.reason)",
    "pass",
)
def test_each_item_ends_as_its_resolution_says() -> None:
    """And its message is removed."""
    removed: list[str] = []
    with sqlite_file() as url, running_service(url) as service, Client(service.url) as client:
        batch = client.open(items=3, sealed=True)
        settler = new_settler(client)
        settler.start()
        verbs: list[Verb] = ["ack", "fail", "skip"]
        resolutions = [Resolution(item, verb, verb) for item, verb in zip(batch.ids, verbs, strict=True)]
        settler.settle(resolutions, lambda: removed.append("message"))
        assert settler.drain(30)
        assert (batch.refresh().acked, batch.info.failed, batch.info.skipped, removed) == (1, 1, 1, ["message"])
        assert [ended.reasons for ended in batch.skipped()] == [{batch.ids[2]: "skip"}]


@mutant("an-outage-needs-a-new-thread", "lastbit.integrations._resolver:Resolver.start", "self._again.start()", "pass")
def test_items_are_sent_again_though_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When the first item ends, and in each of two outages."""
    monkeypatch.setattr(_resolver, "PAUSE", 0.05)
    removed: list[str] = []
    with (
        sqlite_file() as url,
        running_service(url) as service,
        Client(service.url, retry=Retry(attempts=1)) as client,
    ):
        batch = client.open(items=3, sealed=True)
        settler = new_settler(client)
        settler.start()
        for number, item in enumerate(batch.ids):
            if number:
                service.stop(9)
            caplog.clear()
            with no_more_threads():
                settler.settle([Resolution(item)], lambda item=item: removed.append(item))  # type: ignore[misc]
                wait_until(lambda: "sent again" in caplog.text, "a call has failed")
            if number:
                service.start()
            assert settler.drain(10)
        assert batch.refresh().acked == 3
    assert removed == list(batch.ids)


@pytest.mark.parametrize("started", range(3))
def test_a_settler_that_may_start_too_few_threads_ends(started: int) -> None:
    with (
        Client("http://127.0.0.1:1") as client,
        no_thread_left(),
        pytest.raises(RuntimeError, match="can't start new thread"),
        no_more_threads(after=started),
    ):
        new_settler(client, threads=2).start()
