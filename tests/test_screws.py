"""`python -m examples.screws` as its user sees it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.examples import Example


def test_the_screws_are_counted_to_the_truth_though_everybody_dies(tmp_path: Path) -> None:
    """More was published and read than there was; the totals are equal to the truth all the same."""
    said = Example("screws", tmp_path).said("--reports", "300")
    died = re.search(r"the republisher died (\d+) times and published ([\d,]+) screws; the counter died (\d+)", said)
    assert died
    counted = re.findall(r"^(?:counting what was read|the tally|the truth): +([\d,]+)$", said, re.MULTILINE)
    read, tally, truth = (int(number.replace(",", "")) for number in counted)
    assert min(int(died[1]), int(died[3])) >= 1
    assert int(died[2].replace(",", "")) > truth
    assert read > tally == truth > 0
    assert "each total is the truth" in said
