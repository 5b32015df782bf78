"""What the page does with all pending or failed items of a batch: copy their ids, save them, send pending ones again.

What could go wrong: a copy or a file lacks items and doesn't say so; a cell runs as a formula; pending items are asked
for while workers are busy with them; a retry after a lost answer asks twice; a session sees a button that the service
refuses.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Download, Locator, Page, Route, expect

from tests.page.test_operations import SECRETS, guarded_url  # noqa: F401
from tests.page.test_page import HOSTILE, PHONE, ack, fail, numbers, open_batch, panel

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.nightly]

MINUTES = "Only if unchanged for (minutes)"
FORMULA = '=HYPERLINK("x", "y")'


def redrives(api: httpx.Client, batch: int) -> list[dict[str, Any]]:
    events = api.get("/v1/events", params={"batch": batch, "type": "batch.redrive"}).json()["events"]
    return [event["data"] for event in events]


def button(page: Page, kind: str, name: str) -> Locator:
    return panel(page, kind).get_by_role("button", name=name, exact=True)


def save(page: Page, kind: str, name: str) -> tuple[str, str]:
    """The name and the content of the file that the button saves."""
    with page.expect_download() as download:
        button(page, kind, name).click()
    return download.value.suggested_filename, content(download.value)


def content(download: Download) -> str:
    return Path(download.path()).read_bytes().decode()


def stuck(api: httpx.Client, **body: Any) -> int:
    """A batch with 12 items: 9 acked, 1 failed, 2 pending."""
    batch = open_batch(api, items=12, sealed=True, **body)
    ack(api, *(f"{batch}:0:{index}" for index in range(9)))
    fail(api, "slow", f"{batch}:0:9")
    return batch


def ask(page: Page) -> Locator:
    button(page, "pending", "Send again…").click()
    return page.get_by_role("dialog", name="Send all pending items again?")


def test_pending_items_are_sent_again(page: Page, api: httpx.Client, service_url: str) -> None:
    """The dialog says what will happen. Nothing but an event happens, until their acks come."""
    batch = stuck(api)
    page.goto(f"{service_url}/#/batches/{batch}")
    dialog = ask(page)
    for words in ("2 pending items", "batch.redrive", "resend", "must run", "counts once", "nested batch"):
        expect(dialog).to_contain_text(words)
    expect(dialog).to_contain_text("the last change was")
    dialog.get_by_role("button", name="Leave them").click()
    assert redrives(api, batch) == []
    ask(page)
    dialog.get_by_label("Note").fill(HOSTILE)
    dialog.get_by_role("button", name="Send them again").click()
    result = panel(page, "pending").get_by_role("status")
    expect(result).to_contain_text("Asked the producer for 2 pending items again, at position")
    expect(result).to_contain_text("no producer follows redrives")
    event = panel(page, "events").locator("[data-type='batch.redrive']")
    expect(event).to_contain_text("2 pending items")
    expect(event).to_contain_text("<img")
    (data,) = redrives(api, batch)
    assert (data["count"], data["pending"], data["note"]) == (2, True, HOSTILE)
    assert data["ranges"] == [{"start": 10, "end": 12}]
    expect(numbers(page, "pending")).to_have_text("2")
    ack(api, f"{batch}:0:10", f"{batch}:0:11")
    expect(panel(page, "pending")).to_be_hidden()
    expect(page.locator(".title .state")).to_have_text("complete")


def test_items_under_way_are_not_sent_again_on_demand(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str]
) -> None:
    """The batch has just changed: the service says so, and the operator may ask for them nonetheless."""
    batch = stuck(api)
    page.goto(f"{service_url}/#/batches/{batch}")
    dialog = ask(page)
    dialog.get_by_label(MINUTES).fill("1")
    dialog.get_by_role("button", name="Send them again").click()
    expect(dialog.get_by_role("alert")).to_contain_text("has changed within the last 60 s")
    assert redrives(api, batch) == []
    dialog.get_by_label(MINUTES).fill("")
    dialog.get_by_role("button", name="Send them again").click()
    expect(dialog).to_have_count(0)
    assert len(redrives(api, batch)) == 1
    assert all("409" in complaint for complaint in complaints)
    complaints.clear()


def test_a_dialog_asks_once(page: Page, api: httpx.Client, service_url: str, complaints: list[str]) -> None:
    """Although its answer was lost and it was confirmed again."""
    batch = stuck(api)
    page.goto(f"{service_url}/#/batches/{batch}")
    dialog = ask(page)
    minutes = dialog.get_by_label(MINUTES)
    minutes.fill("0")

    def lose(route: Route) -> None:
        route.fetch()
        route.abort()

    page.route("**/redrive", lose)
    dialog.get_by_role("button", name="Send them again").click()
    expect(dialog.get_by_role("alert")).to_contain_text("The service doesn’t answer")
    expect(minutes).not_to_be_editable()
    page.unroute("**/redrive")
    dialog.get_by_role("button", name="Send them again").click()
    expect(dialog).to_have_count(0)
    assert len(redrives(api, batch)) == 1
    assert all("ERR_FAILED" in complaint for complaint in complaints)
    complaints.clear()


def test_ids_are_copied(page: Page, api: httpx.Client, service_url: str) -> None:
    """All of them, one a line. Of more than a clipboard should get, the page says how many it copied."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    batch = open_batch(api, items=100_130, group_size=64)
    fail(api, "slow", f"{batch}:0:1", f"{batch}:2:0")
    ack(api, f"{batch}:0:0")
    page.goto(f"{service_url}/#/batches/{batch}")
    button(page, "failed", "Copy ids").click()
    expect(panel(page, "failed").get_by_role("status")).to_have_text("Copied the ids of 2 failed items.")
    assert page.evaluate("navigator.clipboard.readText()") == f"{batch}:0:1\n{batch}:2:0\n"
    button(page, "pending", "Copy ids").click()
    expect(panel(page, "pending").get_by_role("status")).to_have_text(
        "Copied the ids of only the first 100,000 of 100,127 pending items."
    )
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert len(lines) == len({*lines}) == 100_000
    assert (lines[0], lines[-1]) == (f"{batch}:0:2", f"{batch}:{100_002 // 64}:{100_002 % 64}")


def test_files_have_all_items(page: Page, api: httpx.Client, service_url: str) -> None:
    """Page by page, with the reasons of failed ones; no cell is a formula for a spreadsheet."""
    batch = open_batch(api, key="for-export", items=3000)
    failed = {f"{batch}:0:{index}": "slow" for index in range(0, 3000, 2)}
    fail(api, "slow", *failed)
    failed |= {f"{batch}:0:1": FORMULA, f"{batch}:0:3": None}
    fail(api, FORMULA, f"{batch}:0:1")
    fail(api, None, f"{batch}:0:3")
    by_number = sorted(failed, key=lambda id: int(id.rpartition(":")[2]))
    pending = [f"{batch}:0:{index}" for index in range(5, 3000, 2)]
    page.goto(f"{service_url}/#/batches/{batch}")
    name, text = save(page, "failed", "CSV")
    assert name == f"batch-{batch}-failed.csv"
    reasons = {None: "", FORMULA: f"'{FORMULA}"}
    assert list(csv.reader(text.splitlines())) == [
        ["item", "reason"],
        *([id, reasons.get(failed[id], "slow")] for id in by_number),
    ]
    expect(panel(page, "failed").get_by_role("status")).to_have_text("Saved 1,502 failed items.")
    name, text = save(page, "failed", "JSON")
    assert name == f"batch-{batch}-failed.json"
    assert json.loads(text) == {
        "batch": batch,
        "key": "for-export",
        "state": "failed",
        "count": 1502,
        "whole": True,
        "items": [{"item": id, "reason": failed[id]} for id in by_number],
    }
    name, text = save(page, "pending", "CSV")
    assert (name, text.splitlines()) == (f"batch-{batch}-pending.csv", ["item", *pending])
    _, text = save(page, "pending", "JSON")
    assert json.loads(text)["items"] == [{"item": id} for id in pending]


def test_a_file_that_is_cut_says_so(page: Page, api: httpx.Client, service_url: str) -> None:
    """In its name, at its end, and on the page."""
    batch = open_batch(api, items=1_000_001)
    page.goto(f"{service_url}/#/batches/{batch}")
    name, text = save(page, "pending", "CSV")
    assert name == f"batch-{batch}-pending-first-1000000.csv"
    rows = list(csv.reader(text.splitlines()))
    assert len(rows) == 1_000_002
    assert rows[-1] == ["cut: the first 1,000,000 of 1,000,001 pending items"]
    expect(panel(page, "pending").get_by_role("status")).to_have_text(
        "Saved only the first 1,000,000 of 1,000,001 pending items."
    )
    name, text = save(page, "pending", "JSON")
    document = json.loads(text)
    assert name == f"batch-{batch}-pending-first-1000000.json"
    assert (document["count"], document["whole"], len(document["items"])) == (1_000_001, False, 1_000_000)


def test_items_of_an_ended_batch_are_not_sent_again(page: Page, api: httpx.Client, service_url: str) -> None:
    """But copied and saved. A batch that was reopened can be sent again."""
    batch = stuck(api)
    api.post(f"/v1/batches/{batch}/cancel").raise_for_status()
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(button(page, "pending", "CSV")).to_be_visible()
    expect(button(page, "pending", "Send again…")).to_be_hidden()
    page.get_by_role("button", name="Reopen…").click()
    page.get_by_role("dialog").get_by_role("button", name="Reopen the batch").click()
    expect(button(page, "pending", "Send again…")).to_be_visible()


@pytest.mark.parametrize(("name", "buttons"), [("looker", 0), ("shop", 1)])
def test_only_a_producer_can_send_again(page: Page, guarded_url: str, name: str, buttons: int) -> None:  # noqa: F811
    """A reader can copy and save."""
    with httpx.Client(base_url=guarded_url, headers={"Authorization": f"Bearer {SECRETS['boss']}"}) as api:
        batch = stuck(api, key=f"shop-items-{name}")
    page.goto(f"{guarded_url}/#/batches/{batch}")
    page.get_by_label("Token").fill(SECRETS[name])
    page.get_by_role("button", name="Sign in").click()
    expect(button(page, "pending", "Copy ids")).to_be_visible()
    expect(button(page, "pending", "Send again…")).to_have_count(buttons)


def test_everything_works_by_keyboard(page: Page, api: httpx.Client, service_url: str) -> None:
    """Escape closes the dialog, and the focus is where it was; Enter confirms it."""
    batch = stuck(api)
    page.goto(f"{service_url}/#/batches/{batch}")
    button(page, "pending", "JSON").focus()
    page.keyboard.press("Tab")
    expect(button(page, "pending", "Send again…")).to_be_focused()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label(MINUTES)).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(button(page, "pending", "Send again…")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("0")
    page.keyboard.press("Tab")
    page.keyboard.type("the queue was purged")
    page.keyboard.press("Enter")
    expect(panel(page, "pending").get_by_role("status")).to_contain_text("2 pending items again")
    assert redrives(api, batch)[0]["note"] == "the queue was purged"


@pytest.mark.parametrize(
    "settings",
    [{"bypass_csp": True}, {"bypass_csp": True, "color_scheme": "dark", **PHONE}],
    ids=["light", "dark-phone"],
)
def test_axe_finds_nothing(page: Page, api: httpx.Client, service_url: str) -> None:
    """Neither in the panels nor in the dialog; on a phone nothing is wider than the screen."""
    batch = stuck(api)
    page.goto(f"{service_url}/#/batches/{batch}")
    with page.expect_download():
        button(page, "pending", "CSV").click()
    expect(panel(page, "pending").get_by_role("status")).to_be_visible()
    for view in ("batch", "dialog"):
        result = Axe().run(page)
        assert result.violations_count == 0, f"{view}: {result.generate_report()}"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        if view == "batch":
            ask(page)
