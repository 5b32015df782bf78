"""What needs a newer PySpark is reported by name when it is called, not when the package is imported."""

from __future__ import annotations

import pyspark

from lastbit.errors import LastbitError


class PySparkTooOld(LastbitError):
    """A function needs a newer version of PySpark."""

    def __init__(self, purpose: str, needed: str, installed: str) -> None:
        super().__init__(purpose, needed, installed)
        self.purpose = purpose
        self.needed = needed
        self.installed = installed

    def __str__(self) -> str:
        return f"{self.purpose} needs PySpark {self.needed} or later, and this is {self.installed}"


def require(purpose: str, major: int, minor: int) -> None:
    """Raises `PySparkTooOld` if PySpark is older than this version."""
    installed = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
    if installed < (major, minor):
        raise PySparkTooOld(purpose, f"{major}.{minor}", pyspark.__version__)
