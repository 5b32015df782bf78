"""Patterns for the OpenAPI document. They only describe the checks, which are written in code, as closely as a pattern
can."""

from __future__ import annotations

import functools
import re
from typing import Final

_INTEGER: Final = "(0|[1-9][0-9]{0,15})"
ITEM_ID: Final = f"^{_INTEGER}:{_INTEGER}:{_INTEGER}$"
BATCH_OR_ITEM: Final = f"^{_INTEGER}(:{_INTEGER}:{_INTEGER})?$"
BASE64: Final = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
CURSOR: Final = "^[A-Za-z0-9_-]+$"
LABEL: Final = "^[^:]+:"
INSTANCE: Final = r"^(?!\.\.?$)[^\x00-\x1f\x7f]+$"
URL: Final = r"^[Hh][Tt][Tt][Pp][Ss]?://[\x21-\x7e]+$"


@functools.cache
def name_of(path: str) -> str:
    """The path of a route as documents and metrics name it, without the converters of its parameters: `{id}` for
    `{id:batch}`."""
    return re.sub(r":\w+}", "}", path)
