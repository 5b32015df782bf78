"""Names that are imported when they are first used, so that `import lastbit` costs little and needs no httpx."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module


def lazy(module: str, homes: Mapping[str, Iterable[str]]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a module whose names are defined in other modules. Type checkers must not see
    them, because they would then accept any name."""
    home_of = {name: home for home, names in homes.items() for name in names}
    names = vars(sys.modules[module])

    def get(name: str) -> object:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        names[name] = value = getattr(import_module(home), name)  # the next look-up does not come here
        return value

    return get, lambda: sorted({*names, *names["__all__"]})
