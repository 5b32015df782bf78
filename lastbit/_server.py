"""The modules of the service, which `lastbit[embedded]` installs beside the client."""

from __future__ import annotations

from types import ModuleType

from lastbit.errors import MissingExtra


def program(name: str) -> ModuleType:
    """The module with this name in a checkout, such as `core.service`. Raises `MissingExtra`."""
    try:
        import lastbit_server
    except ImportError as cause:
        raise MissingExtra("embedded", "lastbit.embedded") from cause
    return lastbit_server.program(name)
