"""A worker with a library in a version that its adapter doesn't know says so, once, at its start."""

from __future__ import annotations

import logging
import re
import tomllib

import pytest

import lastbit.integrations.celery
from lastbit import Client
from lastbit.integrations import _versions
from lastbit.integrations._resolver import Resolver
from tests.support.servers import ROOT


@pytest.fixture(autouse=True)
def _none_is_checked_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_versions, "_checked", set())


def started(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What two workers of one process say of versions at their start."""
    with caplog.at_level(logging.WARNING, "lastbit"), Client("http://127.0.0.1:9") as client:
        for _ in range(2):
            resolver: Resolver[lastbit.integrations.celery.Lastbit] = Resolver(client, print, print, linger=0)
            resolver.start()
            resolver.close()
    return [record.getMessage() for record in caplog.records if "was tried with" in record.getMessage()]


@pytest.mark.parametrize(("version", "in_range"), [("5.7.0", True), ("6.0.0rc1", False), ("5.3.9", False)])
def test_an_unknown_version_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, in_range: bool
) -> None:
    """With the library, its version, and the extra's range, as it is in pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (line,) = extras["celery"]
    actual = _versions.metadata.version
    monkeypatch.setattr(_versions.metadata, "version", lambda name: version if name == "celery" else actual(name))
    lines = started(caplog)
    assert len(lines) == (0 if in_range else 1)
    for text in lines:
        assert text.startswith(f"celery {version} is not")
        assert f"({line.removeprefix('celery')})" in text


def test_the_range_of_each_adapter_is_read() -> None:
    """The installed package's, in a form that is understood."""
    ranges = {adapter: bounds for adapter, _, bounds in _versions._required()}
    for adapter in ("airflow", "aws_lambda", "celery", "dramatiq", "rabbitmq", "rq", "sqs", "taskiq"):
        assert re.fullmatch(r">=[\d.]+,<[\d.]+", ranges[adapter])


@pytest.mark.parametrize(
    ("version", "is_known"),
    [("2", True), ("2.0", True), ("1.9.9", False), ("2.10.post1", True), ("3.0", False), ("10", False)],
)
def test_versions_are_compared_as_numbers(version: str, is_known: bool) -> None:
    assert _versions.is_known(version, ">=2.0,<3") is is_known
