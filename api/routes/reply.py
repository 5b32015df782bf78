"""Responses whose bodies are encoded without a model of their route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from fastapi import Response

EMPTY: Final[Mapping[str, str]] = {}
_encoder: Final = msgspec.json.Encoder()


class Reply(NamedTuple):
    """A response with a JSON body that was not validated by its route's model."""

    content: bytes
    status: int
    headers: Mapping[str, str]

    @classmethod
    def of(cls, facts: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] = EMPTY) -> Reply:
        return cls(_encoder.encode(facts), status, headers)

    def response(self) -> Response:
        return Response(self.content, self.status, self.headers, "application/json")
