"""Names that are imported when they are first used, so that `import lastbit` costs little and needs no httpx."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module


def lazy(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package whose names are defined in the modules `homes`.

    For a type checker, a module with `__getattr__` has every name. So each such package also has a stub, which lists
    the same names as imports. `test_public_names` compares the two.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    namespace = vars(sys.modules[package])
    public = sorted([*home_of, *(["__version__"] if "__version__" in namespace else [])])

    def get(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        namespace[name] = value  # the next access finds it there and doesn't call this function
        return value

    return public, get, lambda: sorted({*namespace, *public})
