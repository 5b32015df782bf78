"""`python -m examples.screws` as its user sees it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.examples import Example


def test_the_screws_are_counted_exactly_though_every_process_dies(tmp_path: Path) -> None:
    """More was published and read than there was; the totals still equal the truth."""
    output = Example("screws", tmp_path).run("--reports", "300")
    deaths = re.search(
        r"the republisher died (\d+) times and published ([\d,]+) screws; the counter died (\d+)", output
    )
    assert deaths
    counted = re.findall(r"^(?:counting what was read|the tally|the truth): +([\d,]+)$", output, re.MULTILINE)
    read, tally, truth = (int(number.replace(",", "")) for number in counted)
    assert min(int(deaths[1]), int(deaths[3])) >= 1
    assert int(deaths[2].replace(",", "")) > truth
    assert read > tally == truth > 0
    assert "each total is correct" in output
