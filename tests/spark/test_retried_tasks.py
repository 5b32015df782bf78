"""Tasks that die after a call was applied and its answer lost: Spark repeats each from its start."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lastbit import Client
from tests.spark.conftest import submit
from tests.spark.dying_tasks import GROUP_SIZE
from tests.support.servers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark")]

SCRIPT = ROOT / "tests" / "spark" / "dying_tasks.py"


class LosesAnswers:
    """A proxy in front of the service that loses the answers to the third and the eighth call with content."""

    def __init__(self, real: httpx.Client) -> None:
        self.calls: list[Any] = []
        self._real = real
        self._lock = threading.Lock()

    def __call__(self, seen: Any) -> Any:
        content = seen.body.get("groups") or seen.body.get("entries")
        answer = self._real.request(seen.method, seen.path, json=seen.body)
        with self._lock:
            if content:
                self.calls.append(content)
            lost = content and len(self.calls) in (3, 8)
        return None if lost else (answer.status_code, {}, answer.json())


@pytest.fixture
def proxy(service_url: str, scripted_service: Any) -> Iterator[LosesAnswers]:
    with httpx.Client(base_url=service_url, timeout=60) as real:
        scripted_service.reply = LosesAnswers(real)
        yield scripted_service.reply


def report_of(zipped: Path, *arguments: str) -> Any:
    process = submit(zipped, SCRIPT, *arguments, spark_master="local[2,3]")
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout)


def test_a_repeated_task_acks_nothing_twice(
    client: Client, scripted_service: Any, proxy: LosesAnswers, sdk_zip: Path
) -> None:
    """The second attempt sends groups that the first one has sent, and each item counts once."""
    count = 30 * GROUP_SIZE
    batch = client.open(items=count, group_size=GROUP_SIZE, sealed=True)
    report = report_of(sdk_zip, scripted_service.url, str(count), "--batch", str(batch.id))
    sent = [mask["group"] for masks in proxy.calls for mask in masks]
    assert set(sent) == set(range(30))
    assert len(sent) > 30
    assert (report["rows"], report["items"], report["completed"]) == (count, count, [batch.id])
    assert report["applied"] + report["repeated"] == count
    assert (batch.refresh().acked, batch.succeeded, batch.verify().ok) == (count, True, True)


def test_a_repeated_task_counts_nothing_twice(
    client: Client, scripted_service: Any, proxy: LosesAnswers, sdk_zip: Path
) -> None:
    """The second attempt sends messages that the first one has sent, and each counts once."""
    report = report_of(sdk_zip, scripted_service.url, "1000")
    assert report["entries"] == report["applied"] + report["repeated"] == 1000
    assert report["repeated"] >= 50
    expected = {f"k{n}": sum(number % 5 for number in range(1000) if number % 7 == n) for n in range(7)}
    assert {total.key: total.value for total in client.tally("retried").totals()} == expected
