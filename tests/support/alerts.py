"""Which alerts fire: promtool evaluates the rules over simulated time, on values that a real service has shown.

A `Reading` is two scrapes. From it each series is continued for as long as wanted: a counter grows each minute by as
much as between the two scrapes; a gauge stays as it is. In a fault, one that grew as fast as time goes on growing.
"""

from __future__ import annotations

import math
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers import ROOT

RULES: Final = ROOT / "deploy/prometheus/alerts.yml"
APART: Final = 3.0
"""Seconds between the two scrapes."""

Values = dict[str, float]
"""The value of each series, by its name and labels."""


@dataclass(frozen=True)
class Reading:
    earlier: Values
    later: Values
    seconds: float

    def growth(self, series: str, *, ages: bool) -> float:
        """The growth in a minute; with `ages`, also of what grows as fast as time."""
        # A counter may have begun in between.
        difference = self.later[series] - self.earlier.get(series, 0.0)
        if re.match(r"\w+_(total|count|sum|bucket)\b", series):
            return max(0.0, difference)
        # A gauge shows what was measured up to half a second earlier; on a busy machine, a second.
        return 60.0 if ages and abs(difference - self.seconds) < 0.5 * self.seconds else 0.0


def read(client: httpx.Client, meanwhile: Callable[[], object] = lambda: None) -> Reading:
    """Scrape twice, and call `meanwhile` in between."""
    start = time.monotonic()
    earlier = _scrape(client)
    meanwhile()
    threading.Event().wait(APART)  # the time is what is measured
    later = _scrape(client)
    return Reading(earlier, later, time.monotonic() - start)


def _scrape(client: httpx.Client) -> Values:
    try:
        response = client.get("/metrics")
    except httpx.TransportError:
        return {'up{job="lastbit",instance="a"}': 0.0}
    values = {'up{job="lastbit",instance="a"}': 1.0}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {**sample.labels, "job": "lastbit", "instance": "a"}
            text = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
            values[f"{sample.name}{{{text}}}"] = sample.value
    return values


def fired(folder: Path, healthy: Reading, faulty: Reading | None = None, *, minutes: int = 60) -> set[str]:
    """The alerts that fire at the end of `minutes` of the fault, after a healthy hour; without a fault, those that
    fire at any time in this hour."""
    readings = [(healthy, 60)] if faulty is None else [(healthy, 60), (faulty, minutes)]
    series = sorted({name for reading, _ in readings for name in reading.later})
    end = sum(length for _, length in readings)
    firing = 'ALERTS{alertstate="firing"}' if faulty else 'count_over_time(ALERTS{alertstate="firing"}[1h])'
    test: dict[str, Any] = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {
                        "series": name,
                        "values": " ".join(
                            _continued(reading, name, length, ages=reading is faulty) for reading, length in readings
                        ),
                    }
                    for name in series
                ],
                # Nothing is expected, so promtool prints what there is.
                "promql_expr_test": [
                    {"expr": f"count by (alertname) ({firing})", "eval_time": f"{end}m", "exp_samples": []}
                ],
            }
        ],
    }
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump(test))
    process = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    output = process.stdout + process.stderr
    assert "SUCCESS" in output or "exp:" in output, output
    return set(re.findall(r'alertname=\\?"(\w+)\\?"', output))


def _continued(reading: Reading, series: str, minutes: int, *, ages: bool) -> str:
    if series not in reading.later:
        return f"_x{minutes}"
    value, growth = reading.later[series], reading.growth(series, ages=ages)
    if math.isinf(value):
        return " ".join(["Inf"] * minutes)
    # "x" repeats the value, so there is one more.
    return f"{value:.17g}{growth:+.17g}x{minutes - 1}" if growth else f"{value:.17g}x{minutes - 1}"
