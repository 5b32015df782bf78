"""Types of parameters and fields that several routes share. They are strict: `"1"` and `true` are not integers."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final

from fastapi import Depends, Path, Query, Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from starlette.concurrency import run_in_threadpool

from api import expectations
from api.access.rules import caller_of
from api.limits import sizes
from core import feed
from core.batches import labels
from core.batches.labels import MAX_LABELS
from lastbit.ids import INTEGER_LIMIT

MOST_UNKNOWN: Final = 16
"""Unknown fields of a body that are named in its error. With more, only their number is."""


def _decimal(value: Any) -> Any:
    """Check an integer in a path or query. Only decimal digits are allowed: `int` would accept " 7", "+7" and "7_0"."""
    if isinstance(value, str):
        if not re.fullmatch("0|[1-9][0-9]*", value):
            raise ValueError("expected a decimal integer without leading zeros")
        if len(value) > len(str(INTEGER_LIMIT)):
            raise ValueError(expectations.BELOW_2_53)
    return value


Decimal = BeforeValidator(_decimal)


def _number(value: Any) -> Any:
    """Check a number in a query, which is written as in JSON: `float` would accept " 1", "+1" and "1_0"."""
    if isinstance(value, str) and not re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", value):
        raise ValueError(expectations.NUMBER)
    return value


Wait = Annotated[float, Query(ge=0, le=60), BeforeValidator(_number)]
"""Seconds of a long poll."""


async def _own_batch(request: Request, batch: Annotated[int, Path(alias="id", ge=0, lt=INTEGER_LIMIT), Decimal]) -> int:
    """The batch in the path. For a token limited to a prefix, batches outside the prefix don't exist."""
    prefix = caller_of(request).prefix
    if prefix is not None:
        await run_in_threadpool(request.app.state.service.batches.check_covered, batch, prefix)
    return batch


BatchId = Annotated[int, Depends(_own_batch)]
GroupNumber = Annotated[int, Path(alias="group", ge=0, lt=INTEGER_LIMIT), Decimal]
Key = Annotated[str, StringConstraints(max_length=255)]
_LABEL_NAME: Final = expectations.worded("^[^:]*$", "a name without a colon")
LabelName = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=_LABEL_NAME)]
LabelValue = Annotated[str, StringConstraints(max_length=1024)]


def _at_most(limit: int) -> BeforeValidator:
    """Counts the labels first: pydantic would validate all of them, and describe each wrong one."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"expected at most {limit} entries")
        return value

    return BeforeValidator(check)


def _small(times: int) -> AfterValidator:
    """Checks that the labels take at most `times` the bytes that a batch may have."""

    def check(value: Any) -> Any:
        if fault := labels.excess(value, times):
            raise ValueError(fault)
        return value

    return AfterValidator(check)


Labels = Annotated[
    dict[LabelName, LabelValue],
    _at_most(MAX_LABELS),
    _small(1),
    # pydantic would describe the names with `patternProperties`, which client generators don't support.
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": 1024},
            "propertyNames": {"minLength": 1, "maxLength": 255, "pattern": "^[^:]*$"},
            "maxProperties": MAX_LABELS,
        }
    ),
]

LabelsPatch = Annotated[
    dict[LabelName, LabelValue | None],
    _at_most(2 * MAX_LABELS),
    _small(2),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"anyOf": [{"type": "string", "maxLength": 1024}, {"type": "null"}]},
            "propertyNames": {"minLength": 1, "maxLength": 255, "pattern": "^[^:]*$"},
            "maxProperties": 2 * MAX_LABELS,
        }
    ),
]


_MOMENT: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})"


def _moment(value: Any) -> Any:
    """Parse a time, to UTC. pydantic would also accept seconds since 1970, and times without a zone."""
    if value is None:
        return None
    try:
        if isinstance(value, str) and re.fullmatch(_MOMENT, value):
            return datetime.fromisoformat(value).astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ValueError("expected a time with a zone, like 2026-05-04T17:30:00Z")


Moment = Annotated[datetime | None, BeforeValidator(_moment)]


_BATCH_EVENTS: Final = (
    "opened updated sealed completed succeeded redrive failures_exceeded expired cancelled reopened repaired"
)
BATCH_EVENTS: Final = tuple(f"{feed.BATCH}.{name}" for name in _BATCH_EVENTS.split())
"""The types of the service's events of batches."""


def of_events(types: list[str]) -> list[str]:
    """Types for which there can be events. Nobody can append one that begins with `batch.`, so whoever waits for a
    misspelled one would wait forever."""
    for name in types:
        if name.startswith(f"{feed.BATCH}.") and name not in BATCH_EVENTS:
            raise ValueError(f"no event has the type {name!r}: expected one of {', '.join(BATCH_EVENTS)}")
    return types


class Body(BaseModel):
    """A JSON body, or an object in one. A body has at most `LIMIT` bytes. `HAS_ITEMS`: its entries are charged as
    items."""

    model_config = ConfigDict(strict=True, extra="forbid")
    LIMIT: ClassVar[int] = sizes.BODY_OF_NUMBERS
    HAS_ITEMS: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        """Refuse a body with a multitude of unknown fields, as pydantic would describe each of them."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + MOST_UNKNOWN:
            known = ", ".join(field.alias or name for name, field in cls.model_fields.items())
            raise ValueError(f"expected only {known or 'an empty object'}, got {len(value):,} fields")
        return value


class EmptyBody(Body):
    """Seal takes no fields."""
