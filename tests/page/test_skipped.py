"""Skipped items on the page: they are counted apart, are drawn apart, and are no failures.

What could go wrong: they look acked, or failed; a batch that succeeded without an ack claims that all is acked; the
numbers don't add up.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.page.test_page import ack, fail, numbers, open_batch, panel, row

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.nightly]

INK = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(6, 0, 1, 12);
  return [3, 9].map((y) => data[4 * y + 3] > 128);
}"""
"""Whether the upper and the lower half of the first item's cell have a colour."""


def skip(api: httpx.Client, reason: str | None, *items: str) -> None:
    api.post("/v1/skips", json={"items": items, "reason": reason}).raise_for_status()


def counts(page: Page) -> dict[str, str]:
    names = page.locator("[data-number]").evaluate_all("nodes => nodes.map(node => node.dataset.number)")
    return {name: numbers(page, name).inner_text() for name in names}


def test_skipped_items_are_counted_apart(page: Page, api: httpx.Client, service_url: str) -> None:
    """Only if there are any. In the numbers, the bar and the list; they are neither pending nor failed."""
    batch = open_batch(api, items=10, sealed=True, key="skips")
    ack(api, *(f"{batch}:0:{index}" for index in range(4)))
    fail(api, "no picture", f"{batch}:0:4", f"{batch}:0:5")
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(numbers(page, "acked")).to_have_text("4")
    expect(numbers(page, "skipped")).to_have_count(0)
    skip(api, "not in the catalog any more", f"{batch}:0:5", f"{batch}:0:6", f"{batch}:0:7")
    expect(numbers(page, "skipped")).to_have_text("3")
    expect(numbers(page, "pending")).to_have_text("2")
    assert counts(page) == {"items": "10", "acked": "4", "failed": "1", "skipped": "3", "pending": "2"}
    words = "80 % resolved: 4 acked, 1 failed, 3 skipped, 2 pending"
    expect(page.get_by_role("img", name=words).first).to_be_visible()
    expect(panel(page, "failed")).to_contain_text(f"{batch}:0:4")
    expect(panel(page, "failed")).not_to_contain_text(f"{batch}:0:5")
    page.goto(f"{service_url}/#/")
    expect(row(page, batch).get_by_role("img", name=words)).to_be_visible()


def test_a_batch_of_skipped_items_succeeds_and_does_not_claim_acks(
    page: Page, api: httpx.Client, service_url: str
) -> None:
    """Also if an operator skips its last failed item. A late ack takes the skip back."""
    batch = open_batch(api, items=3, sealed=True)
    skip(api, None, f"{batch}:0:0")
    ack(api, f"{batch}:0:1")
    fail(api, "no picture", f"{batch}:0:2")
    page.goto(f"{service_url}/#/batches/{batch}")
    title = page.locator(".title .state")
    share = page.locator(".big")
    expect(share).to_contain_text("everything is resolved, 1 failed")
    skip(api, "given up", f"{batch}:0:2")
    expect(title).to_have_text("complete")
    expect(share).to_contain_text("2 skipped, 0 failed")
    expect(panel(page, "failed")).to_be_hidden()
    ack(api, f"{batch}:0:0", f"{batch}:0:2")
    page.reload()  # it is no event in a batch that has succeeded
    expect(share).to_contain_text("everything is acked")
    expect(numbers(page, "skipped")).to_have_count(0)


def test_a_skipped_item_is_drawn_as_half_a_square(page: Page, api: httpx.Client, service_url: str) -> None:
    """And named by keyboard and screen reader; no colour is needed to tell it from an acked one."""
    batch = open_batch(api, items=10, group_size=64)
    ack(api, f"{batch}:0:0")
    page.goto(f"{service_url}/#/batches/{batch}?group=0&item=0")
    canvas = page.locator(".field canvas")
    item = page.get_by_role("slider", name="Item")
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:0:0, acked")
    assert canvas.evaluate(INK) == [True, True]
    skip(api, None, f"{batch}:0:1", f"{batch}:0:2")
    expect(page.locator(".bits .facts")).to_have_text("10 items: 1 acked, 0 failed, 2 skipped, 7 pending")
    item.focus()
    page.keyboard.press("ArrowRight")
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:0:1, skipped")
    other = open_batch(api, items=10, group_size=64)
    skip(api, None, f"{other}:0:0")
    page.goto(f"{service_url}/#/batches/{other}?group=0&item=9")
    expect(page.locator(".bits .facts")).to_have_text("10 items: 0 acked, 0 failed, 1 skipped, 9 pending")
    assert canvas.evaluate(INK) == [False, True]


def test_axe_finds_nothing_in_a_batch_with_skips(page: Page, api: httpx.Client, service_url: str) -> None:
    batch = open_batch(api, items=10, sealed=True)
    skip(api, "not needed", f"{batch}:0:0")
    page.goto(f"{service_url}/#/batches/{batch}?group=0")
    expect(numbers(page, "skipped")).to_have_text("1")
    result: Any = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
