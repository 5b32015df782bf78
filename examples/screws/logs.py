"""A minimal broker: a topic is a folder with a file per partition. A message is a line, its offset the line's number.

It appends, keeps the order, and stores the offsets that a reader commits.
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
        """Remove an incomplete last line, which a publisher left when it crashed. Called by the only publisher."""
        for file in self._files:
            content = file.read_bytes()
            with file.open("r+b") as writer:
                writer.truncate(content.rfind(b"\n") + 1)

    def publish(self, partition: int, value: Any, header: str | None = None) -> None:
        with self._files[partition].open("a") as file:
            file.write(json.dumps([value, header]) + "\n")

    def read(self, partition: int, start: int) -> Iterator[Message]:
        """The messages from an offset on."""
        lines = self._files[partition].read_bytes().splitlines(keepends=True)
        for offset, line in enumerate(lines[start:], start):
            if line.endswith(b"\n"):
                yield Message(offset, *json.loads(line))

    def read_in_turns(self, starts: list[int]) -> Iterator[tuple[int, Message]]:
        """Yields (partition, message) from all partitions in turn."""
        readers = {partition: self.read(partition, start) for partition, start in enumerate(starts)}
        while readers:
            for partition in list(readers):
                message = next(readers[partition], None)
                if message is None:
                    del readers[partition]
                else:
                    yield partition, message


class Committed:
    """The committed offsets: where a restarted reader begins in each partition."""

    def __init__(self, file: Path, partitions: int) -> None:
        self._file = file
        self.starts: list[int] = json.loads(file.read_text()) if file.exists() else [0] * partitions

    def commit(self, starts: list[int]) -> None:
        self.starts = list(starts)
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps(self.starts))
        draft.replace(self._file)
