"""The list of batches, in a real browser: what fits on a screen, its orders, what is shown before the first answer, and
the sections beside it.

What could go wrong: rows of one page look like the first rows of all; a list that is still being read looks empty; a
section is hidden although there is something in it.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import sqlalchemy as sa
from playwright.sync_api import Page, Route, expect

from core.storage import schema
from core.storage.database import Database
from core.storage.numbering import Numbering
from tests.page.test_operations import group, tally
from tests.page.test_page import ack, fail, open_batch, process, row
from tests.support.servers import running_service, sqlite_file

pytestmark = pytest.mark.xdist_group("page")

IN_VIEW = """
  [...document.querySelectorAll(".batch")].filter((row) => row.getBoundingClientRect().bottom <= innerHeight).length
"""


@pytest.mark.parametrize("settings", [{"viewport": {"width": 1440, "height": 900}}], ids=["laptop"])
def test_a_laptop_shows_twenty_batches(page: Page, api: httpx.Client, service_url: str) -> None:
    key = uuid.uuid4().hex
    for number in range(25):
        open_batch(api, key=key, items=10**9, labels={"team": "search", "run": str(number), "language": "Portuguese"})
    page.goto(f"{service_url}/#/?key_prefix={key}")
    expect(page.locator(".batch")).to_have_count(25)
    assert page.evaluate(IN_VIEW) >= 20


def test_the_last_change_of_a_batch_may_be_after_its_end(page: Page, api: httpx.Client, service_url: str) -> None:
    """Of one whose failed item was sent again and is acked."""
    batch = open_batch(api, items=1, sealed=True)
    fail(api, "why", f"{batch}:0:0")
    ended_at = api.get(f"/v1/batches/{batch}").json()["ended_at"]
    ack(api, f"{batch}:0:0")
    updated_at = api.get(f"/v1/batches/{batch}").json()["updated_at"]
    page.goto(f"{service_url}/#/")
    expect(row(page, batch).locator(".changed time")).to_have_attribute("datetime", updated_at)
    assert updated_at > ended_at


def test_a_column_sorts_the_list_and_says_if_older_batches_are_missing(
    page: Page, api: httpx.Client, service_url: str
) -> None:
    """A second click turns the order round. The order is part of the address."""
    key = uuid.uuid4().hex[:8]
    ids = [open_batch(api, key=f"{key}-{number}", items=20 - number, sealed=True) for number in range(4)]
    fail(api, "why", f"{ids[2]}:0:0", f"{ids[2]}:0:1")
    fail(api, "why", f"{ids[0]}:0:0")
    names, partly = page.locator(".batch .name"), page.locator(".partly")

    def expect_order(*numbers: int) -> None:
        expect(names).to_have_text([f"{key}-{number}" for number in numbers])

    def head(word: str) -> None:
        page.get_by_role("columnheader", name=word).get_by_role("link").click()

    page.goto(f"{service_url}/#/?key_prefix={key}")
    expect_order(3, 2, 1, 0)
    head("Failed")
    expect_order(2, 0, 3, 1)
    expect(page.get_by_role("columnheader", name="Failed")).to_have_attribute("aria-sort", "descending")
    head("Items")
    expect_order(0, 1, 2, 3)
    head("Items")
    expect_order(3, 2, 1, 0)
    page.get_by_role("group", name="State").get_by_role("link", name="sealed").click()
    page.reload()
    expect(page.get_by_role("columnheader", name="Items")).to_have_attribute("aria-sort", "ascending")
    expect_order(3, 2, 1, 0)
    expect(partly).to_be_hidden()
    newest = api.get("/v1/batches", params={"key_prefix": key, "limit": 2}).json()

    def answer(route: Route) -> None:
        route.fulfill(json={**newest, "batches": []} if "cursor" in route.request.url else newest)

    page.route("**/v1/batches?**", answer)
    head("Batch")
    expect_order(2, 3)
    expect(partly).to_have_text("Only the newest 2 batches are in this order; older ones are not loaded.")
    page.unroute_all()


def test_a_list_that_is_being_read_is_not_shown_as_empty(page: Page, api: httpx.Client, service_url: str) -> None:
    """Nor is another view; an error takes the place of its grey lines, too."""
    batch = open_batch(api, key="waited for", items=1)
    held: list[Route] = []
    page.route("**/v1/batches?**", lambda route: held.append(route))
    page.goto(f"{service_url}/#/?key=waited+for")
    waiting = page.get_by_role("status", name="Loading")
    expect(waiting).to_be_visible()
    expect(page.locator(".empty")).to_be_hidden()
    held[0].continue_()
    expect(row(page, batch)).to_be_visible()
    expect(waiting).to_have_count(0)
    page.unroute_all()
    page.goto(f"{service_url}/#/feed")
    expect(page.locator(".log li").first).to_be_visible()
    expect(waiting).to_have_count(0)


def test_a_section_appears_when_there_is_something_in_it(page: Page) -> None:
    """And the number of stuck batches beside its name."""
    with sqlite_file() as url, running_service(url, LASTBIT_JANITOR_EVERY="0") as service:
        links = page.get_by_role("navigation", name="Sections").get_by_role("link")
        page.goto(f"{service.url}/#/tallies")
        expect(links).to_have_text(["Batches", "Stuck", "Failures", "Feed", "Tallies", "Webhooks", "Tokens"])
        page.goto(f"{service.url}/#/")
        expect(links).to_have_text(["Batches", "Stuck", "Failures", "Feed", "Webhooks", "Tokens"])
        with httpx.Client(base_url=service.url) as api:
            assert api.get("/session/sections").json() == {"sections": [], "ids": None}
            tally(api)
            page.goto(f"{service.url}/#/feed")
            expect(links).to_have_text(["Batches", "Stuck", "Failures", "Feed", "Tallies", "Webhooks", "Tokens"])
            name = group(api)
            assert api.get("/session/sections").json()["sections"] == ["consumer-groups", "tallies"]
            api.delete(f"/v1/consumer-groups/{name}/workers/importer").raise_for_status()
            api.delete(f"/v1/consumer-groups/{name}").raise_for_status()
            assert api.get("/session/sections").json()["sections"] == ["tallies"]
            process(api, "shipping")
            sections = ["processes", "commands", "consumer-groups", "tallies"]
            assert api.get("/session/sections").json()["sections"] == sections
            batch = open_batch(api, items=2)
            ack(api, f"{batch}:0:0")
        with sqlite3.connect(str(sa.make_url(url).database)) as database:
            before = f"{datetime.now(UTC) - timedelta(minutes=11):%Y-%m-%d %H:%M:%S.%f}"
            database.execute("UPDATE batches SET updated_at = ?", (before,))
        page.reload()
        expect(links.nth(1)).to_have_text("Stuck 1")
        page.goto("about:blank")


def test_the_head_shows_which_ids_the_batches_have(page: Page, service_url: str) -> None:
    """Of one of several Lastbits side by side, and of no other."""
    page.goto(service_url)
    expect(page.get_by_role("navigation", name="Sections")).to_be_visible()
    head = page.get_by_text("ids 3/16")
    with sqlite_file() as url:
        with Database(url) as database:
            schema.migrate(database, ids=Numbering(3, 16))
        with running_service(url, LASTBIT_JANITOR_EVERY="0") as service:
            page.goto(service.url)
            expect(head).to_be_visible()
            expect(head).to_have_attribute("title", "The ids of its batches leave 3 when they are divided by 16")
            page.goto(service_url)
            expect(page.locator("#ids")).to_be_hidden()
            page.goto("about:blank")


MANY = 100_000
ROWS = """
    WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)
    INSERT INTO batches ({columns}) SELECT {values} FROM numbers JOIN batches ON batches.id = ?
"""
PAINTED = """() => new Promise((painted) => {
  const look = () => {
    if (!document.querySelector(".batch")) return requestAnimationFrame(look);
    // The frame after the one in which the rows are there: they are painted.
    requestAnimationFrame(() => setTimeout(() => {
      const [answer] = performance.getEntriesByType("resource").filter(({ name }) => /[/]v1[/]batches[?]/.test(name));
      painted(performance.now() - answer.responseEnd);
    }));
  };
  look();
})"""


@pytest.fixture
def many_url() -> Iterator[str]:
    """A service with 100,000 batches, copies of one."""
    with sqlite_file() as url, running_service(url, LASTBIT_JANITOR_EVERY="0") as service:
        with httpx.Client(base_url=service.url) as api:
            first = open_batch(api, key="first", items=20_000, labels={"team": "search", "shop": "de"})
        with sqlite3.connect(str(sa.make_url(url).database)) as database:
            columns = [name for _, name, *_ in database.execute("PRAGMA table_info(batches)")]
            changed = {"id": "batches.id + n", "batch_key": "'nightly-' || n"}
            values = [changed.get(name, f"batches.{name}") for name in columns]
            database.execute(ROWS.format(columns=", ".join(columns), values=", ".join(values)), (MANY, first))
        yield service.url


@pytest.mark.nightly
def test_a_hundred_thousand_batches_are_painted_soon_after_the_answer(page: Page, many_url: str) -> None:
    """Within 300 ms."""
    page.goto(f"{many_url}/#/")
    assert page.evaluate(PAINTED) < 300
    expect(page.locator(".batch")).to_have_count(50)
    expect(page.get_by_role("group", name="State")).to_contain_text("all 100,001")
