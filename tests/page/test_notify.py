"""A notification when a batch ends, in a real browser whose notifications are recorded.

What could go wrong: it asks before it is wanted; a hidden tab hears nothing; an end that comes during a reload is
missed; it comes twice.
"""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.page.test_page import ack, live, open_batch

pytestmark = pytest.mark.xdist_group("page")

RECORDED = """
  window.shown = [];
  window.requested = 0;
  window.Notification = class {
    static permission = "PERMISSION";
    static async requestPermission() { requested += 1; return this.permission; }
    constructor(title, options) {
      shown.push([title, options.body]);
      document.documentElement.dataset.notified = shown.length;
    }
  };
"""
HIDE = """() => {
  Object.defineProperty(document, "hidden", { get: () => true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def shown(page: Page, count: int) -> list[list[str]]:
    expect(page.locator("html")).to_have_attribute("data-notified", str(count))
    found: list[list[str]] = page.evaluate("shown")
    return found


def test_a_hidden_tab_notifies_once_of_each_batch_that_was_asked_for(
    page: Page, api: httpx.Client, service_url: str
) -> None:
    """Also of one that ended while the tab was away."""
    page.add_init_script(RECORDED.replace("PERMISSION", "granted"))
    first, second, other = (open_batch(api, key=key, items=1, sealed=True) for key in ("one", "two", "three"))
    for batch in (first, second):
        page.goto(f"{service_url}/#/batches/{batch}")
        button = page.get_by_role("button", name="Notify me")
        expect(button).to_have_attribute("aria-pressed", "false")
        assert page.evaluate("requested") == int(batch == second)
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
    page.goto("about:blank")
    ack(api, f"{first}:0:0")
    page.goto(f"{service_url}/#/batches/{second}")
    assert shown(page, 1) == [["one: succeeded", "1 item, 0 failed"]]
    expect(live(page)).to_be_visible()
    page.evaluate(HIDE)
    expect(page.locator("#live")).to_have_text("paused")
    ack(api, f"{other}:0:0")
    api.post(f"/v1/batches/{second}/cancel").raise_for_status()
    assert shown(page, 2)[1:] == [["two: cancelled", "1 item, 0 failed"]]
    page.reload()
    expect(live(page)).to_be_visible()
    expect(page.get_by_role("button", name="Notify me")).to_be_hidden()
    assert page.evaluate("shown") == []


def test_a_browser_that_blocks_notifications_says_so(page: Page, api: httpx.Client, service_url: str) -> None:
    page.add_init_script(RECORDED.replace("PERMISSION", "denied"))
    batch = open_batch(api, items=1)
    page.goto(f"{service_url}/#/batches/{batch}")
    page.get_by_role("button", name="Notify me").click()
    expect(page.get_by_role("button", name=re.compile("blocks notifications"))).to_be_disabled()
