"""`python -m examples.orders` as its user sees it, and its final proof."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from examples.orders.proof import faults
from lastbit import Event
from tests.support.examples import Example


@pytest.mark.nightly
def test_each_order_ships_once_though_a_worker_is_killed(tmp_path: Path) -> None:
    """Every permutation, repeated events, one command for each order, and the output confirms it."""
    output = Example("orders", tmp_path).run()
    assert "36 orders, 6 of each of the 6 ways in which three events can come" in output
    assert re.search(r"^worker ann is killed \(SIGKILL\), \d+ orders have shipped$", output, re.M)
    assert re.search(r"^\d+ events in the feed, \d\d+ events came twice$", output, re.M)
    assert "36 orders shipped, one command each; 12 wait for missing events" in output
    assert "All checks passed" in output


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle: one line, exit status 130, no process, no folder."""
    Example("orders", tmp_path).interrupt("3 workers")


def event(position: int, type: str, order: str = "o1") -> Event:
    data: Any = {"order": order} if type in ("card.charged", "items.reserved") else None
    key = None if data else order
    return Event(position, f"{type}:{position}", type, None, key, data, datetime.now(UTC))


CAME = [event(1, "card.charged"), event(2, "batch.completed"), event(3, "items.reserved"), event(4, "card.charged")]


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([*CAME, event(5, "command.ship")], None),
        (CAME, "has 0 commands"),
        ([*CAME, event(5, "command.ship"), event(6, "command.ship")], "has 2 commands"),
        ([*CAME[:2], event(3, "command.ship"), event(4, "items.reserved")], "before all its events"),
        ([*CAME[1:], event(5, "command.ship"), event(6, "command.ship", "o2")], "though it is not complete"),
        ([*CAME, event(5, "command.ship"), event(6, "command.ship", "o3")], "does not exist"),
    ],
)
def test_the_proof_detects_faults(events: list[Event], word: str | None) -> None:
    """From the feed alone."""
    faults_ = faults(events, ["o1"], ["o2"])
    assert bool(faults_) == (word is not None)
    assert word is None or word in faults_[0]
