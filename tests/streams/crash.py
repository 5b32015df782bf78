"""What all sources are held to: a consumer that is killed in the middle, and one that goes on."""

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
"""The record at which the first consumer stays, and the second goes on."""


def records() -> list[tuple[str, int]]:
    """(key, number), the keys mixed; that of HELD has more to come."""
    keys = [random.choice(KEYS) for _ in range(COUNT)]
    keys[-1] = keys[HELD]
    return [(key, number) for number, key in enumerate(keys)]


def killed_and_resumed(source: str, url: str, name: str, folder: Path, published: list[tuple[str, int]]) -> None:
    """Nothing is skipped, the order of each key is kept, and only what was outstanding is begun again."""
    outstanding = [number for key, number in published if key == published[HELD][0] and number >= HELD]
    others = [number for number in range(COUNT) if number not in outstanding]
    first = folder / "first"
    with consumer(source, url, name, first, HELD) as running:
        wait_for_commit(running, len(others))
        running.kill()
    begun, done = notes(first)
    assert sorted(done) == others
    assert sorted(begun) == sorted([*others, HELD])
    second = folder / "second"
    if first.with_suffix(".position").exists():
        first.with_suffix(".position").rename(second.with_suffix(".position"))
    with consumer(source, url, name, second) as running:
        wait_for_commit(running, len(outstanding))
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    begun, again = notes(second)
    assert begun == again == outstanding
    for key in KEYS:
        numbers = [number for number in [*done, *again] if published[number][0] == key]
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
    """Until so many are done, and committed."""
    assert running.stdout is not None
    for line in running.stdout:
        if int(line) >= done:
            return
    raise AssertionError(f"the consumer ended with exit status {running.wait()}")


def notes(file: Path) -> tuple[list[int], list[int]]:
    """What was begun, and what was done."""
    lines = [line.split() for line in file.read_text().splitlines()]
    begun, done = ([int(number) for word, number in lines if word == said] for said in ("begun", "done"))
    return begun, done
