"""Keeps the standard output of a job's driver free of other output."""

from __future__ import annotations

import io
import os
import sys


class _DriversStandardError(io.TextIOBase):
    def __init__(self) -> None:
        from pyspark import SparkContext  # a client of Spark Connect has none

        SparkContext._ensure_initialized()
        self._print = SparkContext._jvm.java.lang.System.err.print

    def write(self, text: str) -> int:
        try:
            self._print(text)
        except Exception:  # noqa: BLE001  # the JVM has ended: use Python's standard error instead
            os.write(2, text.encode())
        return len(text)


def keep_standard_output_clean() -> None:
    """Redirect `sys.stderr` to the standard error of the JVM, through the gateway: spark-submit would write Python's
    standard error to its standard output. From then on, standard output has only what the job prints there."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        sys.stderr = _DriversStandardError()
