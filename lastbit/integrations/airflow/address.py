"""The service's address and the token in an Airflow connection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lastbit.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    token: str = field(repr=False)
    """Empty if the service needs none. LASTBIT_TOKEN is not used then: the variable may belong to another service."""

    @classmethod
    def of(cls, connection: Any) -> Address:
        """From the connection's host, schema and port, or from a URL as its host. The token is its password. Raises
        `InvalidArgument`."""
        host = (connection.host or "").strip().rstrip("/")
        if not host:
            raise InvalidArgument(
                f"connection {connection.conn_id!r} has no host: expected the address of a Lastbit service, like "
                "lastbit.example.com or https://lastbit.example.com"
            )
        scheme, separator, rest = host.partition("://")
        if not separator:
            scheme, rest = (connection.schema or "http").strip(), host
        authority, slash, path = rest.partition("/")
        if connection.port and not _has_port(authority):
            authority += f":{connection.port}"
        return cls(f"{scheme}://{authority}{slash}{path}", (connection.password or "").strip())


def _has_port(authority: str) -> bool:
    try:
        return urlsplit(f"//{authority}").port is not None
    except ValueError:
        return True  # an invalid one, which the client reports
