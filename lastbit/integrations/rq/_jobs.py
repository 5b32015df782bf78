"""The jobs of items: their ids, the errors that RQ stores with them, and the client of a process that sends them."""

from __future__ import annotations

import os
from typing import Final

import redis
from rq.job import Job

from lastbit.client import Client
from lastbit.ids import ItemId
from lastbit.integrations._messages import item_of
from lastbit.integrations._reasons import accepted

PREFIX: Final = "lastbit-"
UNREACHABLE: Final = (redis.ConnectionError, redis.TimeoutError)


def job_id_of(item: str | ItemId) -> str:
    """The id of the item's job: `lastbit-7-0-42` for `7:0:42`."""
    return PREFIX + str(item).replace(":", "-")


def item_of_job(job_id: str) -> str | None:
    """The item of a job's id; None for jobs that belong to no batch."""
    if not job_id.startswith(PREFIX):
        return None
    return item_of(job_id.removeprefix(PREFIX).replace("-", ":"))


def stored_error(job: Job) -> str:
    result = job.latest_result()
    return (result.exc_string if result is not None else None) or ""


def last_line(exc_string: str) -> str:
    """The last line of a traceback, which names the exception."""
    lines = exc_string.strip().splitlines()
    return accepted(lines[-1] if lines else "the job failed")


_clients: dict[int, Client] = {}


def default_client() -> Client:
    """The client of this process, for LASTBIT_URL and LASTBIT_TOKEN."""
    process = os.getpid()
    if process not in _clients:
        _clients.clear()
        _clients[process] = Client()
    return _clients[process]
