"""The keyboard alone, in a real browser: single keys, and an operator's walk without a pointer.

What could go wrong: a key acts while a text is typed, or in a dialog; the focus is lost when rows move; a step of the
walk needs a pointer.
"""

from __future__ import annotations

import re
import uuid

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.page.test_page import ack, fail, focused, open_batch, panel, row

pytestmark = pytest.mark.xdist_group("page")


def test_an_operator_sends_failed_items_again_by_keyboard_alone(
    page: Page, api: httpx.Client, service_url: str
) -> None:
    """From any view: search, the row, the reason, the dialog, its confirmation."""
    word = uuid.uuid4().hex[:8]
    open_batch(api, key=f"{word}-de", items=1)
    batch = open_batch(api, key=f"{word}-fr", items=3, sealed=True)
    fail(api, "HTTP 502", f"{batch}:0:0", f"{batch}:0:1")
    fail(api, "no answer", f"{batch}:0:2")
    press, type_in = page.keyboard.press, page.keyboard.type
    page.goto(f"{service_url}/#/stuck")
    expect(page.get_by_role("heading", name="Stuck", exact=True)).to_be_visible()
    press("/")
    expect(page.get_by_label("Key")).to_be_focused()
    type_in(f"{word}-")
    expect(page.locator(".batch")).to_have_count(2)
    press("Escape")
    expect(page.get_by_label("Key")).to_have_value(f"{word}-")
    press("/")
    press("Enter")
    expect(row(page, batch).locator(".name")).to_be_focused()
    press("Enter")
    expect(page.get_by_role("heading", name=f"{word}-fr")).to_be_visible()
    expect(panel(page, "reasons").locator(".reason")).to_have_text(["HTTP 502", "no answer"])
    press("j")
    expect(panel(page, "reasons").get_by_role("button", name="Send again…").first).to_be_focused()
    press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("HTTP 502")
    expect(page.get_by_label("Note")).to_be_focused()
    type_in("just k and j")
    press("Enter")
    expect(panel(page, "events").locator("[data-type='batch.redrive']")).to_contain_text("just k and j")
    expect(page.get_by_role("dialog")).to_have_count(0)
    press("f")
    expect(page.get_by_role("heading", name="Failures")).to_be_visible()
    press("/")
    type_in("http 502")
    press("Enter")
    expect(page.get_by_role("list", name="Why they failed").get_by_role("button").first).to_be_focused()
    press("b")
    expect(page.get_by_role("heading", name="Batches")).to_be_visible()
    press("/")
    type_in(f"{word}-fr")
    press("Enter")
    expect(row(page, batch).locator(".name")).to_be_focused()
    press("a")
    expect(page.get_by_role("dialog", name="Act on all that match")).to_be_visible()


def test_the_keys_go_through_the_rows_are_listed_and_can_be_turned_off(
    page: Page, api: httpx.Client, service_url: str
) -> None:
    """The focus stays on its row when another order moves it."""
    word = uuid.uuid4().hex[:8]
    ids = [open_batch(api, key=f"{word}-{number}", items=4) for number in range(3)]
    names = page.locator(".batch .name")
    page.goto(f"{service_url}/#/?key_prefix={word}&by=done")
    expect(names).to_have_text([f"{word}-{number}" for number in (2, 1, 0)])
    for key, place in (("j", 0), ("k", 0), ("j", 1), ("j", 2), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        expect(names.nth(place)).to_be_focused()
    ack(api, f"{ids[1]}:0:0")
    expect(names).to_have_text([f"{word}-{number}" for number in (1, 2, 0)])
    expect(names.first).to_be_focused()
    page.keyboard.press("Control+k")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog.locator("kbd")).to_have_text(["/", "j", "k", "a", "b", "s", "f", "t", "?", "Enter", "Esc"])
    page.keyboard.press("s")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(names.first).to_be_focused()
    page.keyboard.press("t")
    expect(page.locator(".opened time").first).to_have_text(re.compile(r"^\d{4}-"))
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("radio", name="off").check()
    page.keyboard.press("Escape")
    page.keyboard.press("s")
    page.keyboard.press("?")
    expect(focused(page)).to_have_id("settings")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("heading", name="Batches")).to_be_visible()
