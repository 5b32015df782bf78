"""Failures by reason and redrives, in a real browser, and what a batch shows of its deadline and callback.

What could go wrong: the counts differ from those of the API; a sample looks exact; a second click, or a retry after a
lost answer, redrives twice; a session sees a button that the service refuses.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, Route, expect

from tests.page.test_operations import SECRETS, guarded_url  # noqa: F401
from tests.page.test_page import HOSTILE, PHONE, ack, fail, open_batch, panel
from tests.support.receivers import Receiver, status

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.nightly]

FORMULA = '=HYPERLINK("x", "y")'


def redrives(api: httpx.Client, batch: int) -> list[dict[str, Any]]:
    events = api.get("/v1/events", params={"batch": batch, "type": "batch.redrive"}).json()["events"]
    return [event["data"] for event in events]


def reasons(page: Page) -> Locator:
    return panel(page, "reasons").locator(".by-reason > li")


def ask(page: Page, reason: str) -> Locator:
    """Open the dialog of this reason."""
    reasons(page).filter(has_text=reason).get_by_role("button", name="Send again…").click()
    return page.get_by_role("dialog")


def failing(api: httpx.Client, **body: Any) -> int:
    """A batch with 70 items: 10 failed as "slow", 2 as a formula, 1 without a reason."""
    batch = open_batch(api, items=70, group_size=64, **body)
    fail(api, "slow", *(f"{batch}:0:{index}" for index in range(10)))
    fail(api, FORMULA, f"{batch}:0:20", f"{batch}:1:0")
    fail(api, None, f"{batch}:0:30")
    return batch


def test_failures_are_grouped_by_reason(page: Page, api: httpx.Client, service_url: str) -> None:
    """The most frequent first; each with examples, which lead to the item. They follow what happens."""
    batch = failing(api)
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(panel(page, "reasons")).to_contain_text("13 failed items, 3 reasons")
    expect(reasons(page).locator(".many")).to_have_text(["10", "2", "1"])
    expect(reasons(page).nth(0)).to_contain_text("slow")
    expect(reasons(page).nth(1)).to_contain_text(FORMULA)
    expect(reasons(page).nth(2)).to_contain_text("no reason given")
    expect(reasons(page).nth(0).get_by_role("link")).to_have_text([f"{batch}:0:{index}" for index in range(5)])
    reasons(page).nth(1).get_by_role("link", name=f"{batch}:1:0").click()
    expect(page.get_by_role("slider", name="Item")).to_have_attribute(
        "aria-valuetext", f"{batch}:1:0, failed: {FORMULA}"
    )
    ack(api, f"{batch}:0:20", f"{batch}:1:0")
    expect(reasons(page)).to_have_count(2)
    expect(panel(page, "reasons")).not_to_contain_text("sample")


def test_a_sample_is_reported_as_such(page: Page, api: httpx.Client, service_url: str) -> None:
    """The dialog promises no number, and the answer has it."""
    batch = open_batch(api, items=10_400, group_size=8192)
    for start in range(0, 10_400, 5_200):
        fail(api, "all of them", *(f"{batch}:{n // 8192}:{n % 8192}" for n in range(start, start + 5_200)))
    examined = api.get(f"/v1/batches/{batch}/failed/reasons").json()["examined"]
    assert examined < 10_400
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(panel(page, "reasons")).to_contain_text(f"A sample: {examined:,} of 10,400 failed items were examined.")
    dialog = ask(page, "all of them")
    expect(dialog).to_contain_text(f"At least {examined:,} failed items for this reason")
    dialog.get_by_role("button", name="Send them again").click()
    expect(panel(page, "reasons").get_by_role("status")).to_contain_text("10,400 failed items")


def test_reasons_are_copied(page: Page, api: httpx.Client, service_url: str) -> None:
    """All of them, also those that are not shown. Where a reason has more items than the text, it says so."""
    batch = open_batch(api, key="for-export", items=40)
    for index in range(12):
        fail(api, f"reason {index:02}", f"{batch}:0:{index}")
    fail(api, FORMULA, *(f"{batch}:0:{index}" for index in range(20, 26)))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(reasons(page)).to_have_count(10)
    head = panel(page, "reasons")
    head.get_by_role("button", name="Copy").click()
    expect(head.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.splitlines()[:2] == [
        f"for-export (batch {batch}): 18 of 40 items failed",
        f"6  {FORMULA}  ({' '.join(f'{batch}:0:{index}' for index in range(20, 25))} …)",
    ]
    assert len(copied.splitlines()) == 14
    head.get_by_role("button", name="Show more").click()
    expect(reasons(page)).to_have_count(13)


def test_one_reason_or_all_are_redriven(page: Page, api: httpx.Client, service_url: str) -> None:
    """After a preview of how many; the history then shows who asked for what, and why."""
    batch = failing(api)
    page.goto(f"{service_url}/#/batches/{batch}")
    dialog = ask(page, "slow")
    expect(dialog).to_contain_text("10 failed items for this reason")
    dialog.get_by_role("button", name="Leave them").click()
    assert redrives(api, batch) == []
    ask(page, "slow").get_by_label("Note").fill(HOSTILE)
    dialog.get_by_role("button", name="Send 10 items again").click()
    expect(panel(page, "reasons").get_by_role("status")).to_contain_text("Asked the producer for 10 failed items again")
    event = panel(page, "events").locator("[data-type='batch.redrive']")
    expect(event).to_contain_text("10 failed items")
    expect(event).to_contain_text("slow")
    expect(event).to_contain_text("<img")
    page.get_by_role("button", name="Send all again…").click()
    expect(dialog).to_contain_text("13 failed items.")
    dialog.get_by_role("button", name="Send 13 items again").click()
    expect(panel(page, "reasons").get_by_role("status")).to_contain_text("13 failed items again")
    one, every = redrives(api, batch)
    assert (one["count"], one["reason"], one["note"]) == (10, "slow", HOSTILE)
    assert (every["count"], every["reason"], every["note"]) == (13, None, None)


def test_a_dialog_redrives_once(page: Page, api: httpx.Client, service_url: str, complaints: list[str]) -> None:
    """Although its answer was lost and it was confirmed again."""
    batch = failing(api)
    page.goto(f"{service_url}/#/batches/{batch}")
    dialog = ask(page, "slow")
    note = dialog.get_by_label("Note")
    note.fill("once")

    def lose(route: Route) -> None:
        route.fetch()
        route.abort()

    page.route("**/redrive", lose)
    confirm = dialog.get_by_role("button", name="Send 10 items again")
    confirm.dblclick()
    expect(dialog.get_by_role("alert")).to_contain_text("The service doesn’t answer")
    assert len(redrives(api, batch)) == 1
    expect(note).not_to_be_editable()
    page.unroute("**/redrive")
    confirm.click()
    expect(dialog).to_have_count(0)
    expect(panel(page, "reasons").get_by_role("status")).to_contain_text("10 failed items again")
    assert len(redrives(api, batch)) == 1
    assert all("ERR_FAILED" in complaint for complaint in complaints)
    complaints.clear()


def test_nothing_to_redrive_is_reported_plainly(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str]
) -> None:
    """If all were acked while the dialog was open."""
    batch = failing(api)
    page.goto(f"{service_url}/#/batches/{batch}")
    dialog = ask(page, "slow")
    ack(api, *(f"{batch}:0:{index}" for index in range(10)))
    dialog.get_by_role("button", name="Send 10 items again").click()
    expect(dialog.get_by_role("alert")).to_have_text(
        "There is nothing to send again: none of these items is failed any more."
    )
    dialog.get_by_role("button", name="Leave them").click()
    expect(reasons(page)).to_have_count(2)
    assert redrives(api, batch) == []
    assert all("409" in complaint for complaint in complaints)
    complaints.clear()


def test_a_redriven_batch_is_followed_after_its_end(page: Page, api: httpx.Client, service_url: str) -> None:
    """Acks of a complete batch make no event until it succeeds. It can be redriven, an ended one can't."""
    batch = open_batch(api, items=10, sealed=True)
    fail(api, "slow", *(f"{batch}:0:{index}" for index in range(10)))
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(page.locator(".title .state")).to_have_text("all failed")
    ask(page, "slow").get_by_role("button", name="Send 10 items again").click()
    for start, end in ((0, 3), (3, 6), (6, 9)):
        ack(api, *(f"{batch}:0:{index}" for index in range(start, end)))
        expect(page.locator("[data-number='failed'] dd")).to_have_text(str(10 - end))
        expect(reasons(page).locator(".many")).to_have_text(str(10 - end))
    ack(api, f"{batch}:0:9")
    expect(page.locator(".title .state")).to_have_text("succeeded")
    expect(panel(page, "reasons")).to_contain_text("No item is failed any more.")
    expect(panel(page, "reasons").get_by_role("button")).to_have_count(0)
    cancelled = failing(api)
    api.post(f"/v1/batches/{cancelled}/cancel").raise_for_status()
    page.goto(f"{service_url}/#/batches/{cancelled}")
    expect(reasons(page)).to_have_count(3)
    expect(page.get_by_role("button", name="Send again…")).to_have_count(0)
    expect(page.get_by_role("button", name="Send all again…")).to_be_hidden()


@pytest.mark.parametrize(("name", "buttons"), [("looker", 0), ("shop", 2)])
def test_only_a_producer_can_redrive(page: Page, guarded_url: str, name: str, buttons: int) -> None:  # noqa: F811
    """A reader sees the reasons without the buttons, and can export them."""
    with httpx.Client(base_url=guarded_url, headers={"Authorization": f"Bearer {SECRETS['boss']}"}) as api:
        batch = failing(api, key=f"shop-redrive-{name}")
        page.goto(f"{guarded_url}/#/batches/{batch}")
        page.get_by_label("Token").fill(SECRETS[name])
        page.get_by_role("button", name="Sign in").click()
        expect(reasons(page)).to_have_count(3)
        expect(reasons(page).get_by_role("button", name="Send again…")).to_have_count(buttons)
        expect(page.get_by_role("button", name="Send all again…")).to_have_count(1 if buttons else 0)
        expect(panel(page, "failed").get_by_role("button", name="CSV")).to_be_visible()
        if buttons:
            ask(page, "slow").get_by_role("button", name="Send 10 items again").click()
            expect(panel(page, "reasons").get_by_role("status")).to_contain_text("10 failed items again")
            assert len(redrives(api, batch)) == 1


def test_a_batch_shows_its_deadline_and_its_callback(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver
) -> None:
    """How much time is left, where the callback goes, and how it was answered."""
    receiver.replies(status(204, Content_Length="0"))
    deadline = (datetime.now(UTC) + timedelta(hours=3, minutes=1)).isoformat()
    batch = open_batch(api, items=1, deadline=deadline, callback={"url": receiver.url})
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(page.locator(".about")).to_contain_text("deadline in 3 h")
    callback = panel(page, "callback")
    expect(callback).to_contain_text(receiver.url)
    expect(callback).to_contain_text("active")
    expect(callback).to_contain_text("batch.succeeded")
    ack(api, f"{batch}:0:0")
    api.post(f"/v1/batches/{batch}/seal").raise_for_status()
    receiver.wait_for(2)
    delivered = panel(page, "deliveries").locator("[data-state='delivered']")
    expect(delivered).to_have_count(2)
    expect(delivered.first).to_contain_text("callback")
    expect(delivered.first).to_contain_text("answered 204")
    callback.get_by_role("link").click()
    expect(page.locator(".log-of > li")).to_have_count(2)


def test_an_expired_batch_shows_why(page: Page, api: httpx.Client, service_url: str) -> None:
    deadline = (datetime.now(UTC) + timedelta(seconds=4)).isoformat()
    batch = open_batch(api, items=1, deadline=deadline)
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(page.locator(".title .state")).to_have_text("expired")
    expect(panel(page, "events").locator("[data-type='batch.expired']")).to_contain_text("at its deadline")
    expect(page.locator(".big .words")).to_have_text("it expired")


@pytest.mark.parametrize(
    "settings",
    [{"bypass_csp": True}, {"bypass_csp": True, "color_scheme": "dark", **PHONE}],
    ids=["light", "dark-phone"],
)
def test_axe_finds_nothing_in_a_failed_batch(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver
) -> None:
    """Nor in the dialog; on a phone nothing is wider than the screen."""
    batch = failing(api, callback={"url": receiver.url}, deadline=(datetime.now(UTC) + timedelta(days=1)).isoformat())
    fail(api, HOSTILE * 20 + "x" * 900, f"{batch}:1:1")
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(reasons(page)).to_have_count(4)
    ask(page, "slow").get_by_role("button", name="Send 10 items again").click()
    expect(panel(page, "events").locator(".details")).to_be_visible()
    for view in ("batch", "dialog"):
        result = Axe().run(page)
        assert result.violations_count == 0, f"{view}: {result.generate_report()}"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        if view == "batch":
            ask(page, "xxx")
