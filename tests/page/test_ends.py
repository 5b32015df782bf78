"""The ends of batches, in a real browser: a reason, the batches below, which end too, and the way back.

What could go wrong: the reason is parsed as HTML, or makes the page wider than a phone; the batches below end although
nobody asked for it, or stay live although somebody did.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from tests.page.test_page import HOSTILE, PHONE, open_batch, panel

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.nightly]


def ask_to_cancel(page: Page) -> Locator:
    page.get_by_role("button", name="Cancel…").click()
    return page.get_by_role("dialog")


@pytest.mark.parametrize("with_children", [True, False])
def test_a_cancel_takes_a_reason_and_the_batches_below(
    page: Page, api: httpx.Client, service_url: str, with_children: bool
) -> None:
    """Only if that is chosen; of a batch without children, it can't be. The head shows the reason, and that of a batch
    below also links to the one that ended it."""
    batch = open_batch(api, items=2)
    child = open_batch(api, items=1, parent=f"{batch}:0:0")
    page.goto(f"{service_url}/#/batches/{child}")
    expect(page.get_by_role("heading", name=f"Batch {child}")).to_be_visible()
    expect(ask_to_cancel(page).get_by_role("checkbox")).to_have_count(0)
    page.keyboard.press("Escape")
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(panel(page, "children")).to_contain_text(f"Batch {child}")
    dialog = ask_to_cancel(page)
    dialog.get_by_label("Reason").fill(HOSTILE)
    dialog.get_by_label("Also cancel the live batches below it").set_checked(with_children)
    dialog.get_by_label("Type").fill(str(batch))
    dialog.get_by_role("button", name="Cancel the batch").click()
    expect(page.locator(".title .state")).to_have_text("cancelled")
    expect(page.locator(".about + .quoted")).to_have_text(HOSTILE)
    expect(panel(page, "events").locator(".details")).to_contain_text(HOSTILE)
    assert api.get(f"/v1/batches/{child}").json()["state"] == ("cancelled" if with_children else "open")
    if with_children:
        page.goto(f"{service_url}/#/batches/{child}")
        expect(page.locator(".about")).to_contain_text("because of")
        page.get_by_role("link", name=f"batch {batch}", exact=True).click()
        expect(page.get_by_role("heading", name=f"Batch {batch}")).to_be_visible()


@pytest.mark.parametrize("is_overdue", [True, False])
def test_a_batch_is_reopened(page: Page, api: httpx.Client, service_url: str, is_overdue: bool) -> None:
    """One whose deadline has passed has none then, unless another one is given."""
    deadline = (datetime.now(UTC) + timedelta(seconds=2 if is_overdue else 3600)).isoformat()
    batch = open_batch(api, items=2, sealed=True, deadline=deadline)
    if is_overdue:
        assert api.get(f"/v1/batches/{batch}?wait=20").json()["state"] == "expired"
    else:
        api.post(f"/v1/batches/{batch}/cancel")
    page.goto(f"{service_url}/#/batches/{batch}")
    button = page.get_by_role("button", name="Reopen…")
    button.click()
    dialog = page.get_by_role("dialog", name=f"Reopen Batch {batch}?")
    expect(dialog).to_contain_text("2 of its items are pending")
    dialog.get_by_label("Reason").fill(HOSTILE)
    dialog.get_by_role("button", name="Reopen the batch").click()
    expect(page.locator(".title .state")).to_have_text("sealed")
    expect(button).to_be_hidden()
    expect(page.get_by_role("button", name="Cancel…")).to_be_visible()
    expect(panel(page, "events").locator("[data-type='batch.reopened']")).to_contain_text(HOSTILE)
    assert (api.get(f"/v1/batches/{batch}").json()["deadline"] is None) is is_overdue


@pytest.mark.parametrize(
    "settings",
    [{"bypass_csp": True}, {"bypass_csp": True, "color_scheme": "dark", **PHONE}],
    ids=["light", "dark-phone"],
)
def test_axe_finds_nothing_in_a_batch_that_was_ended(page: Page, api: httpx.Client, service_url: str) -> None:
    """Nor in the dialog; on a phone nothing is wider than the screen."""
    batch = open_batch(api, items=2)
    child = open_batch(api, items=1, parent=f"{batch}:0:0")
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(panel(page, "children")).to_contain_text(f"Batch {child}")
    ask_to_cancel(page)
    check(page, "dialog")
    page.keyboard.press("Escape")
    api.post(f"/v1/batches/{batch}/cancel", json={"reason": HOSTILE * 20 + "x" * 900, "children": True})
    page.goto(f"{service_url}/#/batches/{child}")
    expect(page.locator(".about")).to_contain_text("because of")
    check(page, "batch")
    page.get_by_role("button", name="Reopen…").click()
    check(page, "reopen")


def check(page: Page, view: str) -> None:
    result = Axe().run(page)
    assert result.violations_count == 0, f"{view}: {result.generate_report()}"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
