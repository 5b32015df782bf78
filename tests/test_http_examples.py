"""The curl examples of docs/http.md and docs/http/ run in order, and return what the pages show."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.receivers import Receiver, receiving
from tests.support.servers import ROOT, running_service

PAGES: Final = [ROOT / "docs/http.md", *sorted(ROOT.glob("docs/http/*.md"))]
SERVICE: Final = "http://127.0.0.1:8000"
RECEIVER: Final = "https://example.com/hooks"
WORDS: Final = {"detail", "text", "expected"}
"""Fields for people: a page may shorten them."""
VARYING: Final = {"milliseconds", "idle_seconds"}

pytestmark = pytest.mark.skipif(shutil.which("curl") is None and "CI" not in os.environ, reason="curl is not installed")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def examples(page: Path) -> list[tuple[str, Any]]:
    """The `sh` blocks, each with the JSON block that follows it directly, or None."""
    blocks = re.findall(r"^```sh\n(.*?)^```\n(?:\n```json\n(.*?)^```)?", page.read_text(), re.MULTILINE | re.DOTALL)
    return [(commands, json.loads(shown) if shown else None) for commands, shown in blocks]


def values(text: str) -> Iterator[Any]:
    """The JSON documents that several calls have printed, one after the other."""
    decoder, text = json.JSONDecoder(), text.lstrip()
    while text:
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:].lstrip()


def is_time(value: object) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def assert_shown(shown: Any, answer: Any, place: str = "") -> None:
    """Times, durations, random endings (`…`) and sentences may differ; everything else must match the page."""
    if isinstance(shown, dict) and isinstance(answer, dict):
        assert shown.keys() == answer.keys(), place
        for name, value in shown.items():
            if name not in WORDS | VARYING:
                assert_shown(value, answer[name], f"{place}.{name}")
            assert type(value) is type(answer[name]), f"{place}.{name}"
    elif isinstance(shown, list) and isinstance(answer, list):
        assert len(shown) == len(answer), place
        for number, (left, right) in enumerate(zip(shown, answer, strict=True)):
            assert_shown(left, right, f"{place}[{number}]")
    elif isinstance(shown, str) and shown.endswith("…"):
        assert answer.startswith(shown[:-1]), place
    elif is_time(shown):
        assert is_time(answer), place
    else:
        assert shown == answer, place


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_return_what_the_page_shows(
    page: Path, sqlite_url: str, receiver: Receiver, tmp_path: Path
) -> None:
    """Each page starts with an empty database."""
    (tmp_path / ".curlrc").write_text("silent\nshow-error\n")
    environment = {**os.environ, "HOME": str(tmp_path)}
    with running_service(sqlite_url, LASTBIT_WEBHOOKS_ALLOW_PRIVATE="true") as service:
        for commands, shown in examples(page):
            local = commands.replace(SERVICE, service.url).replace(RECEIVER, receiver.url)
            process = subprocess.run(
                ["bash", "-euc", local], env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            assert process.returncode == 0, (commands, process.stderr)
            printed = process.stdout.replace(receiver.url, RECEIVER)
            if shown is None:
                assert "urn:lastbit:problem" not in printed, (commands, printed)
            else:
                answer = list(values(printed))[-1]
                assert_shown(shown, answer), commands


def test_every_page_has_examples() -> None:
    """A page whose examples are not found would pass silently."""
    assert all(examples(page) for page in PAGES)
