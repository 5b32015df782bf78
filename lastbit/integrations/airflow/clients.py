"""Clients that the triggers of one triggerer share.

A client has its own TLS settings, which take about 0.8 MB and block the event loop for 20 ms when they are made. A
triggerer runs a thousand triggers by default. So up to `USERS` triggers that wait for batches of the same service share
a client. Each has at most one request in progress, so a client's connections are enough for all its triggers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from lastbit._in_flight import CONNECTIONS
from lastbit.client import AsyncClient
from lastbit.integrations.airflow.address import Address

USERS: Final = CONNECTIONS


@dataclass(eq=False)
class _Shared:
    loop: asyncio.AbstractEventLoop
    address: Address
    client: AsyncClient
    users: int = 0


_open: list[_Shared] = []


@asynccontextmanager
async def shared_client(address: Address) -> AsyncIterator[AsyncClient]:
    """A client for the service at `address`, for one request at a time. It is closed after its last user."""
    shared = _with_a_free_place(asyncio.get_running_loop(), address)
    shared.users += 1
    try:
        yield shared.client
    finally:
        shared.users -= 1
        if not shared.users:
            _open.remove(shared)
            await shared.client.close()


def _with_a_free_place(loop: asyncio.AbstractEventLoop, address: Address) -> _Shared:
    for shared in _open:
        if shared.loop is loop and shared.address == address and shared.users < USERS:
            return shared
    shared = _Shared(loop, address, AsyncClient(address.url, token=address.token))
    _open.append(shared)
    return shared
