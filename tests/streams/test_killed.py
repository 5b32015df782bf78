"""A process that handles a stream dies at its every point, and another one goes on from what was stored."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lastbit.streams import Snapshot
from tests.streams.dying_stream import KEYS, LOG, stored
from tests.support.servers import ROOT

LIVES = 8


def start(folder: Path, point: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.streams.dying_stream", str(folder), str(point)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def handled(folder: Path) -> list[int]:
    file = folder / "handled"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def check(folder: Path, before: list[int], known: Snapshot) -> None:
    """What a life has left behind: `before` is what had been handled when it began, `known` was stored by then."""
    now = handled(folder)
    mine = now[len(before) :]
    assert len(mine) == len(set(mine)), "one life handled a record twice"
    assert not [offset for offset in mine if known.done(offset)], "replayed, though it was known to be done"
    seen = set(before)
    for offset in mine:
        earlier = [each for each in LOG if each < offset and each % KEYS == offset % KEYS]
        assert seen.issuperset(earlier), f"{offset} was handled before an earlier one of its key"
        seen.add(offset)
    after = stored(folder)
    assert after.floor >= known.floor, "the floor went back"
    assert seen.issuperset(offset for offset in LOG if after.done(offset)), "a record was skipped"


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_whose_process_dies_at_any_point_is_handled_at_least_once_and_in_order(
    tmp_path: Path, seed: int
) -> None:
    """By `os._exit`, at points that are drawn, until one life gets to the end: nothing is skipped, each key is in
    order, and what is replayed was outstanding."""
    chance = random.Random(seed)
    places = set()
    for life in range(LIVES + 1):
        before, known = handled(tmp_path), stored(tmp_path)
        process = start(tmp_path, chance.randrange(3, 250) if life < LIVES else -1)
        out, trouble = process.communicate(timeout=60)
        assert process.returncode in (0, 9), trouble
        places.add(out)
        check(tmp_path, before, known)
    assert "the end" in places
    assert len(places) > 2, "it died at one place only"
    assert set(handled(tmp_path)) == set(LOG)
    assert stored(tmp_path) == Snapshot(LOG[-1], LOG[-1])


def test_a_stream_that_is_killed_goes_on(tmp_path: Path) -> None:
    """By SIGKILL, as soon as something more was handled."""
    for _ in range(3):
        before, known = handled(tmp_path), stored(tmp_path)
        process = start(tmp_path, -1)
        while len(handled(tmp_path)) < len(before) + 20 and process.poll() is None:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        check(tmp_path, before, known)
    before, known = handled(tmp_path), stored(tmp_path)
    out, trouble = start(tmp_path, -1).communicate(timeout=60)
    assert out == "the end", trouble
    check(tmp_path, before, known)
    assert set(handled(tmp_path)) == set(LOG)
