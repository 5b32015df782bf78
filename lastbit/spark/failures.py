"""One-line messages for Spark's errors, without the JVM's stack trace."""

from __future__ import annotations

from typing import Any

from pyspark.errors import (
    AnalysisException,
    IllegalArgumentException,
    NumberFormatException,
    ParseException,
    PySparkException,
)

try:
    from py4j.protocol import Py4JError
except ImportError:  # a client of Spark Connect has no py4j
    SPARK_ERRORS: tuple[type[Exception], ...] = (PySparkException,)
else:
    SPARK_ERRORS = (PySparkException, Py4JError)
"""All errors that Spark raises: those with a Python class of their own, and others."""


def is_wrong_use(error: Exception) -> bool:
    """Whether the arguments are wrong: no such input, column or option, or invalid SQL."""
    if isinstance(error, NumberFormatException):  # caused by a value in a row
        return False
    return isinstance(error, AnalysisException | ParseException | IllegalArgumentException)


def message_of(error: Exception) -> str:
    """The first line of the error's message, and that of its cause, such as the file and its problem."""
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
