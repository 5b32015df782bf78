"""A process that handles a stream dies at each of its points, and another one continues from the stored snapshot."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from lastbit.streams import Snapshot
from tests.mutants import mutant
from tests.streams.dying_stream import KEYS, LOG, read_snapshot
from tests.support.servers import ROOT

LIVES = 8


def start(folder: Path, point: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.streams.dying_stream", str(folder), str(point)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def handled(folder: Path) -> list[int]:
    file = folder / "handled"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def check(folder: Path, before: list[int], snapshot_before: Snapshot) -> None:
    """Check a life's result: `before` are the records handled when it started, `known` is the snapshot stored by
    then."""
    all_handled = handled(folder)
    handled_here = all_handled[len(before) :]
    assert len(handled_here) == len(set(handled_here)), "one life handled a record twice"
    assert not [offset for offset in handled_here if snapshot_before.done(offset)], "replayed though it was done"
    handled_so_far = set(before)
    for offset in handled_here:
        earlier = [other for other in LOG if other < offset and other % KEYS == offset % KEYS]
        assert handled_so_far.issuperset(earlier), f"{offset} was handled before an earlier one of its key"
        handled_so_far.add(offset)
    snapshot_after = read_snapshot(folder)
    assert snapshot_after.floor >= snapshot_before.floor, "the floor went back"
    assert handled_so_far.issuperset(offset for offset in LOG if snapshot_after.done(offset)), "a record was skipped"


@mutant(
    "records-of-a-key-are-handled-at-once",
    "lastbit.streams._steps:Stream.key_of",
    "return UNORDERED if key is None else key",
    "return UNORDERED",
)
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_whose_process_dies_at_any_point_is_handled_at_least_once_and_in_order(
    tmp_path: Path, seed: int
) -> None:
    """By `os._exit`, at points that are drawn, until one life gets to the end: nothing is skipped, each key is in
    Processes end by `os._exit` at random points until one life reaches the end: no record is skipped, each key is in
    order, and only outstanding records are replayed."""
    chance = random.Random(seed)
    places = set()
    for life in range(LIVES + 1):
        before, snapshot_before = handled(tmp_path), read_snapshot(tmp_path)
        process = start(tmp_path, chance.randrange(3, 250) if life < LIVES else -1)
        output, trouble = process.communicate(timeout=60)
        assert process.returncode in (0, 9), trouble
        places.add(output)
        check(tmp_path, before, snapshot_before)
    assert "the end" in places
    assert len(places) > 2, "it died at one place only"
    assert set(handled(tmp_path)) == set(LOG)
    assert read_snapshot(tmp_path) == Snapshot(LOG[-1], LOG[-1])


def test_a_killed_stream_continues(tmp_path: Path) -> None:
    """By SIGKILL, as soon as another record was handled."""
    for _ in range(3):
        before, snapshot_before = handled(tmp_path), read_snapshot(tmp_path)
        process = start(tmp_path, -1)
        while len(handled(tmp_path)) < len(before) + 20 and process.poll() is None:
            pass
        process.kill()
        process.communicate(timeout=60)
        check(tmp_path, before, snapshot_before)
    before, snapshot_before = handled(tmp_path), read_snapshot(tmp_path)
    output, trouble = start(tmp_path, -1).communicate(timeout=60)
    assert output == "the end", trouble
    check(tmp_path, before, snapshot_before)
    assert set(handled(tmp_path)) == set(LOG)
