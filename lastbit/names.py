"""Names that stand in the paths of the service."""

from __future__ import annotations

NO_NAMES = frozenset({".", ".."})
"""Clients and proxies take these out of a path, with the part before them."""
