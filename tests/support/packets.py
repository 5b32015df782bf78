"""Packets of several statements to MariaDB that end with a COMMIT, for tests that break off between the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

COMMIT: Final = ";COMMIT"
"""The end of such a packet."""


def execute_writes(query: Callable[..., Any], connection: Any, packet: str) -> None:
    """Leave the server where it is before the packet's COMMIT. `query` is `pymysql.connections.Connection.query`."""
    query(connection, packet.removesuffix(COMMIT))
    while connection._result.has_next:
        connection.next_result()
