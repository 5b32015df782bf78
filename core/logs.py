"""Structured logs on standard error: one JSON object a line, or coloured text on a terminal. What libraries log by the
standard library's means, uvicorn first of all, looks the same.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

import structlog

STANDARD: Final[dict[str, Any]] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"structured": {"()": "core.logs.formatter"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "structured", "stream": "ext://sys.stderr"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
}
"""For `logging.config.dictConfig`, as uvicorn calls it in each of its processes; it sets the level of its own."""


def configure(level: str) -> None:
    """For our own logs, in this process."""
    structlog.configure(
        processors=[*_first(), *_last()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def formatter() -> logging.Formatter:
    """For the standard library's."""
    remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_first(), structlog.stdlib.add_logger_name], processors=[remove, *_last()]
    )


def _first() -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _last() -> list[Any]:
    if sys.stderr.isatty():
        # Plain: with the values of all variables a traceback takes seconds, and shows passwords.
        console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        return [structlog.dev.set_exc_info, console]
    return [structlog.processors.ExceptionRenderer(), structlog.processors.JSONRenderer()]
