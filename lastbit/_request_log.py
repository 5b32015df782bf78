"""Requests in the log: a line each from the logger `lastbit.http`, at DEBUG.

httpx logs each request at INFO. A worker that logs at this level would have a line for each ack.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

log = logging.getLogger("lastbit.http")

_is_ours: ContextVar[bool] = ContextVar("lastbit_request", default=False)


class _Demotion(logging.Filter):
    """Logs httpx's line at DEBUG, in its place, if the request is one of Lastbit's."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not _is_ours.get() or record.levelno > logging.INFO:
            return True
        log.debug(record.msg, *(record.args or ()))
        return False


logging.getLogger("httpx").addFilter(_Demotion())


@contextlib.contextmanager
def demoted() -> Iterator[None]:
    """Around a request of Lastbit's own."""
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)
