"""HTTP load that records the answers, so that a test can compare them with the database afterwards.

Each thread opens its own batches and acks their items one by one. In between it acks items of a batch that all threads
share. A request that got no answer, or a 503, is sent again under its Idempotency-Key until it is answered.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from core.batches.batch import Opening
from core.batches.ranges import Range
from core.commits.combiner import Inline
from core.service import Service
from core.storage.database import Database

OWN = 6
"""Items in a thread's own batch."""
SHARED = 10**7
GROUP = 64


class _Stopped(Exception):  # a signal, not an error
    pass


class Load:
    """`with load:` runs the threads. The public attributes record the answers."""

    def __init__(self, url: str, shared_batch: int, *, threads: int = 4, timeout: float = 20) -> None:
        self.url = url
        self.shared = shared_batch
        self.opened: set[int] = set()
        self.acked: dict[int, set[int]] = {}
        """Batch id → item numbers whose acks got a 200."""
        self.answered = 0
        """The number of acks that got a 200."""
        self.finished: list[int] = []
        """Batches all of whose acks were answered."""
        self.newly: Counter[int] = Counter()
        self.statuses: Counter[int] = Counter()
        self.lost = 0
        """Requests that were sent and got no answer."""
        self._timeout = timeout
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._pause = threading.Event()
        self._changed = threading.Condition()
        self._trouble: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pause.set()
        for thread in self._threads:
            thread.join()
        assert not self._trouble, self._trouble

    def reaches(self, count: int, seconds: float = 60) -> None:
        """Wait until `count` more acks have got a 200."""
        with self._changed:
            goal = self.answered + count
            reached_goal = self._changed.wait_for(lambda: self.answered >= goal or bool(self._trouble), seconds)
        assert not self._trouble, self._trouble
        assert reached_goal, f"{goal - self.answered} acks of {count} are missing after {seconds} s: {self.statuses}"

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until the condition holds; it is checked after each answer and each lost request."""
        with self._changed:
            assert self._changed.wait_for(condition, seconds), (self.statuses, self.lost)

    def _run(self) -> None:
        try:
            with httpx.Client(timeout=self._timeout) as client:
                while not self._stop.is_set():
                    self._batch(client)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again in the test's own thread
            with self._changed:
                self._trouble.append(error)
                self._changed.notify_all()

    def _target(self) -> str:
        """The URL of the service that gets the next request."""
        return self.url

    def _batch(self, client: httpx.Client) -> None:
        batch: int = self._ask(client, "/v1/batches", {"items": OWN, "sealed": True, "group_size": GROUP})["id"]
        self.opened.add(batch)
        for number in range(OWN):
            self._ack(client, batch, number)
            self._ack(client, self.shared, next(self._numbers))
        self.finished.append(batch)

    def _ack(self, client: httpx.Client, batch: int, number: int) -> None:
        answer = self._ask(client, "/v1/acks", {"items": [f"{batch}:{number // GROUP}:{number % GROUP}"]})
        assert answer["applied"] + answer["repeated"] == 1, answer
        with self._changed:
            self.acked.setdefault(batch, set()).add(number)
            self.answered += 1
            self.newly.update(entry["batch"] for entry in answer["completed"] if entry["newly"])
            self._changed.notify_all()

    def _ask(self, client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        while not self._stop.is_set():
            response = None
            losses = 0
            try:
                response = client.post(self._target() + path, json=body, headers=headers)
            except httpx.ConnectError:
                pass  # the request got no answer
            except httpx.TransportError:
                losses = 1
            with self._changed:
                self.lost += losses
                if response is not None:
                    self.statuses[response.status_code] += 1
                self._changed.notify_all()
            if response is not None and response.status_code in (200, 201):
                answer: dict[str, Any] = response.json()
                return answer
            assert response is None or response.status_code == 503, response.text
            self._pause.wait(0.02)  # retry an unreachable service soon, but not in a busy loop
        raise _Stopped


def open_shared(database: Database) -> int:
    """Open the batch that all threads share."""
    return Service(database, combiner=Inline).batches.open(Opening(items=SHARED, group_size=GROUP)).batch.id


def _pending(service: Service, batch: int) -> Iterator[Range]:
    start: int | None = 0
    while start is not None:
        _, page = service.batches.ranges(batch, "pending", start, 1000)
        yield from page.ranges
        start = page.next


def check(load: Load, database: Database) -> None:
    """No answer contradicts the database: every request that got a 200 is stored once, and the counts agree."""
    assert load.finished
    service = Service(database, combiner=Inline)
    for batch in (*load.opened, load.shared):
        acked = sorted(load.acked.get(batch, ()))
        for pending in _pending(service, batch):
            first = bisect.bisect_left(acked, pending.start)
            assert first == len(acked) or acked[first] >= pending.end, f"{batch}: {acked[first]} is acked, and pending"
        assert service.batches.verify(batch).ok
    for batch in load.finished:
        assert service.batches.get(batch).succeeded
        assert load.newly[batch] == 1, f"batch {batch} was completed by {load.newly[batch]} calls"
