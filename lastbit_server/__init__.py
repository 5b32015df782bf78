"""The package that `pip install lastbit-server` installs: the service and its jobs, and one command that runs them.

The programs themselves are `api`, `core`, `jobs`, `migrations` and `senders`: at the top level of a checkout, and
subpackages of this one in the wheel, whose build rewrites their imports (decision 0041). `program` finds them in both.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@cache
def program(name: str) -> ModuleType:
    """The module with this name in a checkout, such as `core.service`."""
    is_wheel = find_spec(f"{__name__}.core") is not None
    return import_module(f"{__name__}.{name}" if is_wheel else name)
