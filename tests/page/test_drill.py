"""The drill of an operator, once in a browser and once on the command line.

3,000 of 20,000 items fail for three reasons. The operator finds the batch by the beginning of its key, sees the reasons
and redrives one. A producer that follows the redrives sends those items again. The batch succeeds within its tolerance,
and its signed callback arrives.

What could go wrong: an operator needs something that only the other tool shows; a reason's items are not all sent
again; the batch succeeds too early; the callback isn't sent, or isn't signed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from lastbit import BatchHandle, Client
from tests.page.test_page import panel, row
from tests.support.receivers import Got, Receiver

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.nightly]

ITEMS = 20_000
CAUSES = {
    "HTTP 502 from the image renderer after 5 attempts": (0, 13, 26),
    "no answer from the price service within 30 s": (7, 33),
    "source file is truncated": (20,),
}
"""Three reasons, and which of forty items fail for each: 1,500, 1,000 and 500 in all, none beside another, so that the
event of a redrive can't name them all."""
RENDERER, *OTHERS = CAUSES


@pytest.fixture
def client(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client:
        yield client


@pytest.fixture
def failed(client: Client, receiver: Receiver) -> BatchHandle:
    """The batch, complete with twice the failures that it tolerates, among batches with similar keys."""
    word = uuid.uuid4().hex[:6]
    for shop in ("de", "it"):
        client.open(key=f"nightly-{word}-{shop}", sealed=True)
    batch = client.open(
        key=f"nightly-{word}-fr", items=ITEMS, sealed=True, tolerated_failures=1500, callback=receiver.url
    )
    assert batch.callback is not None
    assert batch.ids is not None
    receiver.secrets.append(batch.callback.secret)
    ids = list(batch.ids)
    rest = set(range(40))
    for reason, places in CAUSES.items():
        client.fail((ids[number] for number in range(ITEMS) if number % 40 in places), reason=reason)
        rest -= {*places}
    client.ack(ids[number] for number in range(ITEMS) if number % 40 in rest)
    info = batch.refresh()
    assert (info.failed, info.complete, info.exceeded, info.succeeded) == (3000, True, True, False)
    (completed,) = receiver.wait_for(1)
    assert called(completed) == (True, "batch.completed", batch.id)
    return batch


@contextmanager
def producer(url: str, after: int) -> Iterator[None]:
    """A producer that follows redrives, in a process of its own."""
    command = [sys.executable, "-m", "tests.page.redrive_worker", url, str(after)]
    with subprocess.Popen(command) as process:
        try:
            yield
        finally:
            process.kill()


def called(request: Got) -> tuple[bool, str, int]:
    """Whether its signature is valid, and what it says."""
    return request.valid, request.json["type"], request.json["data"]["batch"]


def check_end(batch: BatchHandle, receiver: Receiver) -> None:
    """Exactly the items of the renderer were sent again, once; the success was reported to the callback."""
    _, succeeded = receiver.wait_for(2)
    assert called(succeeded) == (True, "batch.succeeded", batch.id)
    info = batch.refresh()
    assert (info.acked, info.failed, info.succeeded, info.exceeded) == (18_500, 1500, True, True)
    assert {reason.reason: reason.count for reason in batch.failure_reasons().reasons} == dict(
        zip(OTHERS, (1000, 500), strict=True)
    )
    assert batch.verify().ok


def test_an_operator_works_from_the_page(
    page: Page, service_url: str, client: Client, failed: BatchHandle, receiver: Receiver
) -> None:
    key = str(failed.info.key)
    with producer(service_url, client.events(batch=failed.id).next):
        page.goto(service_url)
        page.get_by_label("Key").press_sequentially(key[:-2])
        page.get_by_label("Outcome").select_option("exceeded")
        expect(page.locator(".batch")).to_have_count(1)
        expect(row(page, failed.id)).to_contain_text("3,000 failed")
        row(page, failed.id).get_by_role("link", name=key).click()
        expect(page.locator(".about")).to_contain_text("tolerates 1,500 items failed, which was exceeded")
        reasons = panel(page, "reasons").locator(".by-reason > li")
        expect(reasons.locator(".many")).to_have_text(["1,500", "1,000", "500"])
        expect(reasons.locator(".reason")).to_have_text(list(CAUSES))
        reasons.first.get_by_role("button", name="Send again…").click()
        page.get_by_label("Note").fill("the renderer is back")
        page.get_by_role("button", name="Send 1,500 items again").click()
        expect(page.locator(".title .state")).to_have_text("succeeded")
        expect(page.locator(".big .words")).to_have_text("1,500 failed, within the tolerance")
        expect(reasons.locator(".reason")).to_have_text(OTHERS)
        events = panel(page, "events")
        expect(events.locator("[data-type='batch.redrive']")).to_contain_text("the renderer is back")
        expect(events.locator("[data-type='batch.succeeded']")).to_be_visible()
        expect(panel(page, "callback")).to_contain_text(receiver.url)
        delivered = panel(page, "deliveries").locator("[data-state='delivered']").filter(has_text="succeeded")
        expect(delivered).to_contain_text("answered 204")
        check_end(failed, receiver)


def lastbit(url: str, *arguments: str) -> Any:
    command = [sys.executable, "-m", "lastbit", "--url", url, "--json", *arguments]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout)


def test_an_operator_works_on_the_command_line(
    service_url: str, client: Client, failed: BatchHandle, receiver: Receiver
) -> None:
    key = str(failed.info.key)
    with producer(service_url, client.events(batch=failed.id).next):
        (row,) = lastbit(service_url, "list", "--key-prefix", key[:-2], "--outcome", "exceeded")["batches"]
        assert (row["id"], row["failed"]) == (failed.id, 3000)
        reasons = lastbit(service_url, "reasons", key)["reasons"]
        assert [(row["reason"], row["count"]) for row in reasons] == list(zip(CAUSES, (1500, 1000, 500), strict=True))
        process = lastbit(service_url, "redrive", key, "--reason", RENDERER, "--note", "the renderer is back", "--yes")
        assert (process["count"], process["more"]) == (1500, True)
        following = ("--follow", "--after", str(process["position"]), "--limit", "1")
        event = lastbit(service_url, "events", "--batch", key, "--type", "batch.succeeded", *following)
        assert event["type"] == "batch.succeeded"
        assert lastbit(service_url, "status", key)["succeeded"]
        check_end(failed, receiver)
