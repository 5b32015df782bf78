"""The Dockerfile, parsed as tests need it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.servers import ROOT


@dataclass
class Stage:
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def instructions() -> Iterator[tuple[str, str]]:
    """Yield (instruction, arguments) of the Dockerfile, with continuation lines joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    for line in text.splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest


def stages() -> list[Stage]:
    """The instructions after each FROM; the last stage is the image."""
    result: list[Stage] = []
    for word, rest in instructions():
        if word == "FROM":
            _, _, name = rest.partition(" AS ")
            result.append(Stage(name))
        elif result:
            result[-1].steps.append((word, rest))
    return result


def copied() -> list[str]:
    """All files that are copied from the context."""
    return [
        source
        for instruction, rest in instructions()
        if instruction == "COPY" and "--from" not in rest
        for source in shlex.split(rest)[:-1]
    ]


def let_in() -> list[str]:
    """The files that .dockerignore lets into the build, as paths from the root."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    return [line[1:].rstrip("/") for line in lines if line.startswith("!")]
