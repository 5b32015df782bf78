"""The digest by which a rerun's messages are compared: equal for equal messages, in any process, and for no others."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastbit import errors
from lastbit.integrations._digests import Digest
from tests.mutants import mutant


@dataclass(frozen=True, slots=True)
class Picture:
    name: str
    size: int


Point = namedtuple("Point", "x y")

DISTINCT: list[list[Any]] = [
    *([], [None], [()], [[], []], [{}], [set()], [""], [b""], [0], [0.0], [False], [True], [1], [1.0], ["1"], [b"1"]),
    *(["ab"], ["a", "b"], ["b", "a"], [("a", "b")], [("b", "a")], [("a",), "b"], [{"a": "b"}], [{"b": "a"}]),
    *([{"a", "b"}], [{"a"}, "b"], ["a" * 11, "b"], ["a" * 10, "ab"], [-1], [2**64], [0.1], [float("inf")]),
    *([Decimal(1)], [Decimal("1.0")], [uuid.UUID(int=1)], [date(2026, 5, 4)], [datetime(2026, 5, 4)]),  # noqa: DTZ001
    *([datetime(2026, 5, 4, tzinfo=UTC)], [time(1)], [timedelta(1)], [str(date(2026, 5, 4))], ["\ud800"], ["\u0000"]),
    *(
        [{f"{number}" for number in range(20)}],
        [Picture("a", 1)],
        [Picture("a", 2)],
        [{1: "a"}],
        [{"1": "a"}],
        [{b"1": "a"}],
    ),
]


@mutant(
    "values-are-written-without-their-lengths",
    "lastbit.integrations._digests:_measured",
    'b"%b%d:%b" % (kind, len(content), content)',
    "kind + content",
)
def test_other_messages_have_other_digests() -> None:
    """Also those that look alike in JSON, or when they are written one after the other."""
    digests = [Digest().after(messages) for messages in DISTINCT]
    assert len(set(digests)) == len(DISTINCT)
    assert {len(digest) for digest in digests} == {32}


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ({"a": 1, "b": 2}, OrderedDict(b=2, a=1)),
        ({"a": 1}, MappingProxyType({"a": 1})),
        ({"a", "b", "c"}, frozenset(["c", "b", "a"])),
        ((1, 2), [1, 2]),
        (Point(1, 2), (1, 2)),
        (b"ab", bytearray(b"ab")),
        (Picture("a", 1), Picture("a", 1)),
    ],
    ids=["order", "proxy", "set", "sequence", "named tuple", "bytes", "dataclass"],
)
def test_equal_messages_have_equal_digests(one: Any, same: Any) -> None:
    """Whatever the order of a mapping or set, and the type of a sequence."""
    assert Digest().after([one]) == Digest().after([same])


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3) | st.floats(width=16)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LEAVES, inner, max_size=3))


def told_apart(value: Any) -> Any:
    """The value so that `==` tells types apart, and nan equals itself."""
    if isinstance(value, list):
        return [told_apart(entry) for entry in value]
    if isinstance(value, dict):
        return {told_apart(key): told_apart(entry) for key, entry in value.items()}
    return type(value).__name__, repr(value)


@given(st.lists(VALUES, max_size=4), st.lists(VALUES, max_size=4), st.integers(0, 4))
def test_digests_are_equal_exactly_if_the_messages_are(one: list[Any], other: list[Any], cut: int) -> None:
    """And don't depend on how the messages are divided into chunks."""
    assert (Digest().after(one) == Digest().after(other)) == (told_apart(one) == told_apart(other))
    divided = Digest()
    divided.after(one[:cut])
    assert divided.after(one[cut:]) == Digest().after(one)


PROGRAM = """
from tests.integrations.test_digests import DISTINCT
from lastbit.integrations._digests import Digest
print(Digest().after(DISTINCT))
"""


@mutant(
    "a-digest-depends-on-the-process",
    "lastbit.integrations._digests:_written",
    "sorted(map(_written, value))",
    "map(_written, value)",
)
def test_another_process_computes_the_same_digest() -> None:
    """With other hashes of texts, by which sets and mappings are ordered."""
    digests = {
        subprocess.check_output([sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2", "3")
    }
    assert digests == {Digest().after(DISTINCT) + "\n"}


@pytest.mark.parametrize("message", [object(), Picture, len, Fraction(1, 3), [1, {"a": object()}], {object()}])
def test_other_objects_need_identify(message: Any) -> None:
    """The error counts the messages, and says what to pass."""
    digest = Digest()
    digest.after(["a"])
    with pytest.raises(
        errors.InvalidArgument, match=r"message 2 can't be compared .* an object of \w+: pass identify="
    ):
        digest.after(["b", message])


def test_identify_says_what_stands_for_a_message() -> None:
    digest = Digest(lambda message: message["name"])
    assert digest.after([{"name": "a", "at": object()}]) == Digest().after(["a"])
