"""What goes through Arrow needs more than a bare cluster has; here it is said what."""

from __future__ import annotations

from importlib import import_module

from lastbit.errors import MissingExtra

NEEDED = ("pyarrow", "pandas")


def require(purpose: str) -> None:
    """Raises `MissingExtra`, which names the packages that can't be imported in this process."""
    missing = []
    for name in NEEDED:
        try:
            import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise MissingExtra("spark", f"{purpose} (missing here: {', '.join(missing)})")
