"""How batches got on: the chart of a batch, the sums of its tree, and the batches that are stuck, in a real browser."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import httpx
import pytest
import sqlalchemy as sa
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from core.batches import history
from core.batches.history import Point
from tests.page.test_page import PHONE, ack, fail, open_batch, panel
from tests.support.servers import running_service, sqlite_file

pytestmark = pytest.mark.xdist_group("page")


class OldBatches(NamedTuple):
    """A service with batches of several ages."""

    url: str
    nightly: int
    """Three hours old, and stuck for the last one: 980 of 1,000 items are resolved, six of them failed."""
    crawl: int
    """Two minutes old, and stuck since."""


@pytest.fixture(scope="module")
def service() -> Iterator[OldBatches]:
    with sqlite_file() as url, running_service(url, LASTBIT_JANITOR_EVERY="0") as running:
        with httpx.Client(base_url=running.url) as api:
            nightly = open_batch(api, key="nightly", items=1000, sealed=True)
            child = open_batch(api, key="shop-1", items=50, parent=f"{nightly}:0:999")
            crawl = open_batch(api, key="crawl", items=400)
            open_batch(api, key="fresh", items=1)
            ack(api, *(f"{nightly}:0:{number}" for number in range(974)))
            fail(api, "HTTP 502", *(f"{nightly}:0:{number}" for number in range(974, 980)))
            ack(api, f"{child}:0:0", f"{child}:0:1")
        now = datetime.now(UTC)
        with sqlite3.connect(str(sa.make_url(url).database)) as database:
            for batch, hours, line in ((nightly, 3.0, steady(now)), (crawl, 2 / 60, history.begun())):
                open_time = f"{now - timedelta(hours=hours):%Y-%m-%d %H:%M:%S.%f}"
                change_time = f"{now - timedelta(hours=min(1.0, hours)):%Y-%m-%d %H:%M:%S.%f}"
                database.execute(
                    "UPDATE batches SET created_at = ?, updated_at = ?, history = ? WHERE id = ?",
                    (open_time, change_time, line, batch),
                )
        yield OldBatches(running.url, nightly, crawl)


def steady(now: datetime) -> bytes:
    """The history of a batch that resolved 980 items from the third hour ago to the last one."""
    with pytest.MonkeyPatch.context() as patches:
        moment = now - timedelta(hours=3)
        patches.setattr(history, "clock", lambda: moment.timestamp())
        line = history.begun()
        for step in range(120):
            moment += timedelta(minutes=1)
            line = history.extended(line, Point(moment, 980 * step // 120, step // 20))
    return line


def stuck(page: Page) -> list[str]:
    expect(page.locator("tbody tr").first).to_be_visible()
    return page.locator("tbody tr th").all_inner_texts()


def test_stuck_batches_are_found_with_the_time_of_their_last_change(page: Page, service: OldBatches) -> None:
    """In the order of the address, whose parts are links; each leads to its batch."""
    page.goto(f"{service.url}/#/stuck?for=60")
    assert stuck(page) == ["nightly", "crawl"]
    row = page.locator(f"tr[data-batch='{service.nightly}']")
    expect(row).to_contain_text("98 %")
    expect(row.locator("time")).to_have_text("1 h ago")
    expect(row.get_by_role("img")).to_have_attribute("aria-label", re.compile("98 % resolved after 3 h, .* 1 h before"))
    page.get_by_role("link", name="pending", exact=True).click()
    expect(page.locator("tbody tr th").first).to_have_text("crawl")
    assert "by=pending" in page.url
    page.get_by_role("link", name="10 min").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("link", name="1 d").click()
    expect(page.get_by_role("heading", name="Nothing has been stuck for 1 d")).to_be_visible()
    page.goto(f"{service.url}/#/stuck?for=7&by=nonsense")
    assert stuck(page) == ["nightly"]
    page.get_by_role("link", name="nightly").click()
    expect(page.get_by_role("heading", name="nightly")).to_be_visible()


def test_the_list_shows_the_last_change(page: Page, service: OldBatches) -> None:
    page.goto(f"{service.url}/#/?key=nightly")
    expect(page.locator(f"[data-batch='{service.nightly}'] .when")).to_have_text(["3 h ago", "1 h ago"])


def test_a_batch_has_a_chart_and_the_sums_of_its_tree(page: Page, service: OldBatches) -> None:
    page.goto(f"{service.url}/#/batches/{service.nightly}")
    figure = page.locator("figure.history")
    expect(figure.get_by_role("img")).to_have_attribute("aria-label", re.compile("^98 % resolved after 3 h"))
    expect(figure).to_contain_text("unchanged for 1 h")
    # Half of the height after the first hour, all of it after two.
    path = figure.locator("path.resolved").get_attribute("d") or ""
    heights = {float(x): float(y) for x, y in re.findall(r"([\d.]+),([\d.]+)", path)}
    assert heights[min(heights, key=lambda x: abs(x - 200))] == pytest.approx(51, abs=3)
    assert heights[min(heights, key=lambda x: abs(x - 420))] == pytest.approx(2, abs=1)
    sums = panel(page, "children").locator(".sums")
    expect(sums).to_contain_text("2 batches with this one, 2 of them live: 982 of 1,049 items, 6 failed")
    page.goto(f"{service.url}/#/batches/{service.crawl}")
    expect(page.get_by_role("heading", name="crawl")).to_be_visible()
    expect(figure).to_be_hidden()


@pytest.mark.parametrize(
    "settings",
    [
        {"color_scheme": "light", "bypass_csp": True},
        pytest.param({"color_scheme": "dark", "bypass_csp": True}, marks=pytest.mark.nightly),
        pytest.param({"color_scheme": "light", "bypass_csp": True, **PHONE}, marks=pytest.mark.nightly),
    ],
    ids=["light", "dark", "phone"],
)
def test_axe_finds_nothing_in_what_is_stuck(page: Page, service: OldBatches, settings: dict[str, Any]) -> None:
    """And on a phone nothing is wider than the screen."""
    selectors = {"stuck?for=60": "tbody tr", "stuck?for=86400": ".empty", f"batches/{service.nightly}": ".sums"}
    for path, shows in selectors.items():
        page.goto(f"{service.url}/#/{path}")
        expect(page.locator(shows).first).to_be_visible()
        result = Axe().run(page)
        assert result.violations_count == 0, f"{path}: {result.generate_report()}"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
