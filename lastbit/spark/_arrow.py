"""Checks for the packages that Arrow needs, which a bare cluster lacks."""

from __future__ import annotations

from importlib import import_module

from lastbit.errors import MissingExtra

NEEDED = ("pyarrow", "pandas")


def require(purpose: str) -> None:
    """Raises `MissingExtra` with the packages that cannot be imported in this process."""
    missing = []
    for name in NEEDED:
        try:
            import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise MissingExtra("spark", f"{purpose} (missing here: {', '.join(missing)})")
