"""Names in the paths of the service."""

from __future__ import annotations

NO_NAMES = frozenset({".", ".."})
"""Texts that can't be names: clients and proxies remove them from a path, `..` with the segment before it."""
