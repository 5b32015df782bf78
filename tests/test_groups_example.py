"""`python -m examples.groups` as its user sees it, and the arithmetic that it holds the moves against."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.groups.ledger import Ledger, Move, Step, equal_shares, most_moves_of_a_join
from tests.support.examples import Example


def test_the_moves_match_the_arithmetic_of_equal_shares(tmp_path: Path) -> None:
    """Six workers join one by one, one is killed; each step says who gave what to whom, and all of it held."""
    said = Example("groups", tmp_path).said()
    steps = re.findall(r"^(\w+) (?:joins|is killed \(SIGKILL\)): (\d+) partitions move \(at most (\d+)\)", said, re.M)
    assert [(name, int(most)) for name, _, most in steps] == [
        *(("ann", 40), ("bob", 20), ("cid", 14), ("dan", 10), ("eve", 8), ("fay", 7), ("fay", int(steps[-1][2]))),
    ]
    assert int(steps[-1][1]) == int(steps[-1][2]) in (6, 7)
    assert "nobody → ann: 0-39" in said
    assert re.search(r"^    fay → \w+: \d", said, re.M)
    assert re.search(r"^    now ann 8, bob 8, cid 8, dan 8, eve 8$", said, re.M)
    assert "All of it held" in said


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle: one line, exit status 130, no process, no folder."""
    Example("groups", tmp_path).interrupt("ann joins")


def test_equal_shares() -> None:
    """They add up, and none is larger than another by two; who joins takes one of them at most."""
    for partitions in range(1, 50):
        for workers in range(1, 9):
            shares = equal_shares(partitions, workers)
            assert (len(shares), sum(shares)) == (workers, partitions)
            assert max(shares) - min(shares) <= 1
            assert most_moves_of_a_join(partitions, workers) == max(equal_shares(partitions, workers + 1))


STEP = Step("bob joins", 2, 2.0, {"ann"}, [Move(1, "ann", "bob")], 1.0, {"ann": 1, "bob": 1})


@pytest.mark.parametrize(
    "different",
    [
        {"moves": [Move(1, "ann", "bob")] * 3},
        {"moves": [Move(1, "cid", "bob")]},
        {"seconds": 2.5},
        {"held": {"ann": 2, "bob": 0}},
    ],
    ids=str,
)
def test_a_step_that_does_not_hold_says_so(different: dict[str, Any]) -> None:
    """Each thing that must hold of one is looked at."""
    assert STEP.faults() == []
    assert replace(STEP, **different).faults()


def ledger(killed: bool = False, **different: Any) -> Ledger:
    """Ann had a partition, gave it back, and bob has it since."""
    told = Ledger(1)
    told.assigned("ann", {"assigned": 0, "epoch": 1, "found": -1, "left": 2, "at": 1.0})
    if killed:
        told.dead.add("ann")
    else:
        told.released({"released": 0, "epoch": 1, "lost": False, "at": 2.0} | different.pop("released", {}))
    told.assigned("bob", {"assigned": 0, "epoch": 2, "found": 2, "left": 5, "at": 3.0} | different)
    return told


def test_a_ledger_knows_who_works_on_what() -> None:
    """Whether it is told of by the giver or by the taker first."""
    assert ledger().faults() == ledger(killed=True).faults() == []
    assert ledger().take_moves() == [Move(0, None, "ann"), Move(0, "ann", "bob")]
    assert ledger().at_rest(["bob"])
    assert not ledger().at_rest(["ann"])
    late = Ledger(1)
    late.assigned("ann", {"assigned": 0, "epoch": 1, "found": -1, "left": 2, "at": 1.0})
    late.assigned("bob", {"assigned": 0, "epoch": 2, "found": 2, "left": 5, "at": 3.0})
    assert not late.at_rest(["bob"])
    assert late.faults()
    late.released({"released": 0, "epoch": 1, "lost": False, "at": 2.0})
    assert late.faults() == []
    assert late.at_rest(["bob"])


@pytest.mark.parametrize(
    "different",
    [{"epoch": 1}, {"found": 1}, {"at": 1.5}, {"released": {"lost": True}}],
    ids=str,
)
def test_tenures_that_do_not_hold_say_so(different: dict[str, Any]) -> None:
    """Two at one epoch, a floor that was forgotten, two at a time, one that was lost."""
    assert ledger(**different).faults()
