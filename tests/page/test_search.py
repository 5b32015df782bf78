"""Finding batches, in a real browser: search as you type, times, outcomes, and the counts of the tabs.

What could go wrong: the answer to an earlier search replaces that to a later one; each letter becomes an entry of the
history; a reload or a shared address shows other batches; a count is of another filter, or old.
"""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.page.test_page import ack, fail, open_batch, row

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.nightly]


def tab(page: Page, state: str) -> Locator:
    return page.locator(f".states [data-value='{state}']")


def test_the_list_follows_what_is_typed(page: Page, api: httpx.Client, service_url: str) -> None:
    """By the beginning of the key. The address has the filter, and the history has no entry for a letter."""
    word = uuid.uuid4().hex[:8]
    shops = [open_batch(api, key=f"{word}-shop-{number}", items=1) for number in range(3)]
    other = open_batch(api, key=f"{word}-other", sealed=True)
    page.goto(f"{service_url}/#/feed")
    page.goto(f"{service_url}/#/?outcome=exceeded")
    page.get_by_label("Outcome").select_option("any")
    page.get_by_label("Key").press_sequentially(word)
    expect(page.locator(".batch")).to_have_count(4)
    expect(tab(page, "")).to_have_text("all 4")
    expect(tab(page, "open")).to_have_text("open 3")
    expect(tab(page, "complete")).to_have_text("complete 1")
    page.get_by_label("Key").press_sequentially("-shop")
    expect(page.locator(".batch")).to_have_count(3)
    expect(row(page, other)).to_have_count(0)
    expect(page).to_have_url(re.compile(rf"#/\?key_prefix={word}-shop$"))
    tab(page, "open").click()
    expect(page).to_have_url(re.compile(rf"state=open&key_prefix={word}-shop$"))
    page.reload()
    expect(page.get_by_label("Key")).to_have_value(f"{word}-shop")
    expect(page.locator(".batch")).to_have_count(3)
    ack(api, f"{shops[0]}:0:0")
    api.post(f"/v1/batches/{shops[0]}/seal").raise_for_status()
    expect(page.locator(".batch")).to_have_count(2)
    expect(tab(page, "open")).to_have_text("open 2")
    expect(tab(page, "complete")).to_have_text("complete 1")
    page.go_back()
    expect(page).to_have_url(re.compile(rf"#/\?key_prefix={word}-shop$"))
    page.go_back()
    expect(page.get_by_role("heading", name="Feed")).to_be_visible()


def test_a_late_answer_is_dropped(page: Page, api: httpx.Client, service_url: str) -> None:
    """The service answers a search only after the next one was answered."""
    word = uuid.uuid4().hex[:8]
    slow, quick = open_batch(api, key=f"{word}-slow"), open_batch(api, key=f"{word}-quick")
    held: list[Route] = []
    page.route(re.compile(rf"/v1/batches.*key_prefix={word}-slow"), lambda route: held.append(route))
    page.goto(f"{service_url}/#/?key_prefix={word}")
    expect(page.locator(".batch")).to_have_count(2)
    with page.expect_request(re.compile(rf"/v1/batches\?.*{word}-slow")), page.expect_request(re.compile("counts")):
        page.get_by_label("Key").fill(f"{word}-slow")
    page.get_by_label("Key").fill(f"{word}-quick")
    expect(page.locator(".batch")).to_have_count(1)
    expect(row(page, quick)).to_be_visible()
    expect(tab(page, "")).to_have_text("all 1")
    assert len(held) >= 2
    for route in held:
        route.fulfill(json={"batches": [api.get(f"/v1/batches/{slow}").json()], "next": None})
    api.post(f"/v1/batches/{quick}/seal").raise_for_status()
    expect(row(page, quick).locator(".state")).to_have_text("succeeded")
    expect(row(page, slow)).to_have_count(0)


def test_batches_are_found_by_time_and_outcome(page: Page, api: httpx.Client, service_url: str) -> None:
    """Times are typed in the browser's zone and stand in the address in UTC. A tab that contradicts the outcome drops
    it, and an outcome drops a tab."""
    word = uuid.uuid4().hex[:8]
    failed = open_batch(api, key=f"{word}-failed", items=1, sealed=True)
    fail(api, "why", f"{failed}:0:0")
    succeeded = open_batch(api, key=f"{word}-succeeded", sealed=True)
    open_id = open_batch(api, key=f"{word}-open")
    page.goto(f"{service_url}/#/?state=open&key_prefix={word}")
    expect(row(page, open_id)).to_be_visible()
    page.get_by_label("Outcome").select_option("failed")
    expect(row(page, failed)).to_be_visible()
    expect(page.locator(".batch")).to_have_count(1)
    expect(page).to_have_url(re.compile(rf"#/\?outcome=failed&key_prefix={word}$"))
    tab(page, "open").click()
    expect(row(page, open_id)).to_be_visible()
    expect(page.get_by_label("Outcome")).to_have_value("")
    tab(page, "").click()
    expect(page.locator(".batch")).to_have_count(3)
    local = page.evaluate(
        "moment => new Date(moment - new Date().getTimezoneOffset() * 60000).toISOString().slice(0, 16)",
        (datetime.now(UTC) + timedelta(hours=1)).timestamp() * 1000,
    )
    page.get_by_label("Opened from").fill(local)
    expect(page.get_by_role("heading", name="No batch matches")).to_be_visible()
    expect(page).to_have_url(re.compile(r"opened_after=\d{4}-\d\d-\d\dT\d\d%3A\d\d%3A00Z"))
    page.get_by_label("Opened from").fill("")
    page.get_by_label("to", exact=True).fill(local)
    expect(page.locator(".batch")).to_have_count(3)
    expect(row(page, succeeded)).to_be_visible()
    page.reload()
    expect(page.get_by_label("to", exact=True)).to_have_value(local)
    expect(tab(page, "")).to_have_text("all 3")
