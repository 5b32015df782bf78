"""A cancel at half of a fan-out, with four workers that are processes: they stop at most two seconds later, although
the batch is three levels below the one that is cancelled, and whether or not the service is killed in between."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lastbit import BatchHandle, Client
from tests.integrations.killable import Process
from tests.integrations.test_crawls import IN_GROUPS
from tests.integrations.workers import wait_until
from tests.support.servers import ServiceProcess, running_service, sqlite_file

WORKERS = 4
LEVELS = 3
PATIENCE = 900


@pytest.fixture
def service() -> Iterator[ServiceProcess]:
    """For this test only, which may kill it."""
    with sqlite_file() as url, running_service(url) as service:
        yield service


class Scene:
    """A batch with a message for each item, three levels below another one, and workers."""

    def __init__(self, real_queue: tuple[str, str, str], client: Client, folder: Path, count: int) -> None:
        self.notes = folder / "notes"
        self.notes.touch()
        self._arguments = (*real_queue, str(self.notes))
        self._url = client.url
        self.levels = [client.open(items=1, sealed=True)]
        for _ in range(LEVELS - 1):
            self.levels.append(client.open(items=1, sealed=True, parent=self.levels[-1].ids[0]))
        self.workers: list[Process] = []
        self.levels.append(self.send(client, "many", count, TESTS_PARENT=self.levels[-1].ids[0]))
        self.workers += [Process("note", *self._arguments, LASTBIT_URL=self._url) for _ in range(WORKERS)]

    def send(self, client: Client, key: str, count: int, **environment: str) -> BatchHandle:
        """Fan out a message for each item of a new batch, in a process."""
        settings = {"TESTS_KEY": key, "TESTS_ROOTS": str(count), "LASTBIT_URL": self._url}
        producer = Process("produce", *self._arguments, **settings, **environment)
        try:
            wait_until(producer.has_ended, "the messages are sent", PATIENCE)
        finally:
            producer.kill()
        return client.batch(next(client.batches(key=key)).id)

    def starts(self, batch: int) -> list[tuple[float, bool]]:
        """When handlers of the batch began, and whether they knew of its end then."""
        lines = (line.split() for line in self.notes.read_text().splitlines())
        return [(float(start), flag == "1") for number, start, flag in lines if int(number) == batch]


def cancel(batch: BatchHandle, service: ServiceProcess, dies: bool) -> None:
    """With all that is below. If the service dies in the middle of it, the client asks again."""
    with ThreadPoolExecutor(1) as executor:
        answer = executor.submit(batch.cancel, children=True, reason="wrong")
        if dies:
            time.sleep(random.uniform(0, 0.1))  # the moment of the kill
            service.stop(signal.SIGKILL)
            service.start()
        assert answer.result(60).state == "cancelled"


def check_stop(real_queue: tuple[str, str, str], service: ServiceProcess, folder: Path, count: int, dies: bool) -> None:
    with Client(service.url) as client:
        scene = Scene(real_queue, client, folder, count)
        top, batch = scene.levels[0], scene.levels[-1]
        try:
            wait_until(lambda: batch.refresh().acked >= count // 2, "half of the messages are handled", PATIENCE)
            call_time = time.monotonic()
            cancel(top, service, dies)
            cancel_time = time.monotonic()
            wait_until(lambda: all(level.refresh().ended for level in scene.levels), "all levels have ended", 30)
            end_delay = time.monotonic() - cancel_time
            assert scene.send(client, "other", 200).wait(PATIENCE).succeeded
        finally:
            for worker in scene.workers:
                worker.kill()
        states = [level.refresh().state for level in scene.levels]
        acked = batch.info.acked
    starts = scene.starts(batch.id)
    delay = max((start - cancel_time for start, is_known in starts if not is_known), default=0.0)
    known_count = sum(is_known for _, is_known in starts)
    print(
        f"{real_queue[0]}: {acked:,} of {count:,} acked; the cancel took {cancel_time - call_time:.2f} s, all levels"
        f" had ended {end_delay:.2f} s later; {len(starts):,} handled, the last {delay:.2f} s later, {known_count} by"
        " workers that knew of it"
    )
    assert states == ["cancelled"] * (LEVELS + 1)
    assert end_delay < 2
    assert delay < 2
    assert known_count <= WORKERS


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dies", [False, True], ids=["alive", "killed"])
@pytest.mark.parametrize("real_queue", IN_GROUPS.values(), indirect=True)
def test_ten_thousand_messages_stop_at_half(
    real_queue: tuple[str, str, str], service: ServiceProcess, tmp_path: Path, dies: bool
) -> None:
    """Two seconds after the answer to the cancel at the latest, also if the service is killed in the middle of it."""
    check_stop(real_queue, service, tmp_path, 10_000, dies)


@pytest.mark.slow
@pytest.mark.parametrize("real_queue", ["kafka"], indirect=True)
def test_a_few_messages_stop_at_half(real_queue: tuple[str, str, str], service: ServiceProcess, tmp_path: Path) -> None:
    check_stop(real_queue, service, tmp_path, 2000, dies=True)
