"""The test of every source: one consumer is killed in the middle, and another one continues."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import ROOT

KEYS = ("a", "b", "c", "d")
COUNT = 80
HELD = 30
"""The record at which the first consumer stops and the second continues."""


def records() -> list[tuple[str, int]]:
    """(key, number), with mixed keys; the key of HELD has later records too."""
    keys = [random.choice(KEYS) for _ in range(COUNT)]
    keys[-1] = keys[HELD]
    return [(key, number) for number, key in enumerate(keys)]


def check_kill_and_resume(source: str, url: str, name: str, folder: Path, published: list[tuple[str, int]]) -> None:
    """No record is skipped, the order of each key is kept, and only outstanding records are started again."""
    outstanding = [number for key, number in published if key == published[HELD][0] and number >= HELD]
    other_numbers = [number for number in range(COUNT) if number not in outstanding]
    first = folder / "first"
    with consumer(source, url, name, first, HELD) as running:
        wait_for_commit(running, len(other_numbers))
        running.kill()
    started, finished = notes(first)
    assert sorted(finished) == other_numbers
    assert sorted(started) == sorted([*other_numbers, HELD])
    second = folder / "second"
    if first.with_suffix(".position").exists():
        first.with_suffix(".position").rename(second.with_suffix(".position"))
    with consumer(source, url, name, second) as running:
        wait_for_commit(running, len(outstanding))
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    started, finished_again = notes(second)
    assert started == finished_again == outstanding
    for key in KEYS:
        numbers = [number for number in [*finished, *finished_again] if published[number][0] == key]
        assert numbers == [number for at, number in published if at == key]


@contextlib.contextmanager
def consumer(source: str, url: str, name: str, file: Path, *held: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.streams.consumer", source, url, name, str(file), *map(str, held)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def wait_for_commit(running: subprocess.Popen[str], done: int) -> None:
    """Wait until `done` records are handled and committed."""
    assert running.stdout is not None
    for line in running.stdout:
        if int(line) >= done:
            return
    raise AssertionError(f"the consumer ended with exit status {running.wait()}")


def notes(file: Path) -> tuple[list[int], list[int]]:
    """The numbers of the records that were started, and of those that were handled."""
    lines = [line.split() for line in file.read_text().splitlines()]
    started, finished = (
        [int(number) for word, number in lines if word == expected_word] for expected_word in ("begun", "done")
    )
    return started, finished
