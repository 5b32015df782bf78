"""A topic as a folder: a file for each partition, a line for each message, whose offset is its line's number.

As much of a broker as this needs: it appends, keeps the order, and remembers what a reader has committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Message(NamedTuple):
    offset: int
    value: Any
    header: str | None


class Topic:
    def __init__(self, folder: Path, name: str, partitions: int) -> None:
        self.name = name
        self._files = [folder / f"{name}-{partition}" for partition in range(partitions)]
        for file in self._files:
            file.touch()

    @property
    def partitions(self) -> int:
        return len(self._files)

    def mend(self) -> None:
        """For its one publisher, before it begins: one that died in the middle of a line has not published it."""
        for file in self._files:
            content = file.read_bytes()
            with file.open("r+b") as opened:
                opened.truncate(content.rfind(b"\n") + 1)

    def publish(self, partition: int, value: Any, header: str | None = None) -> None:
        with self._files[partition].open("a") as file:
            file.write(json.dumps([value, header]) + "\n")

    def read(self, partition: int, start: int) -> Iterator[Message]:
        """What is there from an offset on."""
        lines = self._files[partition].read_bytes().splitlines(keepends=True)
        for offset, line in enumerate(lines[start:], start):
            if line.endswith(b"\n"):
                yield Message(offset, *json.loads(line))

    def read_in_turns(self, starts: list[int]) -> Iterator[tuple[int, Message]]:
        """All partitions, a message of each in its turn, with its partition."""
        readers = {partition: self.read(partition, start) for partition, start in enumerate(starts)}
        while readers:
            for partition in list(readers):
                message = next(readers[partition], None)
                if message is None:
                    del readers[partition]
                else:
                    yield partition, message


class Committed:
    """Up to where each partition is done with: the offset at which to begin when one comes back."""

    def __init__(self, file: Path, partitions: int) -> None:
        self._file = file
        self.starts: list[int] = json.loads(file.read_text()) if file.exists() else [0] * partitions

    def commit(self, starts: list[int]) -> None:
        self.starts = list(starts)
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps(self.starts))
        draft.replace(self._file)
