"""Libraries in a version that is outside the range of their adapter's extra.

pip keeps to the range if the extra was installed. But a library is often installed by itself, and then an adapter may
meet a version that came out later, and whose changes nobody has seen."""

from __future__ import annotations

import logging
import operator
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Final, NamedTuple

_REQUIREMENT: Final = re.compile(r"""([\w.-]+)(?:\[.*?\])?\s*([<>=!~,.\d\s]*);\s*extra\s*==\s*['"]([\w-]+)['"]""")
_HOLDS: Final = {">=": operator.ge, "<": operator.lt}
_checked: set[tuple[int, str]] = set()
"""Processes, each with an adapter whose library it has looked at."""


class Unknown(NamedTuple):
    """A library, its version, and the range of the adapter's extra."""

    library: str
    version: str
    known: str

    def __str__(self) -> str:
        return (
            f"{self.library} {self.version} is not a version that lastbit was tried with ({self.known}): "
            "items may be resolved wrongly, or not at all"
        )


def warn_of_unknown(log: logging.Logger) -> None:
    """Log each imported adapter's library in an unknown version, once in a process."""
    for adapter, library, bounds in _required():
        if f"lastbit.integrations.{adapter}" in sys.modules and (os.getpid(), adapter) not in _checked:
            _checked.add((os.getpid(), adapter))
            try:
                version = metadata.version(library)
            except metadata.PackageNotFoundError:
                continue  # it was not installed as a package
            if not is_known(version, bounds):
                log.warning("%s", Unknown(library, version, bounds))


def is_known(version: str, bounds: str) -> bool:
    """Whether `version` is in a range such as `>=5.4,<6`. A release candidate counts as its release."""
    limits = [re.fullmatch(r"(>=|<)([\d.]+)", part.strip()) for part in bounds.split(",")]
    return all(_HOLDS[limit[1]](_numbers(version), _numbers(limit[2])) for limit in limits if limit is not None)


def _numbers(version: str) -> list[int]:
    """Without zeros at the end, as 5.0 is 5."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _required() -> Iterator[tuple[str, str, str]]:
    """The adapters that are modules of this package, each with its library and that library's range."""
    try:
        lines = metadata.requires("lastbit") or []
    except metadata.PackageNotFoundError:
        lines = []  # a copy of the package, such as the archive for Spark
    for line in lines:
        if match := _REQUIREMENT.fullmatch(line):
            yield match[3].replace("-", "_"), match[1], ",".join(sorted(match[2].split(","), reverse=True)).strip()
