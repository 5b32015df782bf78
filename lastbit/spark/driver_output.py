"""The standard error of a job's driver."""

from __future__ import annotations

import io
import os
import sys

from pyspark import SparkContext


class _DriversStandardError(io.TextIOBase):
    def __init__(self) -> None:
        SparkContext._ensure_initialized()
        self._print = SparkContext._jvm.java.lang.System.err.print

    def write(self, text: str) -> int:
        try:
            self._print(text)
        except Exception:  # noqa: BLE001  # the JVM is gone: better there than nowhere
            os.write(2, text.encode())
        return len(text)


def keep_standard_output_clean() -> None:
    """spark-submit joins a Python program's standard error to its standard output; its own, the JVM's, is reached
    through the gateway. From here on standard output has what the job prints there and nothing else."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        sys.stderr = _DriversStandardError()
