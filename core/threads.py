"""Threads that serve many callers, and must not end before they are stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog

from core import errors

log = structlog.get_logger(__name__)


def start(run: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """Start a daemon thread. Raises `errors.Unavailable` if the system allows no more threads; later it may."""
    thread = threading.Thread(target=run, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise errors.Unavailable("the system allows no more threads") from error
    return thread


def deliver(results: Iterable[tuple[Callable[[Sequence[Any]], object], Any]]) -> None:
    """Call each receiver once, with all its results. `results` are pairs of receiver and result. A receiver that raises
    has a bug: it is logged, and neither the others nor this thread fail."""
    by_receiver: dict[Callable[[Sequence[Any]], object], list[Any]] = {}
    for receiver, result in results:
        by_receiver.setdefault(receiver, []).append(result)
    for receiver, part in by_receiver.items():
        try:
            receiver(part)
        except Exception:  # a bug of the receiver: its own results are lost, no others
            log.exception("receiver_failed", results=len(part))
