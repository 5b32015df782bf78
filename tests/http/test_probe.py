"""Reads of the database for probes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from core import errors
from core.probe import Probe


def test_callers_share_a_read_that_is_in_progress() -> None:
    started, may_end = threading.Semaphore(0), threading.Event()

    def read() -> str:
        started.release()
        assert may_end.wait(60)
        return "read"

    probe = Probe("test", read, patience=60)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(probe.result)
        assert started.acquire(timeout=60)
        second = pool.submit(probe.result)
        may_end.set()
        assert (first.result(), second.result()) == ("read", "read")


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_probe_may_ask_for_the_head_alone(sqlite_http: httpx.Client, path: str) -> None:
    """As some monitors and load balancers do."""
    full, head = sqlite_http.get(path), sqlite_http.head(path)
    assert (head.status_code, head.content) == (full.status_code, b"") == (200, b"")
    assert head.headers["content-length"] == full.headers["content-length"]


def test_a_silent_database_is_not_waited_for_twice() -> None:
    """The second caller's time began with the read."""
    may_end = threading.Event()
    probe = Probe("test", lambda: may_end.wait(60), patience=0.01)
    try:
        for _ in range(2):
            with pytest.raises(errors.Unavailable, match=r"has not answered within 0\.01 seconds"):
                probe.result()
    finally:
        may_end.set()


def test_without_a_thread_for_it_a_read_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    probe = Probe("test", lambda: "read", patience=60)
    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", refuse)
        with pytest.raises(errors.Unavailable, match="no more threads"):
            probe.result()
    assert probe.result() == "read"
