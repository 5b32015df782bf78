"""One-line messages for Spark's errors, without the JVM's stack trace."""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, IllegalArgumentException, NumberFormatException, PySparkException

SPARK_ERRORS = (PySparkException, Py4JError)
"""All that Spark raises: what it has a class for in Python, and what it hasn't."""


def is_wrong_use(error: Exception) -> bool:
    """It lies with what was asked for: no such input or column, SQL or an option that is none."""
    if isinstance(error, NumberFormatException):  # of a row's value
        return False
    return isinstance(error, AnalysisException | IllegalArgumentException)


def told(error: Exception) -> str:
    """Its first line, and that of what caused it: which file it was, and what about it."""
    cause: Any = getattr(error, "java_exception", None)
    if cause is None:
        return _line(str(error))
    messages: list[str] = []
    while cause is not None and len(messages) < 10:
        messages.append(_line(cause.getMessage()) or str(cause.getClass().getName()))
        cause = cause.getCause()
    return messages[0] if messages[-1] in messages[0] else f"{messages[0]}: {messages[-1]}"


def _line(text: str | None) -> str:
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")
