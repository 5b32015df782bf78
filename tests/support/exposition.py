"""Reads metrics: the answers of /metrics, and those of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import httpx
from prometheus_client import REGISTRY, Metric
from prometheus_client.parser import text_string_to_metric_families

T = TypeVar("T")


def families(client: httpx.Client) -> dict[str, Metric]:
    """The metric families of Lastbit, by the names that they have in the text."""
    answer = client.get("/metrics")
    assert answer.status_code == 200, answer.text
    # The parser removes the suffix from the names of counters.
    by_name = {
        family.name + "_total" * (family.type == "counter"): family
        for family in text_string_to_metric_families(answer.text)
    }
    return {name: family for name, family in by_name.items() if name.startswith("lastbit_")}


def value(client: httpx.Client, sample: str, **labels: str) -> float:
    """The sum of the samples of this name that have these labels."""
    return sum(
        candidate.value
        for family in families(client).values()
        for candidate in family.samples
        if candidate.name == sample and labels.items() <= candidate.labels.items()
    )


def eventually(ask: Callable[[], T], expected_value: T, tries: int = 600) -> None:
    """Ask until the answer is the expected one, for metrics that a process updates shortly after its answer."""
    pause = threading.Event()
    answer = ask()
    for _ in range(tries):
        if answer == expected_value:
            return
        pause.wait(0.05)
        answer = ask()
    raise AssertionError(f"{answer!r} never became {expected_value!r}")


class Change:
    """The change of a sample of this process since this object was created."""

    def __init__(self, name: str, **labels: str) -> None:
        self._name, self._labels = name, labels
        self._before = self._now()

    def _now(self) -> float:
        sample = REGISTRY.get_sample_value(self._name, self._labels)
        assert sample is not None, self._name
        return sample

    def __call__(self) -> float:
        return self._now() - self._before
