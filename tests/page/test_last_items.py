"""The drill of the last items, in a browser and on the command line: from "99.9 % since an hour" to the items, the
reason, and sent again, by an operator who never saw the tool.

Of 1,000 items, one is pending, as a queue has lost its message, and one has failed. A producer follows redrives.

What could go wrong: the operator doesn't find the batch, the items or the reason; or finds no way to send them again,
or must know one that neither the page nor the command line names.
"""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from lastbit import BatchHandle, Client
from tests.page.test_drill import producer
from tests.page.test_page import panel
from tests.support.servers import running_service, sqlite_file

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.nightly]

REASON = "HTTP 502 from the image renderer after 5 attempts"
LOST, FAILED = 417, 712


@pytest.fixture(scope="module")
def database_url() -> Iterator[str]:
    with sqlite_file() as url:
        yield url


@pytest.fixture(scope="module")
def service_url(database_url: str) -> Iterator[str]:
    with running_service(database_url) as running:
        yield running.url


@pytest.fixture
def client(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client:
        yield client


@pytest.fixture
def hung_batch(client: Client, database_url: str) -> BatchHandle:
    """The batch, unchanged for an hour, beside one that is busy and one that is done."""
    word = uuid.uuid4().hex[:6]
    client.open(key=f"catalog-{word}-done", sealed=True)
    client.ack(client.open(key=f"catalog-{word}-busy", items=10).ids[:9])
    batch = client.open(key=f"catalog-{word}-stuck", items=1000, sealed=True)
    client.ack(id for number, id in enumerate(batch.ids) if number not in (LOST, FAILED))
    client.fail(batch.ids[FAILED], reason=REASON)
    earlier = "strftime('%Y-%m-%d %H:%M:%f', {0}, '-65 minutes') || '000'"
    changes = [f"{name} = {earlier.format(name)}" for name in ("created_at", "updated_at", "seen_updated_at")]
    with sqlite3.connect(database_url.removeprefix("sqlite:///"), timeout=30) as database:
        database.execute(f"UPDATE batches SET {', '.join(changes)} WHERE id = ?", (batch.id,))
    batch.refresh()
    return batch


def check_end(client: Client, batch: BatchHandle) -> None:
    """Both items were sent again, and nothing else."""
    assert batch.wait(60).succeeded
    events = client.events(batch=batch.id, types="batch.redrive").events
    assert sorted((event.data["count"], event.data["pending"]) for event in events) == [(1, False), (1, True)]


def test_an_operator_sends_the_last_items_again_from_the_page(
    page: Page, service_url: str, client: Client, hung_batch: BatchHandle
) -> None:
    """Five clicks and what they show."""
    with producer(service_url, client.events(batch=hung_batch.id).next):
        page.goto(service_url)
        page.locator("#sections").get_by_role("link", name="Stuck").click()
        page.get_by_role("link", name="1 h", exact=True).click()
        line = page.get_by_role("row").filter(has_text="99.9 %")
        expect(line).to_contain_text("1 h ago")
        line.get_by_role("link").click()
        expect(panel(page, "why")).to_contain_text(f"1 of 1,000 items is pending: {hung_batch.ids[LOST]}")
        reason = panel(page, "reasons").locator(".by-reason > li")
        expect(reason).to_contain_text(REASON)
        expect(reason).to_contain_text(hung_batch.ids[FAILED])
        reason.get_by_role("button", name="Send again…").click()
        page.get_by_role("button", name="Send 1 item again").click()
        expect(page.locator("[data-number='failed'] dd")).to_have_text("0")
        panel(page, "pending").get_by_role("button", name="Send again…").click()
        page.get_by_role("button", name="Send them again").click()
        expect(page.locator(".title .state")).to_have_text("succeeded")
        check_end(client, hung_batch)


def test_an_operator_sends_the_last_items_again_on_the_command_line(
    service_url: str, client: Client, hung_batch: BatchHandle
) -> None:
    """Four commands. Each but the first is one that the output before it names."""

    def lastbit(*arguments: str) -> str:
        command = [sys.executable, "-m", "lastbit", "--url", service_url, *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout

    assert "lastbit list --unchanged-for 10m" in lastbit("--help")
    with producer(service_url, client.events(batch=hung_batch.id).next):
        (line,) = [line for line in lastbit("list", "--unchanged-for", "10m").splitlines() if "99.9 %" in line]
        assert str(hung_batch.id) in line
        text = lastbit("explain", str(hung_batch.id))
        assert hung_batch.ids[LOST] in text
        assert REASON in text
        commands = re.findall(r"^  lastbit (redrive .*?)  ", text, re.MULTILINE)
        assert len(commands) == 2
        for command in commands:
            assert "asked for 1" in lastbit(*command.split())
        check_end(client, hung_batch)
