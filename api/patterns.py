"""Patterns for the OpenAPI document. They only describe the checks, which are written in code, as closely as a pattern
can."""

from __future__ import annotations

from typing import Final

_INTEGER: Final = "(0|[1-9][0-9]{0,15})"
ITEM_ID: Final = f"^{_INTEGER}:{_INTEGER}:{_INTEGER}$"
BATCH_OR_ITEM: Final = f"^{_INTEGER}(:{_INTEGER}:{_INTEGER})?$"
BASE64: Final = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
CURSOR: Final = "^[A-Za-z0-9_-]+$"
LABEL: Final = "^[^:]+:"
INSTANCE: Final = r"^(?!\.\.?$)[^\x00-\x1f\x7f]+$"
URL: Final = r"^[Hh][Tt][Tt][Pp][Ss]?://[\x21-\x7e]+$"


def name_of(path: str) -> str:
    """The path of a route as documents and metrics name it: ids of batches are `{id}`."""
    return path.replace("{id:batch}", "{id}")
