"""Updates of a batch, as the page shows them."""

from __future__ import annotations

import httpx
from playwright.sync_api import Page, expect

HOSTILE = "<img src=x onerror=alert(1)>"


def test_an_update_is_shown_at_once(page: Page, api: httpx.Client, service_url: str) -> None:
    """In the batch's facts and its history, with what it changed, and in an open list."""
    batch = api.post("/v1/batches", json={"key": "updated-batch", "items": 3, "tolerated_failures": 2}).json()["id"]
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(page.get_by_text("tolerates")).to_be_visible()
    api.patch(f"/v1/batches/{batch}", json={"labels": {"run": HOSTILE, "old": None}, "tolerated_failures": None})
    expect(page.get_by_role("link", name=f"run: {HOSTILE}")).to_be_visible()
    expect(page.get_by_text("tolerates")).to_have_count(0)
    event = page.locator("[data-type='batch.updated']")
    expect(event).to_contain_text(f"labels: run: {HOSTILE}, old: removed")
    expect(event).to_contain_text("tolerated failures: removed")
    page.goto(f"{service_url}/#/?key_prefix=updated-batch")
    expect(page.get_by_role("link", name=f"run: {HOSTILE}")).to_be_visible()
    api.patch(f"/v1/batches/{batch}", json={"labels": {"run": "second"}}).raise_for_status()
    expect(page.get_by_role("link", name="run: second")).to_be_visible()
    expect(page.get_by_role("link", name=f"run: {HOSTILE}")).to_have_count(0)
