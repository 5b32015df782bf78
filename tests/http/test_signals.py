"""What a process measures of itself: worst values of a time, and those of several workers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from api import memory, metrics, signals
from api.signals import Delay, WallClock, Worst
from tests.mutants import mutant
from tests.support.exposition import eventually, value
from tests.support.servers import running_service


@mutant("small-values-hide-larger-ones", "api.signals:Worst.add", "self._values[-1][1] <= value", "True")
@mutant("old-values-are-kept", "api.signals:Worst.get", "at - self._values[0][0] > self._seconds", "False")
@pytest.mark.parametrize(
    ("added", "at", "worst"),
    [
        ([], 5, 0),
        ([(0, 3)], 5, 3),
        ([(0, 3), (1, 2)], 5, 3),
        ([(0, 2), (1, 3)], 5, 3),
        ([(0, 3), (4, 2)], 12, 2),
        ([(0, 3), (4, 2)], 20, 0),
    ],
)
def test_the_largest_value_of_the_last_ten_seconds(
    added: Sequence[tuple[float, float]], at: float, worst: float
) -> None:
    values = Worst(10)
    for moment, number in added:
        values.add(moment, number)
    assert values.get(at) == worst


@mutant(
    "a-wait-in-progress-does-not-count",
    "api.signals:Delay.longest",
    "0.0 if began is None else at - began",
    "0.0",
)
def test_a_wait_counts_while_it_lasts_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 103.0, 105.0, 106.0, 170.0])
    monkeypatch.setattr(signals.time, "monotonic", lambda: next(moments))
    delay = Delay()
    assert delay.begin()
    assert not delay.begin()
    assert delay.longest() == 3
    delay.end()
    assert delay.longest() == 5
    assert delay.longest() == 0


@mutant(
    "a-clock-that-is-set-back-is-not-noticed",
    "api.signals:WallClock.largest_step",
    "abs(ahead - self._ahead) > STEP",
    "ahead - self._ahead > STEP",
)
@mutant("an-interruption-is-a-step", "api.signals:WallClock.largest_step", "at - before < INTERRUPTED", "True")
@pytest.mark.parametrize(
    ("readings", "step"),
    [
        ([(0, 1000, 0), (1, 1001, 1)], 0),
        ([(0, 1000, 0), (1, 1061, 1)], 60),
        ([(0, 1000, 0), (1, 941, 1)], 60),
        ([(0, 1000, 0), (1, 1001.4, 1)], 0),
        ([(0, 1000, 0), (1, 1001, 4)], 0),  # interrupted after the wall clock was read
    ],
)
def test_a_step_of_the_wall_clock_shows(
    readings: Sequence[tuple[float, float, float]], step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading is that of the monotonic clock, the wall clock, and the monotonic clock again."""
    monotonic = iter([moment for before, _, after in readings for moment in (before, after)])
    wall = iter([moment for _, moment, _ in readings])
    monkeypatch.setattr(signals.time, "monotonic", lambda: next(monotonic))
    monkeypatch.setattr(signals.time, "time", lambda: next(wall))
    clock = WallClock()
    assert [clock.largest_step() for _ in readings][-1] == step


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/", ["memory.max"]),
        ("0::/a/b", ["a/b/memory.max", "a/memory.max", "memory.max"]),
        (
            "4:memory:/a\n1:cpu:/b\n0::/",
            ["memory/a/memory.limit_in_bytes", "memory/memory.limit_in_bytes", "memory.max"],
        ),
        ("3:cpuset,memory:/", ["memory/memory.limit_in_bytes"]),
    ],
)
def test_the_limits_of_both_versions_of_control_groups_are_found(groups: str, files: list[str]) -> None:
    assert [str(file.relative_to("/sys/fs/cgroup")) for file in memory._limit_files(groups)] == files


@mutant(
    "gauges-of-dead-workers-are-kept",
    "api.metrics:_forget_gauges_of_dead_workers",
    "mark_process_dead(worker, str(folder))",
    "pass",
)
@mutant(
    "gauges-of-living-workers-are-removed",
    "api.metrics:_forget_gauges_of_dead_workers",
    'not Path(f"/proc/{worker}").exists()',
    "True",
)
def test_only_gauges_of_dead_workers_are_forgotten(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    kept = {f"gauge_livesum_{os.getpid()}.db", f"counter_{os.getpid()}.db", f"counter_{ended.pid}.db"}
    for name in (*kept, f"gauge_livesum_{ended.pid}.db", f"gauge_livemax_{ended.pid}.db"):
        (tmp_path / name).touch()
    metrics._forget_gauges_of_dead_workers(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == kept


def test_gauges_are_those_of_all_workers_that_live(sqlite_url: str, tmp_path: Path) -> None:
    with running_service(sqlite_url, workers=2, TMPDIR=str(tmp_path)) as running:

        def shown(sample: str) -> float:
            with httpx.Client(base_url=running.url, timeout=30) as client:
                return value(client, sample)

        def measured() -> set[int]:
            return {int(file.stem.rpartition("_")[2]) for file in tmp_path.glob("*/gauge_livesum_*.db")}

        eventually(lambda: measured() == set(running.worker_ids()), True)
        eventually(lambda: len(measured()), 2)
        sizes = [
            int(Path(f"/proc/{worker}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for worker in running.worker_ids()
        ]
        eventually(lambda: abs(shown("lastbit_resident_memory_bytes") - sum(sizes)) < min(sizes) / 2, True)
        killed = running.worker_ids()[0]
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: shown("lastbit_memory_limit_bytes") > 0 and killed in measured(), False)
