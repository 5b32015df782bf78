"""What a worker says at its start: that it tracks items, where, and what it saw of the service.

Without that, a worker with a wrong address looks like one that works, until its first item ends.
"""

from __future__ import annotations

import logging
import os

from lastbit import _calls, errors
from lastbit._drivers import AsyncDriver, Driver
from lastbit._protocol import Service

_told: set[tuple[int, str]] = set()
"""Processes, each with the URL of a service that it has told of."""


def announce(driver: Driver, log: logging.Logger) -> None:
    """Log it, once for a service and process. Waits for an answer for at most `_calls.SHORT` seconds."""
    if _is_first(driver.service):
        try:
            version = driver.run(_calls.version)
        except errors.LastbitError as error:
            log.warning("%s", _unseen(driver.service, error))
        else:
            log.info("%s", _seen(driver.service, version))


async def announce_async(driver: AsyncDriver, log: logging.Logger) -> None:
    """`announce`, awaited."""
    if _is_first(driver.service):
        try:
            version = await driver.run(_calls.version)
        except errors.LastbitError as error:
            log.warning("%s", _unseen(driver.service, error))
        else:
            log.info("%s", _seen(driver.service, version))


def _is_first(service: Service) -> bool:
    told = os.getpid(), service.url
    is_first = told not in _told
    _told.add(told)
    return is_first


def _place(service: Service) -> str:
    """`at http://127.0.0.1:8000`, without a password."""
    kind, _, database = service.address.partition("embedded:")
    return f"at {kind}" if kind else f"in the database {database}"


def _seen(service: Service, version: str) -> str:
    return f"Lastbit tracks items {_place(service)} (version {version})"


def _unseen(service: Service, error: errors.LastbitError) -> str:
    cause = f"it can't be reached ({error.cause})" if isinstance(error, errors.ServiceUnreachable) else str(error)
    return f"Lastbit tracks items {_place(service)}, but {cause}; messages wait until their items are resolved"
