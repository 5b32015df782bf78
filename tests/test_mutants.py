"""Each mutant fits the code. `make mutants` runs the tests that must fail."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import mutants


def test_each_mutant_fits_the_code() -> None:
    faults = []
    for mutant in mutants.every():
        try:
            mutant.build()
        except Exception as error:  # noqa: BLE001  # all of them are listed
            faults.append(f"{mutant.name}: {error!r}")
    assert faults == []


def test_each_mutant_has_a_name_of_its_own() -> None:
    counts = Counter(mutant.name for mutant in mutants.every())
    assert [name for name, count in counts.items() if count > 1] == []
    assert {name for mutant in mutants.every() for name in mutant.together_with} <= counts.keys()


def _answer(calls: list[int]) -> int:
    # A comment, and a line that is broken,
    calls.append(
        1,
    )
    return calls[0] if calls else 0


@pytest.mark.parametrize(
    ("old", "new", "answer"),
    [
        ("calls.append(1)", "calls.append(2)", 2),
        ("1", "3", 3),
        ("calls.append(1)", "", 0),
        ("calls.append(1)\nreturn calls[0] if calls else 0", "return 4", 4),
        ("return calls[0] if calls else 0", "calls.append(5)\nreturn calls[1]", 5),
    ],
)
def test_what_a_mutant_replaces_is_compared_by_syntax(old: str, new: str, answer: int) -> None:
    _, _, function = mutants.Mutant("", "a-mutant", f"{__name__}:{_answer.__name__}", ((old, new),)).build()
    assert callable(function)
    assert function([]) == answer


class _Calls(list[int]):
    def append(self, value: int) -> None:
        super().append(value + 1)


def test_a_broken_method_may_call_that_of_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would always raise, and any test would fail."""
    changes = (("value + 1", "value + 2"),)
    owner, name, method = mutants.Mutant("", "a-mutant", f"{__name__}:_Calls.append", changes).build()
    monkeypatch.setattr(owner, name, method)
    assert _answer(_Calls()) == 3


@pytest.mark.parametrize(("old", "count"), [("0", 2), ("calls.append(6)", 0)])
def test_a_mutant_replaces_one_place(old: str, count: int) -> None:
    mutant = mutants.Mutant("", "a-mutant", f"{__name__}:{_answer.__name__}", ((old, "1"),))
    with pytest.raises(AssertionError, match=f"a-mutant: '.*' occurs {count} times in {__name__}:_answer"):
        mutant.build()


def test_decorators_are_read_from_the_files() -> None:
    assert len(mutants.every()) > 500
    assert {mutant.test.partition("/")[0] for mutant in mutants.every()} >= {"guarantees", "http", "sdk", "storage"}
