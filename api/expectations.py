"""What validators report, in the words of the contract: one table for pydantic's errors and one for msgspec's, so that
all routes describe the same mistake in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from lastbit.ids import INTEGER_LIMIT

UNKNOWN_FIELD: Final = "no such field here"
MISSING_FIELD: Final = "this field is required"

_INTEGER: Final = "expected an integer"
NUMBER: Final = "expected a number"
_TEXT: Final = "expected a string"
_ARRAY: Final = "expected an array"
_OBJECT: Final = "expected an object"
_BOOLEAN: Final = "expected true or false"
BELOW_2_53: Final = "expected an integer below 2^53"

_OF_PYDANTIC: Final[Mapping[str, str]] = {
    "missing": MISSING_FIELD,
    "extra_forbidden": UNKNOWN_FIELD,
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), _INTEGER),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), _BOOLEAN),
    "string_type": _TEXT,
    "string_unicode": "expected Unicode text",
    "list_type": _ARRAY,
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), _OBJECT),
    "greater_than": "expected more than {gt:,}",
    "greater_than_equal": "expected at least {ge:,}",
    "less_than": "expected less than {lt:,}",
    "less_than_equal": "expected at most {le:,}",
    "multiple_of": "expected a multiple of {multiple_of}",
    "literal_error": "expected {expected}",
}
_SIZES: Final[Mapping[str, tuple[str, str, str, str]]] = {
    "string_too_short": ("at least", "min_length", "character", "characters"),
    "string_too_long": ("at most", "max_length", "character", "characters"),
    "too_short": ("at least", "min_length", "entry", "entries"),
    "too_long": ("at most", "max_length", "entry", "entries"),
}
_OF_MSGSPEC: Final[Mapping[str, str]] = {
    "int": _INTEGER,
    "float": NUMBER,
    "str": _TEXT,
    "bool": _BOOLEAN,
    "array": _ARRAY,
    "object": _OBJECT,
}
_BOUNDS: Final[Mapping[str, str]] = {"<=": "at most", ">=": "at least"}
_WORDS: Final[dict[str, str]] = {}


def visible_ascii(longest: int) -> str:
    """The pattern of 1 to `longest` visible ASCII characters."""
    return worded(rf"^[\x21-\x7e]{{1,{longest}}}$", f"1 to {longest} visible ASCII characters without blanks")


def worded(pattern: str, words: str) -> str:
    """`pattern`, of which errors say `words`: a reader of an error should not need to read a regular expression."""
    _WORDS[pattern] = f"expected {words}"
    return pattern


def of_pydantic(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """What was expected, for an entry of pydantic's `errors()`: its type, message and context."""
    if kind == "string_pattern_mismatch":
        return _WORDS.get(context["pattern"], f"expected text that matches {context['pattern']}")
    if kind == "less_than" and context["lt"] == INTEGER_LIMIT:
        return BELOW_2_53
    if kind in _SIZES:
        bound, limit, one, several = _SIZES[kind]
        return f"expected {bound} {_count(context[limit], one, several)}"
    if kind in _OF_PYDANTIC:
        return _OF_PYDANTIC[kind].format(**{name: _whole(value) for name, value in context.items()})
    return message.removeprefix("Value error, ")  # the text of a validator of our own


def of_msgspec(message: str, fields: Sequence[str]) -> tuple[str, str]:
    """What was expected, for the message of a `ValidationError` without its place: the field that the message names,
    if any, and the words. `fields`: those of the struct, if it is known."""
    if match := re.fullmatch("Object contains unknown field `(.*)`", message, re.DOTALL):
        return match[1], UNKNOWN_FIELD + one_of(fields)
    if match := re.fullmatch("Object missing required field `(.*)`", message):
        return match[1], MISSING_FIELD
    if message.startswith(("Expected `bytes`", "Invalid base64")):
        return "", "expected base64 text, with its padding and without line breaks"
    if match := re.fullmatch(r"Expected `str` of length (<=|>=) (\d+)", message):
        return "", f"expected {_BOUNDS[match[1]]} {_count(int(match[2]), 'character', 'characters')}"
    if match := re.fullmatch(r"Expected `int` (<=|>=) (-?\d+)", message):
        limit = int(match[2])
        if match[1] == "<=" and limit == INTEGER_LIMIT - 1:
            return "", BELOW_2_53
        return "", f"expected {_BOUNDS[match[1]]} {limit:,}"
    if match := re.fullmatch(r"Expected `(\w+)( \| null)?`(, got .*)?", message):
        expected = _OF_MSGSPEC.get(match[1])
        if expected is not None:
            return "", expected + (" or null" if match[2] else "")
    return "", message


def one_of(fields: Iterable[str]) -> str:
    """The end of the words for an unknown field: the known ones, if there are any."""
    names = ", ".join(sorted(fields))
    return f"; expected one of {names}" if names else ""


def _whole(value: Any) -> Any:
    """60 for 60.0, which is how pydantic reports the limit of a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
