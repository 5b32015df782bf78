"""The limits by which a process keeps serving, whatever its clients send. Those of one event loop are in `Limits`.

| what | limit | where | a client beyond it |
|---|---|---|---|
| calls, items and bytes per second of a token | its rate, one second's worth at once | `rates` | 429 |
| requests in progress of a limited token | a quarter of `max_connections` | `open_requests`, `shares` | 429 |
| calls whose parsing takes the event loop's time | `shed_after` | `parse_budget` | 503 after a `pause` |
| calls that wait for a commit, in seconds | `shed_after` | `core.commits.admission` | 503, acks after a `pause` |
| the same, in units and in bytes | `max_waiting_acks`, `max_waiting_bytes` | `core.commits.combiner` | 503 |
| reads that share a transaction, of each kind | `max_waiting_requests` | `core.service.reads` | 503 |
| streams whose pages are read from the database at a time | `CATCHING_UP` | `routes.long_polls` | waits |
| other requests that wait for a thread | `max_waiting_requests` | `threads` | 503 |
| bytes of bodies in memory | `max_waiting_bytes`, a quarter for a limited token | `room` | 503 |
| bytes of a head, a path, a body, a whole request | `HEAD`, `PATH`, `BODY`, `WHOLE` | `sizes` | 413 |
| headers, parameters of a query | `HEADERS`, `PARAMETERS` | `sizes` | 413, 422 |
| bytes of the body of a route | `fields.Body.LIMIT` | `routes` | 413 |
| bytes that are parsed in the event loop | `IN_LOOP` | `parsing`, `sizes` | waits for the thread |
| ids and masks of an ack, entries of other calls | the routes' models | `acks.bodies`, `routes` | 413, 422 |
| connections | `max_connections`; 64 to `probe_port` | `connections` | 503, or the end if they are idle |
| seconds for a head, a request, a response | `head_timeout`, `request_timeout` | `connections` | the end |
| bytes of responses that nobody reads | 128 MiB, a quarter for a limited token | `unsent` | the end, oldest first |
| connections that linger, their bytes and seconds | `DISCARDED` and others | `connections`, `sizes` | the end |

A 503 or 429 comes before the request costs much. It has `Retry-After` and no effect, and is counted in
`api.metrics.REFUSED`. The two limits that follow the load, not a number, begin and end by the same rule, that of
`core.commits.shedding`.

A new limit becomes a module here, a line above and, if it belongs to the event loop, an attribute of `Limits`. A token
that is limited to a prefix gets a share of what others need too (see `shares`); its module asks for it.
"""

from __future__ import annotations

import asyncio

from api.limits.connections import Connections
from api.limits.open_requests import OpenRequests
from api.limits.parse_budget import ParseBudget
from api.limits.parsing import Parsing
from api.limits.pause import Pause
from api.limits.room import Room
from api.limits.threads import Threads
from api.limits.unsent import Unsent
from core.settings import Settings


class Limits:
    """The limits of one event loop. Only its thread may use them."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self.parse_budget = ParseBudget(settings.shed_after, loop.call_soon)
        self.parsing = Parsing()
        self.pause = Pause(loop)
        self.threads = Threads(settings.max_waiting_requests)
        self.room = Room(settings.max_waiting_bytes)
        self.connections = Connections(
            settings.max_connections,
            head_timeout=settings.head_timeout,
            request_timeout=settings.request_timeout,
            probe_port=settings.probe_port,
        )
        self.unsent = Unsent(loop.call_soon)
        self.open_requests = OpenRequests(self.connections.limit)
