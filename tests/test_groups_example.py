"""`python -m examples.groups` as its user sees it, and the arithmetic with which it compares the moves."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.groups.ledger import Ledger, Move, Step, equal_shares, most_moves_of_a_join
from tests.support.examples import Example


@pytest.mark.nightly
def test_the_moves_match_the_arithmetic_of_equal_shares(tmp_path: Path) -> None:
    """Six workers join one by one, and one is killed; each step prints the moves, and all of them are right."""
    output = Example("groups", tmp_path).run()
    steps = re.findall(r"^(\w+) (?:joins|is killed \(SIGKILL\)): (\d+) partitions move \(at most (\d+)\)", output, re.M)
    assert [(name, int(most)) for name, _, most in steps] == [
        *(("ann", 40), ("bob", 20), ("cid", 14), ("dan", 10), ("eve", 8), ("fay", 7), ("fay", int(steps[-1][2]))),
    ]
    assert int(steps[-1][1]) == int(steps[-1][2]) in (6, 7)
    assert "nobody → ann: 0-39" in output
    assert re.search(r"^    fay → \w+: \d", output, re.M)
    assert re.search(r"^    now ann 8, bob 8, cid 8, dan 8, eve 8$", output, re.M)
    assert "All checks passed" in output


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle: one line, exit status 130, no process, no folder."""
    Example("groups", tmp_path).interrupt("ann joins")


def test_equal_shares() -> None:
    """They add up and differ by one at most; a worker that joins takes at most one from each."""
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
def test_a_wrong_step_is_reported(different: dict[str, Any]) -> None:
    """Every condition of a step is checked."""
    assert STEP.faults() == []
    assert replace(STEP, **different).faults()


def ledger(killed: bool = False, **different: Any) -> Ledger:
    """The ledger of a partition that ann had and released, and that bob has now."""
    record = Ledger(1)
    record.assigned("ann", {"assigned": 0, "epoch": 1, "found": -1, "left": 2, "at": 1.0})
    if killed:
        record.dead.add("ann")
    else:
        record.released({"released": 0, "epoch": 1, "lost": False, "at": 2.0} | different.pop("released", {}))
    record.assigned("bob", {"assigned": 0, "epoch": 2, "found": 2, "left": 5, "at": 3.0} | different)
    return record


def test_a_ledger_tracks_the_owner_of_each_partition() -> None:
    """Whether the giver's or the taker's message comes first."""
    assert ledger().faults() == ledger(killed=True).faults() == []
    assert ledger().take_moves() == [Move(0, None, "ann"), Move(0, "ann", "bob")]
    assert ledger().at_rest(["bob"])
    assert not ledger().at_rest(["ann"])
    record = Ledger(1)
    record.assigned("ann", {"assigned": 0, "epoch": 1, "found": -1, "left": 2, "at": 1.0})
    record.assigned("bob", {"assigned": 0, "epoch": 2, "found": 2, "left": 5, "at": 3.0})
    assert not record.at_rest(["bob"])
    assert record.faults()
    record.released({"released": 0, "epoch": 1, "lost": False, "at": 2.0})
    assert record.faults() == []
    assert record.at_rest(["bob"])


@pytest.mark.parametrize(
    "different",
    [{"epoch": 1}, {"found": 1}, {"at": 1.5}, {"released": {"lost": True}}],
    ids=str,
)
def test_wrong_tenures_are_reported(different: dict[str, Any]) -> None:
    """Two owners at one epoch, a lost floor, two owners at the same time, a lost partition."""
    assert ledger(**different).faults()
