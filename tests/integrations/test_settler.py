"""What Dramatiq and RQ share: items are resolved before their messages are removed."""

from __future__ import annotations

import threading

import pytest

from lastbit import Client, Retry
from lastbit.integrations import _settler
from lastbit.integrations._settler import Resolution, Settler
from tests.integrations.workers import wait_until
from tests.mutants import mutant
from tests.support.servers import running_service, sqlite_file
from tests.support.threads import no_more_threads, no_thread_left


def test_items_are_sent_again_by_one_thread(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However many wait while the service is away. A thread for each might not be startable. All are resolved when it
    is back."""
    monkeypatch.setattr(_settler, "PAUSE", 0.5)
    removed: list[str] = []
    with (
        sqlite_file() as url,
        running_service(url) as service,
        Client(service.url, retry=Retry(attempts=1)) as client,
    ):
        batch = client.open(items=300, sealed=True)
        service.stop(9)
        settler = Settler(client.acker(linger=0.02), threads=1)
        threads = threading.active_count()
        for item in batch.ids:
            settler.settle(Resolution(item), lambda: removed.append("message"), None, None)
        wait_until(lambda: "sent again" in caplog.text, "a call has failed")
        assert threading.active_count() <= threads + 1  # the acker's
        service.start()
        assert settler.drain(30)
        assert batch.refresh().acked == len(removed) == 300
    lines = [record for record in caplog.records if "sent again" in record.getMessage()]
    assert len(lines) < 100


@mutant(
    "a-held-item-alarms-people",
    "lastbit.integrations._resolving:level_of",
    'getattr(rejection, "reason", None) == HELD',
    "False",
)
def test_the_message_of_a_held_item_is_removed(service_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The nested batch resolves it, so nobody is warned."""
    removed: list[str] = []
    with Client(service_url) as client, client.acker() as acker:
        batch = client.open(items=2, sealed=True)
        for item in batch.ids:
            client.open(items=1, sealed=True, parent=item)
        settler = Settler(acker, threads=1)
        for resolution in (Resolution(batch.ids[0]), Resolution(batch.ids[1], failed=True, reason="late")):
            settler.settle(resolution, lambda: removed.append("message"), None, None)
        assert settler.drain(30)
        assert (len(removed), batch.refresh().pending, caplog.messages) == (2, 2, [])


@pytest.mark.parametrize("started", range(3))
def test_a_settler_that_may_start_too_few_threads_ends(started: int) -> None:
    with (
        Client("http://127.0.0.1:1") as client,
        no_thread_left(),
        pytest.raises(RuntimeError, match="can't start new thread"),
        no_more_threads(after=started),
    ):
        Settler(client.acker(), threads=2)
