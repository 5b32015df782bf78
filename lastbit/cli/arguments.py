"""Types of command line arguments, parsed strictly, so that a typing error does not become a request."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from lastbit import durations
from lastbit.ids import INTEGER_LIMIT, MAX_ITEMS

KEY_PREFIX = "key="

_DECIMAL = re.compile("0|[1-9][0-9]{0,15}")


def _is_too_large(text: str) -> bool:
    """Whether this is a decimal integer beyond the ids and positions of the contract."""
    if not re.fullmatch("[1-9][0-9]*", text):
        return False
    return not _DECIMAL.fullmatch(text) or int(text) >= INTEGER_LIMIT


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """The number of a batch or a webhook: a decimal integer without leading zeros, so that it has only one spelling."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, int):
            return value
        hint = self._hint(value)
        if _is_too_large(value):
            self.fail(f"{value!r} is too large: the id of a {self.name} is below 2^53{hint}", param, ctx)
        if not _DECIMAL.fullmatch(value):
            self.fail(
                f"{value!r} is not a {self.name} id: expected a decimal integer without leading zeros, like 7{hint}",
                param,
                ctx,
            )
        return int(value)

    def _hint(self, value: str) -> str:
        """What else the digits may mean, for the end of an error."""
        return ""


class BatchName(Number):
    """A batch by its number or by its key. Digits are a number; `key=` before them makes them a key. `app.session`
    looks keys up."""

    def __init__(self) -> None:
        super().__init__("batch")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, int):
            return value
        if value.startswith(KEY_PREFIX) and value != KEY_PREFIX:
            return str(value.removeprefix(KEY_PREFIX))
        if value in ("", KEY_PREFIX) or value.startswith("-"):
            self.fail(f"{value!r} is not a batch: expected its number, like 7, or its key", param, ctx)
        return super().convert(value, param, ctx) if value.isdecimal() else str(value)

    def _hint(self, value: str) -> str:
        return f"; {key_hint(value)}"


def key_hint(digits: object) -> str:
    """How to name a batch by a key of digits."""
    return f"digits are the number of a batch, and {KEY_PREFIX}{digits} names the key {digits}"


class Whole(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A whole number in a range; without limits, any. Unlike click's own type it puts no range into the help."""

    name = "integer"

    def __init__(self, min: int | None = None, max: int | None = None) -> None:
        self.min = min
        self.max = max

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = None
        too_small = number is not None and self.min is not None and number < self.min
        too_large = number is not None and self.max is not None and number > self.max
        if number is None or too_small or too_large:
            self.fail(f"expected a whole number{self._range()}, not {value!r}", param, ctx)
        return number

    def _range(self) -> str:
        if self.min is None:
            return "" if self.max is None else f" of at most {self.max}"
        return f" of at least {self.min}" if self.max is None else f" from {self.min} to {self.max}"


class Limit(Whole):
    """The maximum number of elements of a list, at least 1, and small enough for `islice`."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = super().convert(value, param, ctx)
        if number >= INTEGER_LIMIT:
            self.fail(f"{value!r} is too large: a limit is below 2^53", param, ctx)
        return number


class Utf8(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A text that can be encoded. Python also makes strings of arguments that are not UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            str(value).encode()
        except UnicodeEncodeError:
            self.fail(f"expected text in UTF-8, not {value!r}", param, ctx)
        return str(value)


class Real(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A number that may have a decimal point."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            self.fail(f"expected a number, like 30 or 0.5, not {value!r}", param, ctx)


def _span(text: str) -> timedelta | None:
    """The duration in a text that may also be a date. Raises `OverflowError`."""
    try:
        return timedelta(seconds=durations.seconds(text))
    except ValueError:
        return None


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A time: a duration before now (2h, 7d), or a date with an optional time, in UTC unless it has an offset."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            if (span := _span(value)) is not None:
                return datetime.now(UTC) - span
            moment = datetime.fromisoformat(value)
            return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is not a time: expected a time ago, like 2h or 7d, or a date in UTC, like 2026-05-04 or "
                "2026-05-04T08:00",
                param,
                ctx,
            )


class Deadline(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A time in the future: a duration from now (90s, 2h), or a date and time with an offset or Z."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            if (span := _span(value)) is not None:
                return datetime.now(UTC) + span
            moment = datetime.fromisoformat(value)
            if moment.tzinfo is None:
                raise ValueError("it has no zone")
            return moment.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is not a deadline: expected a time from now, like 90s or 2h, or a date and time with a "
                "zone, like 2026-05-04T08:00Z",
                param,
                ctx,
            )


class Count(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A number of items, 0 to 10^12, in which underscores may group the digits."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        digits = value.replace("_", "")
        if not _DECIMAL.fullmatch(digits) or int(digits) > MAX_ITEMS:
            self.fail(f"{value!r} is not a number of items: expected a whole number from 0 to 10^12", param, ctx)
        return int(digits)


NONE = "none"


class OrNone(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """The values of another type, or `none`, which removes what the option sets."""

    def __init__(self, type: click.ParamType) -> None:  # type: ignore[type-arg]
        self._type = type
        self.name = type.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return NONE if value == NONE else self._type.convert(value, param, ctx)


class Label(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """`name:value`; the name ends at the first colon."""

    name = "name:value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, colon, content = value.partition(":")
        if not name or not colon:
            self.fail(f"{value!r} is not a label: expected name:value, like team:search", param, ctx)
        return name, content


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """Seconds, or a whole number with a unit: 90, 90s, 15m, 12h, 7d, 2w. `longest` has the same form."""

    name = "duration"

    def __init__(self, longest: str | None = None) -> None:
        self._longest = longest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            seconds = durations.seconds(f"{value}s" if value.isdecimal() else value)
        except ValueError:
            units = durations.UNITS
            self.fail(f"{value!r} is not a duration: expected seconds, or a number with {units}, like 15m", param, ctx)
        if self._longest is not None and seconds > (limit := Duration().convert(self._longest, param, ctx)):
            self.fail(f"{value!r} is too long: expected at most {self._longest} ({limit:,} seconds)", param, ctx)
        return seconds


class Position(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A position of the feed: a decimal integer, 0 before the first event."""

    name = "position"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if _is_too_large(value):
            self.fail(f"{value!r} is too large: a position of the feed is below 2^53", param, ctx)
        if not _DECIMAL.fullmatch(value):
            self.fail(f"{value!r} is not a position of the feed: expected a whole number, like 4711", param, ctx)
        return int(value)


class Json(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """Any JSON."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            content = json.loads(value, parse_constant=self._refuse)
        except (ValueError, RecursionError) as error:
            self.fail(f"this is not JSON: {error}", param, ctx)
        try:
            json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            self.fail("expected texts that can be encoded as UTF-8", param, ctx)
        except ValueError:
            self.fail("expected numbers that fit a double, such as 1e308 at most", param, ctx)
        return content

    @staticmethod
    def _refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON value")


BATCH = BatchName()
WEBHOOK = Number("webhook")
MOMENT = Moment()
POSITION = Position()
JSON = Json()
COUNT = Count()
DEADLINE = Deadline()
LABEL = Label()
WHOLE = Whole()
LIMIT = Limit()
UTF8 = Utf8()
REAL = Real()
DURATION = Duration()


def labels(pairs: tuple[tuple[str, str], ...]) -> dict[str, str] | None:
    """The labels of repeated options. Raises `click.UsageError` if a name occurs twice."""
    by_name: dict[str, str] = {}
    for name, value in pairs:
        if name in by_name:
            raise click.UsageError(f"the label {name!r} is given twice")
        by_name[name] = value
    return by_name or None
