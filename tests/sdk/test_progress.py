"""Rate and remaining time of a batch, with a test clock, and the terminal's progress bar."""

from __future__ import annotations

import io
import shutil
import subprocess
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from rich.console import Console

from lastbit import progress
from lastbit.models import Batch
from tests.sdk.test_models import BATCH
from tests.support.servers import ROOT

SEALED = Batch.from_json({**BATCH, "items": 10_000, "acked": 0, "failed": 0, "pending": 10_000})


def seen(state: str = "sealed", resolved: int = 0, **fields: Any) -> Batch:
    return replace(SEALED, state=state, acked=resolved, pending=SEALED.items - resolved, **fields)


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_rate_is_that_of_the_last_half_minute(clock: Clock) -> None:
    """A batch that was slow for an hour and is fast now counts as fast; one without progress waits for acks."""
    pace = progress.Pace(clock)
    resolved = 0
    for step in (1, 100):
        for _ in range(60):
            pace.saw(seen(resolved=resolved))
            clock.time += 1
            resolved += step
    batch = seen(resolved=resolved)
    pace.saw(batch)
    assert pace.rate == 100
    assert pace.words(batch) == f"100/s, about {progress.duration(batch.pending / 100)} left"
    for _ in range(31):
        clock.time += 1
        pace.saw(batch)
    assert pace.rate == 0
    assert pace.words(batch) == "waiting for acks"


def test_two_distant_measurements_give_a_rate(clock: Clock) -> None:
    """Two measurements are enough, however long ago the first was; one is not."""
    pace = progress.Pace(clock)
    pace.saw(seen())
    assert (pace.rate, pace.words(seen())) == (0.0, "waiting for acks")
    clock.time += 100
    pace.saw(seen(resolved=150))
    assert pace.words(seen(resolved=150)) == "1.5/s, about 1 h 49 min left"


def test_an_open_batch_has_no_estimate(clock: Clock) -> None:
    """It may still grow, and the text says so, even if nothing is pending."""
    pace = progress.Pace(clock)
    pace.saw(seen("open"))
    assert pace.words(seen("open")) == "waiting for acks, not sealed"
    clock.time += 10
    pace.saw(seen("open", 500))
    assert pace.words(seen("open", 500)) == "50/s, not sealed"
    clock.time += 100
    idle = seen("open", SEALED.items)
    pace.saw(idle)
    for _ in range(40):
        clock.time += 1
        pace.saw(idle)
    assert pace.words(idle) == "not sealed"


def test_an_ended_batch_shows_how_long_it_took(clock: Clock) -> None:
    """In every final state, however long it was watched."""
    pace = progress.Pace(clock)
    clock.time += 10
    ended_at = SEALED.created_at + timedelta(seconds=75)
    for state in ("complete", "expired", "cancelled"):
        assert pace.words(seen(state, SEALED.items, ended_at=ended_at)) == "in 1 min 15 s"


SHARES = [
    *((0, 5, "0 %"), (1, 3, "33 %"), (2, 3, "66 %"), (99, 100, "99 %"), (5, 5, "100 %"), (7, 5, "100 %")),
    *((1, 20_000, "<0.01 %"), (57, 10_000, "0.57 %"), (9_999, 10_000, "99.99 %"), (29, 1_000, "2.9 %")),
    *((999_999_999_999, 10**12, "99.99 %"), (10**12, 10**12, "100 %"), (901, 1_000, "90.1 %")),
]


@pytest.mark.parametrize(("part", "whole", "words"), SHARES)
def test_a_share_is_whole_only_when_all_is_done(part: int, whole: int, words: str) -> None:
    assert progress.percent(part, whole) == words


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_page_shows_the_same_shares() -> None:
    page = (ROOT / "api/page/percent.js").as_uri()
    pairs = [[part, whole] for part, whole, _ in SHARES]
    code = f'import {{ percent }} from "{page}"; for (const pair of {pairs}) console.log(`${{percent(...pair)}} %`);'
    shown = subprocess.run(
        ["node", "--no-warnings", "--input-type=module", "-e", code], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == [words for *_, words in SHARES]


def test_the_bar_shows_counts_and_rate() -> None:
    """Counts, state, failures and rate on one line; an open batch without pending items doesn't look finished."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=160, color_system=None)
    with progress.bar(console) as update:
        update(seen("open", SEALED.items))
    assert "10,000 of 10,000" in output.getvalue()
    assert "not sealed" in output.getvalue()
    with progress.bar(console) as update:
        update(seen(resolved=2_500, failed=3))
    assert "2,503 of 10,000" in output.getvalue()
    assert "3 failed" in output.getvalue()
    assert "waiting for acks" in output.getvalue()
