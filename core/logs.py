"""Structured logs on standard error: one JSON object per line, or coloured text on a terminal. Logs of libraries such
as uvicorn, which use `logging`, have the same format.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from pathlib import Path
from typing import Any, Final, TextIO, cast

import structlog

STANDARD: Final[dict[str, Any]] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"structured": {"()": f"{__name__}.formatter"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "structured", "stream": "ext://sys.stderr"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
}
"""The argument of `logging.config.dictConfig`, which uvicorn calls in each of its processes. uvicorn sets its own
level."""
_OURS: Final = ("api.", "core.", "senders.", "lastbit_server.")
"""The beginnings of our modules' names, in a checkout and in the wheel."""


def configure(level: str) -> None:
    """Configure this process's own logs."""
    _open_stderr()
    structlog.configure(
        processors=[*_first(), *_last()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _StandardError())),
    )


def leave_to_logging(name: str) -> None:
    """In a program of others: pass the lines of our modules to the logger `name` of the standard library, unless the
    program has configured structlog. The lines of its own loggers stay where they are."""
    if structlog.is_configured():
        return

    def logger_of(*module: str) -> Any:
        return logging.getLogger(name) if module and module[0].startswith(_OURS) else structlog.PrintLogger()

    structlog.configure(logger_factory=logger_of)


class _StandardError(io.TextIOBase):
    """Drops lines that can't be written, for example to a full disk or a closed pipe, as `logging` does. An exception
    would end the thread that logs. If that were the combiner's, all later acks would wait forever."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


def formatter() -> logging.Formatter:
    """The formatter for logs of the standard library."""
    _open_stderr()
    remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_first(), structlog.stdlib.add_logger_name], processors=[remove, *_last()]
    )


def _open_stderr() -> None:
    """Replace a standard error that was closed before the program started. Python has None for it."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # for the life of the process


def _first() -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _last() -> list[Any]:
    if sys.stderr.isatty():
        # Plain tracebacks: those with the values of all variables take seconds, and show passwords.
        console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        return [structlog.dev.set_exc_info, console]
    return [structlog.processors.ExceptionRenderer(), structlog.processors.JSONRenderer()]
