"""The page, in a real browser on a real service: it follows changes, and everyone can use it."""

from __future__ import annotations

import base64
import re
import sqlite3
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Error, Locator, Page, expect

from api import page as served
from tests.support.receivers import Receiver, raw, status
from tests.support.servers import ServiceProcess, running_service, sqlite_file

pytestmark = pytest.mark.xdist_group("page")

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>&amp;{{7*7}}"
PHONE = {"viewport": {"width": 360, "height": 760}, "has_touch": True, "is_mobile": True}


def open_batch(api: httpx.Client, **body: Any) -> int:
    answer = api.post("/v1/batches", json=body)
    assert answer.status_code == 201, answer.text
    batch: int = answer.json()["id"]
    return batch


def ack(api: httpx.Client, *items: str) -> None:
    api.post("/v1/acks", json={"items": items}).raise_for_status()


def fail(api: httpx.Client, reason: str | None, *items: str) -> None:
    api.post("/v1/failures", json={"items": items, "reason": reason}).raise_for_status()


def row(page: Page, batch: int) -> Locator:
    return page.locator(f".batch[data-batch='{batch}']")


def numbers(page: Page, name: str) -> Locator:
    return page.locator(f"[data-number='{name}'] dd")


def panel(page: Page, name: str) -> Locator:
    return page.locator(f"[data-panel='{name}']")


def live(page: Page) -> Locator:
    return page.locator("#live[data-state='live']")


# Served files


def test_each_file_has_its_type_and_the_policy(api: httpx.Client) -> None:
    """Only files of the service itself may run."""
    for name, file in served.read_files().items():
        answer = api.get({"index.html": "/", "docs.html": "/docs"}.get(name, f"/page/{name}"))
        assert answer.status_code == 200
        assert answer.headers["content-type"] == file.media_type
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in answer.headers["content-security-policy"]


def test_a_cached_file_is_not_sent_again(api: httpx.Client) -> None:
    """Its ETag is checked each time, so a new release shows at once."""
    answer = api.get("/page/main.js")
    assert answer.headers["cache-control"] == "no-cache"
    second = api.get("/page/main.js", headers={"If-None-Match": f'"other", W/{answer.headers["etag"]}'})
    assert (second.status_code, second.content) == (304, b"")
    assert second.headers["etag"] == answer.headers["etag"]
    assert api.get("/page/main.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/page/other.js", "/page/__init__.py", "/page/index.html", "/page/%2e%2e%2fapp.py"])
def test_no_other_file_of_the_folder_is_served(api: httpx.Client, path: str) -> None:
    """Like any missing path."""
    answer = api.get(path)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


def test_the_page_contains_no_foreign_address() -> None:
    """It works without a connection to any other host. A namespace is not an address."""
    for name, file in served.read_files().items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        result = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)
        assert not result, (name, result)


# The list


def test_a_new_batch_appears_and_its_progress_moves(page: Page, api: httpx.Client, service_url: str) -> None:
    """Without a reload; the bar has a text for its progress."""
    page.goto(service_url)
    expect(live(page)).to_be_visible()
    batch = open_batch(api, key="moves", items=4, labels={"team": "search"})
    batch_row = row(page, batch)
    expect(batch_row).to_contain_text("moves")
    expect(batch_row.locator(".state")).to_have_text("open")
    expect(batch_row.get_by_role("img")).to_have_accessible_name("0 % resolved: 0 acked, 0 failed, 4 pending")
    ack(api, f"{batch}:0:0", f"{batch}:0:2")
    expect(batch_row).to_contain_text("2 of 4")
    expect(batch_row).to_contain_text("50 %")
    fail(api, "why", f"{batch}:0:1")
    expect(batch_row.get_by_role("img")).to_have_accessible_name("75 % resolved: 2 acked, 1 failed, 1 pending")
    expect(batch_row).to_contain_text("1 failed")
    ack(api, f"{batch}:0:3")
    api.post(f"/v1/batches/{batch}/seal").raise_for_status()
    expect(batch_row.locator(".state")).to_have_text("complete")
    expect(batch_row).to_contain_text("4 of 4")
    expect(page.locator("#said")).to_have_text(f"Batch {batch} is complete")


def test_a_list_without_live_batches_is_updated_by_events(page: Page, api: httpx.Client, service_url: str) -> None:
    """Nothing is polled then: the event updates the list."""
    key = uuid.uuid4().hex
    batch = open_batch(api, key=key, items=1, sealed=True)
    page.goto(f"{service_url}/#/?state=complete&key={key}")
    expect(page.get_by_role("heading", name="No batch matches")).to_be_visible()
    expect(live(page)).to_be_visible()
    ack(api, f"{batch}:0:0")
    expect(row(page, batch).locator(".state")).to_have_text("succeeded")


BUSY_SERVICE = """
  window.asked = { "/v1/batches": 0, "/v1/batches/counts": 0 };
  window.EventSource = class {
    constructor() {
      setTimeout(() => this.onopen(), 0);
      setInterval(() => this.onmessage({ data: '{"type": "batch.opened"}' }), 20);
    }
    close() {}
  };
  const really = window.fetch;
  window.fetch = async (address, options) => {
    const path = new URL(address, location).pathname;
    if (!(path in asked)) return really(address, options);
    asked[path] += 1;
    await new Promise((answered) => setTimeout(answered, path === "/v1/batches" ? 20 : 250));
    const states = { open: 0, sealed: 0, complete: 0, expired: 0, cancelled: 0 };
    const body = path === "/v1/batches" ? { batches: [], next: null } : { total: 0, exact: true, states };
    return new Response(JSON.stringify(body), { headers: { "Content-Type": "application/json" } });
  };
"""


def test_many_events_do_not_make_many_requests(page: Page, service_url: str) -> None:
    """However many arrive, the list and the counts take an eighth of the service's time. A user needn't wait for the
    pause."""
    page.clock.install()
    page.add_init_script(BUSY_SERVICE)
    page.goto(service_url)
    expect(live(page)).to_be_visible()
    expect(page.get_by_role("heading", name="No batches yet")).to_be_visible()
    page.clock.pause_at(page.evaluate("Date.now() + 1000"))
    before = page.evaluate("({ ...asked })")
    page.clock.run_for(18_000)
    after = page.evaluate("({ ...asked })")
    # Runs of 20 and 250 ms, and pauses of eight times as long.
    assert 90 <= after["/v1/batches"] - before["/v1/batches"] <= 101
    assert 7 <= after["/v1/batches/counts"] - before["/v1/batches/counts"] <= 9
    page.evaluate("location.hash = '#/?state=open'")
    page.clock.run_for(80)
    assert page.evaluate("asked")["/v1/batches"] > after["/v1/batches"]


def test_a_view_without_a_stream_shows_no_state_of_one(page: Page, service_url: str) -> None:
    page.goto(service_url)
    expect(live(page)).to_be_visible()
    page.evaluate("location.hash = '#/feed'")
    expect(page.get_by_role("heading", name="Feed")).to_be_visible()
    expect(page.locator("#live")).to_be_hidden()
    page.evaluate("location.hash = '#/'")
    expect(live(page)).to_have_text("live")


def test_filters_narrow_the_list_and_are_part_of_the_address(page: Page, api: httpx.Client, service_url: str) -> None:
    """By state, key and labels; a batch's label links to batches with that label; the back button works."""
    team = uuid.uuid4().hex
    first = open_batch(api, key="filtered", labels={"team": team, "shop": "de", "lastbit.on_complete": "a task"})
    second = open_batch(api, key="filtered too", labels={"team": team, "shop": "fr"}, items=1, sealed=True)
    page.goto(service_url)
    expect(row(page, first)).to_be_visible()
    page.get_by_label("Label", exact=True).fill(f"team:{team}")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator(".batch")).to_have_count(2)
    expect(page).to_have_url(re.compile(rf"label=team%3A{team}"))
    page.get_by_role("link", name="sealed").click()
    expect(page.locator(".batch")).to_have_count(1)
    expect(row(page, second)).to_be_visible()
    expect(page.get_by_role("link", name="sealed")).to_have_attribute("aria-current", "true")
    page.go_back()
    expect(page.locator(".batch")).to_have_count(2)
    expect(row(page, first).locator(".labels li")).to_have_count(2)  # not that of an adapter
    row(page, first).get_by_role("link", name=re.compile("^shop: ?de$")).click()
    expect(page).to_have_url(re.compile("label=shop%3Ade"))
    page.goto(f"{service_url}/#/?label=team:{team}")
    expect(page.locator(".batch")).to_have_count(2)
    page.get_by_label("Key").fill("filtered too")
    page.get_by_label("Key").press("Enter")
    expect(page.locator(".batch")).to_have_count(1)
    page.reload()
    expect(page.get_by_label("Key")).to_have_value("filtered too")
    expect(row(page, second)).to_be_visible()
    page.get_by_role("link", name=f"Without the label team:{team}").click()
    expect(page.locator(".chips a")).to_have_count(0)
    expect(page).to_have_url(re.compile(r"#/\?key_prefix=filtered\+too$"))


def test_a_filter_that_the_service_refuses_is_explained(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str]
) -> None:
    """With the service's message, and the page continues to work."""
    page.goto(f"{service_url}/#/?label=nonsense")
    expect(page.get_by_role("alert")).to_contain_text("expected name:value, got 'nonsense'")
    page.get_by_role("link", name="Without the label nonsense").click()
    expect(page.get_by_role("alert")).to_be_hidden()
    assert all("422" in complaint for complaint in complaints)
    complaints.clear()


def test_many_batches_are_loaded_in_steps(page: Page, api: httpx.Client, service_url: str) -> None:
    """Fifty, then more on request."""
    key = uuid.uuid4().hex
    ids = [open_batch(api, key=key, sealed=True) for _ in range(60)]
    page.goto(f"{service_url}/#/?key={key}")
    expect(page.locator(".batch")).to_have_count(50)
    assert page.locator(".batch").first.get_attribute("data-batch") == str(ids[-1])
    page.get_by_role("button", name="Show more").click()
    expect(page.locator(".batch")).to_have_count(60)
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()


@pytest.fixture
def fresh_url() -> Iterator[str]:
    """The URL of a service without batches."""
    with sqlite_file() as database, running_service(database) as service:
        yield service.url


def test_an_empty_service_shows_the_first_commands(page: Page, fresh_url: str) -> None:
    """With its own address; a batch opened with these commands appears."""
    page.goto(fresh_url)
    expect(page.get_by_role("heading", name="No batches yet")).to_be_visible()
    command = page.get_by_role("region", name="With curl").inner_text()
    assert command.startswith(f"curl {fresh_url}/v1/batches ")
    with_lastbit = page.get_by_role("region", name="With lastbit").inner_text()
    assert with_lastbit.startswith(f"lastbit --url {fresh_url} open ")
    body = re.search(r"-d '(.*)'", command)
    assert body is not None
    expect(live(page)).to_be_visible()
    answer = httpx.post(f"{fresh_url}/v1/batches", content=body[1], headers={"Content-Type": "application/json"})
    assert answer.status_code == 201
    expect(page.locator(".batch")).to_contain_text("catalog-42")
    expect(page.get_by_role("heading", name="No batches yet")).to_be_hidden()


# One batch


def test_a_batchs_numbers_follow_its_progress(page: Page, api: httpx.Client, service_url: str) -> None:
    """Numbers, rate, pending ranges, events; the end is announced and shown."""
    batch = open_batch(api, key="looked at", items=6, group_size=64, labels={"team": "search"})
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(page.get_by_role("heading", level=1)).to_have_text("looked at")
    expect(page).to_have_title("0 % · looked at · Lastbit")
    expect(numbers(page, "pending")).to_have_text("6")
    expect(panel(page, "pending").locator(".range")).to_have_text([f"{batch}:0:0 – {batch}:0:5"])
    expect(panel(page, "events").locator(".event")).to_have_text(["opened"])
    expect(panel(page, "failed")).to_be_hidden()
    expect(page.locator(".big .words")).to_contain_text("not sealed yet")
    ack(api, f"{batch}:0:1", f"{batch}:0:2")
    expect(numbers(page, "acked")).to_have_text("2")
    expect(page).to_have_title("33 % · looked at · Lastbit")
    expect(panel(page, "pending").locator(".range")).to_have_text([f"{batch}:0:0", f"{batch}:0:3 – {batch}:0:5"])
    api.post(f"/v1/batches/{batch}/seal").raise_for_status()
    expect(page.locator(".title .state")).to_have_text("sealed")
    expect(panel(page, "events").locator(".event")).to_have_text(["opened", "sealed"])
    ack(api, f"{batch}:0:0")
    expect(page.locator(".big .words")).to_have_text(re.compile(r"^[\d,.]+/s, about .+ left$"))
    ack(api, *(f"{batch}:0:{index}" for index in (3, 4, 5)))
    expect(page.locator(".title .state")).to_have_text("succeeded")
    expect(page.locator(".big")).to_contain_text("100")
    expect(page.locator(".big .words")).to_have_text("everything is acked")
    expect(page).to_have_title("succeeded · looked at · Lastbit")
    expect(panel(page, "pending")).to_be_hidden()
    expect(panel(page, "events").locator(".event")).to_have_text(["opened", "sealed", "completed", "succeeded"])
    expect(page.get_by_role("button", name="Cancel…")).to_be_hidden()


def test_an_open_batch_shows_when_it_seals_itself(page: Page, api: httpx.Client, service_url: str) -> None:
    batch = open_batch(api, items=4, seal_at=1000)
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(page.locator(".about")).to_contain_text("seals itself at 1,000 items")
    api.post(f"/v1/batches/{batch}/items", json={"count": 996})
    expect(page.locator(".title .state")).to_have_text("sealed")
    expect(page.locator(".about")).not_to_contain_text("itself")


def test_a_tolerance_is_shown_and_whether_it_was_exceeded(page: Page, api: httpx.Client, service_url: str) -> None:
    batch = open_batch(api, items=4, sealed=True, tolerated_failures=1, tolerated_failure_percentage=50)
    fail(api, "no picture", f"{batch}:0:0")
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(page.locator(".about")).to_contain_text("tolerates 1 item and 50% failed")
    fail(api, "no picture", f"{batch}:0:1")
    expect(page.locator(".about")).to_contain_text("failed, which was exceeded")
    expect(panel(page, "events").locator(".event")).to_contain_text(
        ["opened", "sealed", "failures exceeded the tolerance"]
    )
    ack(api, *(f"{batch}:0:{index}" for index in (1, 2, 3)))
    expect(page.locator(".title .state")).to_have_text("succeeded")
    expect(page.locator(".big .words")).to_have_text("1 failed, within the tolerance")


def test_failed_items_are_shown_with_their_reasons(page: Page, api: httpx.Client, service_url: str) -> None:
    """Neighbours that failed for the same reason share a line; a missing reason is shown as such."""
    batch = open_batch(api, items=70, group_size=64)
    fail(api, "timed out", *(f"{batch}:0:{index}" for index in (3, 4, 5)))
    fail(api, "no such file", f"{batch}:0:6")
    fail(api, None, f"{batch}:1:0")
    page.goto(f"{service_url}/#/batches/{batch}")
    lines = panel(page, "failed").locator(".ranges li")
    expect(lines).to_have_count(3)
    expect(lines.nth(0)).to_contain_text(f"{batch}:0:3 – {batch}:0:5")
    expect(lines.nth(0)).to_contain_text("timed out")
    expect(lines.nth(1)).to_contain_text("no such file")
    expect(lines.nth(2)).to_contain_text("no reason given")
    lines.nth(1).get_by_role("link").click()
    item = page.get_by_role("slider", name="Item")
    expect(item).to_be_focused()
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:0:6, failed: no such file")
    expect(page.locator(".tile").nth(0)).to_have_attribute("aria-pressed", "true")
    lines.nth(0).get_by_role("link").click()
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:0:3, failed: timed out")
    lines.nth(2).get_by_role("link").click()
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:1:0, failed")
    lines.nth(1).get_by_role("link").click()
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:0:6, failed: no such file")
    page.get_by_role("button", name="Next failed").click()
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:0:3, failed: timed out")
    ack(api, f"{batch}:0:3", f"{batch}:0:4", f"{batch}:0:5")
    expect(lines).to_have_count(2)
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:0:3, acked")


def test_an_empty_reason_is_shown_as_such(page: Page, api: httpx.Client, service_url: str) -> None:
    """It is not the same as none: it can be redriven."""
    batch = open_batch(api, items=3, group_size=64)
    fail(api, "", f"{batch}:0:1")
    page.goto(f"{service_url}/#/batches/{batch}")
    line = panel(page, "failed").locator(".ranges li")
    expect(line).to_contain_text("an empty reason")
    expect(panel(page, "reasons").locator(".by-reason > li .reason")).to_have_text("an empty reason")
    line.get_by_role("link").click()
    expect(page.get_by_role("slider", name="Item")).to_have_attribute(
        "aria-valuetext", f"{batch}:0:1, failed: an empty reason"
    )
    panel(page, "reasons").get_by_role("button", name="Send again…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".quoted")).to_have_text("an empty reason")
    dialog.get_by_role("button", name="Send 1 item again").click()
    expect(panel(page, "events").locator("[data-type='batch.redrive'] .reason")).to_have_text("an empty reason")


def test_a_batch_that_ended_without_items_waits_for_none(page: Page, api: httpx.Client, service_url: str) -> None:
    batch = open_batch(api, key="nothing to do")
    page.goto(f"{service_url}/#/batches/{batch}")
    picture_note = page.locator("section[aria-labelledby='picture-heading'] .facts").first
    expect(picture_note).to_have_text("It shows here once items are issued.")
    api.post(f"/v1/batches/{batch}/seal").raise_for_status()
    expect(picture_note).to_have_text("The batch has no items.")
    expect(page.locator(".bar[role='img']").first).to_have_attribute("aria-label", re.compile("^no items:"))
    page.goto(f"{service_url}/#/?key=nothing+to+do")
    expect(row(page, batch)).to_contain_text("no items")
    expect(row(page, batch)).not_to_contain_text("no items yet")


def test_a_tile_is_a_group_and_a_click_shows_its_bits(page: Page, api: httpx.Client, service_url: str) -> None:
    """The tiles show the resolved share; the bits are drawn, and a tooltip names the item under the pointer."""
    batch = open_batch(api, items=64 * 3 + 10, group_size=64)
    full_mask = base64.b64encode(b"\xff" * 8).decode()
    api.post("/v1/acks", json={"groups": [{"batch": batch, "group": 1, "bits": full_mask}]}).raise_for_status()
    ack(api, f"{batch}:0:0", f"{batch}:0:9")
    fail(api, "broken", f"{batch}:3:1")
    page.goto(f"{service_url}/#/batches/{batch}")
    tiles = page.locator(".tile")
    expect(tiles).to_have_count(4)
    expect(tiles.nth(0)).to_have_accessible_name("Group 0: 3.1 % of 64 items resolved")
    expect(tiles.nth(1)).to_have_accessible_name("Group 1: 100 % of 64 items resolved")
    expect(tiles.nth(2)).to_have_accessible_name("Group 2: 0 % of 64 items resolved")
    expect(tiles.nth(3)).to_have_accessible_name("Group 3: 10 % of 10 items resolved, 1 failed")
    tiles.nth(0).click()
    expect(page).to_have_url(re.compile(r"\?group=0$"))
    expect(page.get_by_role("heading", name="Group 0")).to_be_visible()
    item = page.get_by_role("slider", name="Item")
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:0:1, pending")
    canvas = page.locator(".field canvas")
    canvas.hover(position={"x": 3, "y": 3})
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:0:0, acked")
    read_pixel = "canvas => Array.from(canvas.getContext('2d').getImageData(6, 6, 1, 1).data)"
    read_acked_colour = "node => getComputedStyle(node).getPropertyValue('--acked').trim()"
    acked_colour = page.locator(".bits").evaluate(read_acked_colour)
    ack(api, f"{batch}:0:1")
    expect(item).to_have_attribute("aria-valuenow", "0")
    expect(page.locator(".bits .facts")).to_have_text("64 items: 3 acked, 0 failed, 61 pending")
    red, green, blue, _ = canvas.evaluate(read_pixel)
    assert (red, green, blue) == tuple(bytes.fromhex(acked_colour.removeprefix("#")))
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".bits")).to_have_count(0)
    expect(tiles.nth(0)).to_be_focused()


def test_a_billion_items_are_a_picture_that_can_be_zoomed(page: Page, api: httpx.Client, service_url: str) -> None:
    """Some thousand tiles of several groups each; a click shows the groups of one tile, another click the bits."""
    batch = open_batch(api, items=10**9)
    ack(api, f"{batch}:100000:17")
    page.goto(f"{service_url}/#/batches/{batch}")
    tiles = page.locator(".tile")
    expect(tiles.first).to_have_accessible_name(re.compile("^Groups 0 to [0-9]+: 0 % of [0-9,]+ items resolved$"))
    assert tiles.count() <= 1500
    touched = page.locator(".tile[data-state='some']")
    expect(touched).to_have_count(1)
    touched.click()
    expect(page).to_have_url(re.compile(r"groups=\d+-\d+$"))
    expect(page.locator(".nearer")).to_contain_text("of 122,071")
    expect(tiles.first).to_be_focused()
    group = page.get_by_role("button", name="Group 100000:")
    expect(group).to_have_accessible_name("Group 100000: 0.01 % of 8,192 items resolved")
    group.click()
    expect(page.locator(".bits .facts")).to_have_text("8,192 items: 1 acked, 0 failed, 8,191 pending")
    page.get_by_role("link", name="later").click()
    expect(tiles.first).to_have_accessible_name(re.compile("^Group 100[0-9]{3}: 0 %"))
    page.get_by_role("link", name="all groups").click()
    expect(touched).to_have_count(1)


def test_the_largest_batch_is_shown_in_parts(page: Page, api: httpx.Client, service_url: str) -> None:
    """One answer of the picture is bounded; the page names the groups it shows, and has a button for the next ones."""
    batch = open_batch(api, items=10**12)
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(page.locator(".nearer")).to_have_text(re.compile(r"^groups 0 to 1[23]\d,\d{3} of 122,070,313later$"))
    page.get_by_role("link", name="later").click()
    expect(page.locator(".nearer")).to_have_text(re.compile(r"groups 1[23]\d,\d{3} to 2[56]\d,\d{3} of"))


def test_cancelling_needs_a_confirmation(page: Page, api: httpx.Client, service_url: str) -> None:
    """The batch's number must be typed; keeping the batch changes nothing, and the focus returns to the button."""
    batch = open_batch(api, key="unwanted", items=3)
    page.goto(f"{service_url}/#/batches/{batch}")
    button = page.get_by_role("button", name="Cancel…")
    button.click()
    dialog = page.get_by_role("dialog", name="Cancel unwanted?")
    expect(dialog).to_contain_text("3 of its items are pending")
    confirm = dialog.get_by_role("button", name="Cancel the batch")
    expect(confirm).to_be_disabled()
    dialog.get_by_label("Type").fill(f"{batch}0")
    expect(confirm).to_be_disabled()
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="Keep it").click()
    expect(dialog).to_have_count(0)
    expect(button).to_be_focused()
    assert api.get(f"/v1/batches/{batch}").json()["state"] == "open"
    button.press("Enter")
    dialog.get_by_label("Type").fill(str(batch))
    page.keyboard.press("Enter")
    expect(page.locator(".title .state")).to_have_text("cancelled")
    expect(page.locator(".big .words")).to_have_text("it was cancelled")
    expect(dialog).to_have_count(0)
    expect(button).to_be_hidden()
    expect(panel(page, "events").locator(".event")).to_have_text(["opened", "cancelled"])
    assert api.get(f"/v1/batches/{batch}").json()["state"] == "cancelled"


def test_a_cancel_that_comes_too_late_is_reported(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str]
) -> None:
    """In the dialog, which stays open."""
    batch = open_batch(api, key="too late", items=1, sealed=True)
    page.goto(f"{service_url}/#/batches/{batch}")
    page.get_by_role("button", name="Cancel…").click()
    ack(api, f"{batch}:0:0")
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Type").fill(str(batch))
    dialog.get_by_role("button", name="Cancel the batch").click()
    expect(dialog.get_by_role("alert")).to_contain_text(f"batch {batch} is complete: cancel is no longer possible")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert all("409" in complaint for complaint in complaints)
    complaints.clear()


def test_a_child_batch_links_to_its_parent(page: Page, api: httpx.Client, service_url: str) -> None:
    """And back through the list."""
    parent = open_batch(api, key="above", items=2)
    child = open_batch(api, key="below", parent=f"{parent}:0:1")
    page.goto(f"{service_url}/#/batches/{child}")
    page.get_by_role("link", name=f"{parent}:0:1").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("above")
    page.get_by_role("link", name="All batches", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Batches")


def test_a_missing_batch_is_reported(page: Page, api: httpx.Client, service_url: str, complaints: list[str]) -> None:
    """When it is opened, and when it disappears while it is shown."""
    page.goto(f"{service_url}/#/batches/999999")
    expect(page.get_by_role("heading", level=1)).to_have_text("There is no batch 999999")
    batch = open_batch(api, key="goes away", items=1)
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(numbers(page, "items")).to_have_text("1")
    api.delete(f"/v1/batches/{batch}").raise_for_status()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"There is no batch {batch}")
    assert all("404" in complaint for complaint in complaints)
    complaints.clear()


@pytest.mark.parametrize(
    "address",
    [
        *("#/nowhere", "#nowhere", "#/%", "#/batches/%", "#/batches/07", "#/batches/7/8", "#/processes/a/b/c"),
        *("#/processes/%", "#/processes/a%", "#/processes/%ff", "#/processes/p/%E0%A4%A", "#/processes/%/i"),
        *("#/processes/..", "#/processes/p/.", "#/processes/p/%2E%2E"),
    ],
)
def test_an_unknown_address_is_reported(page: Page, service_url: str, address: str) -> None:
    """When the page is opened there, and when it goes there; going back works."""
    heading = page.get_by_role("heading", level=1)
    page.goto(f"{service_url}/{address}")
    expect(heading).to_have_text("There is no such page")
    page.get_by_role("link", name="All batches", exact=True).click()
    expect(heading).to_have_text("Batches")
    if address.startswith("#/"):
        page.evaluate("address => { location.hash = address }", address)
        expect(heading).to_have_text("There is no such page")


def test_trimmed_events_are_reported(page: Page, complaints: list[str]) -> None:
    """The events that the feed still has are shown."""
    with sqlite_file() as database, running_service(database) as service, httpx.Client(base_url=service.url) as api:
        batch = open_batch(api, items=1)
        with sqlite3.connect(database.removeprefix("sqlite:///")) as file:
            file.execute("UPDATE feed_head SET trimmed = position")
            file.execute("DELETE FROM feed")
        api.post(f"/v1/batches/{batch}/seal").raise_for_status()
        page.goto(f"{service.url}/#/batches/{batch}")
        expect(panel(page, "events")).to_contain_text("Older events may have left the feed.")
        expect(panel(page, "events").locator(".event")).to_have_text(["sealed"])
    complaints.clear()


# Staying up to date


def test_the_page_reconnects_to_its_service(page: Page, complaints: list[str]) -> None:
    """The page shows that it is reconnecting, keeps its content, and updates by itself."""
    with sqlite_file() as database, running_service(database) as service:
        with httpx.Client(base_url=service.url) as api:
            batch = open_batch(api, key="stays", items=2)
        page.goto(f"{service.url}/#/batches/{batch}")
        expect(live(page)).to_have_text("live")
        expect(numbers(page, "pending")).to_have_text("2")
        service.stop()
        expect(page.locator("#live")).to_have_text("reconnecting…")
        expect(page.get_by_role("alert")).to_contain_text("doesn’t answer")
        expect(numbers(page, "pending")).to_have_text("2")
        ServiceProcess.start(service)
        with httpx.Client(base_url=service.url) as api:
            ack(api, f"{batch}:0:1")
        expect(live(page)).to_have_text("live")
        expect(numbers(page, "acked")).to_have_text("1")
        expect(page.get_by_role("alert")).to_be_hidden()
    complaints.clear()


def test_without_the_service_nothing_looks_current(page: Page, complaints: list[str]) -> None:
    """No rate and no estimate of a batch, and no rows of one filter under another."""
    with sqlite_file() as database, running_service(database) as service:
        with httpx.Client(base_url=service.url) as api:
            batch = open_batch(api, key="away", items=2000, sealed=True)
            open_batch(api, key="open still", items=2)
            page.goto(f"{service.url}/#/batches/{batch}")
            expect(live(page)).to_have_text("live")
            expect(numbers(page, "acked")).to_have_text("0")  # the rate needs the count before the ack
            ack(api, f"{batch}:0:1")
            expect(page.locator(".big .words")).to_have_text(re.compile(r"/s, about .+ left$"))
        service.stop()
        expect(page.get_by_role("alert")).to_contain_text("doesn’t answer")
        expect(page.locator(".big .words")).to_have_text("")
        expect(numbers(page, "acked")).to_have_text("1")
        ServiceProcess.start(service)
        page.goto(f"{service.url}/#/")
        expect(page.locator(".batch")).to_have_count(2)
        expect(live(page)).to_have_text("live")
        service.stop()
        expect(page.get_by_role("alert")).to_contain_text("doesn’t answer")
        expect(page.locator(".batch")).to_have_count(2)
        page.get_by_role("group", name="State").get_by_role("link", name="open").click()
        expect(page.locator(".batch")).to_have_count(0)
        ServiceProcess.start(service)
        expect(page.locator(".batch")).to_have_count(1)
        expect(page.locator(".batch")).to_contain_text("open still")
    complaints.clear()


@pytest.mark.nightly
def test_a_request_that_is_never_answered_ends(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str]
) -> None:
    """A connection can be lost without a sign. The page says so, and goes on with the next request."""
    open_batch(api, key="silence", items=2)
    # A second instead of a minute.
    page.add_init_script("AbortSignal.timeout = ((real) => () => real.call(AbortSignal, 1000))(AbortSignal.timeout)")
    page.goto(f"{service_url}/#/?key_prefix=silence")
    expect(page.locator(".batch")).to_have_count(1)
    page.route("**/v1/batches?**", lambda route: None)
    expect(page.get_by_role("alert")).to_contain_text("doesn’t answer")
    page.unroute("**/v1/batches?**")
    expect(page.get_by_role("alert")).to_be_hidden()
    complaints.clear()


SLOW_ONCE = """
  const real = fetch;
  let isSlow = true;
  window.fetch = async (...given) => {
    if (isSlow && String(given[0].url ?? given[0]).endsWith("/v1/batches/BATCH")) {
      isSlow = false;
      await new Promise((resolve) => setTimeout(resolve, 3000));
    }
    return real(...given);
  };
"""


def test_the_counts_are_as_new_as_the_events_beside_them(page: Page, api: httpx.Client, service_url: str) -> None:
    """A slow answer makes the page read the batch rarely: each eighth part of the time."""
    batch = open_batch(api, items=1, sealed=True)
    page.add_init_script(SLOW_ONCE.replace("BATCH", str(batch)))
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(numbers(page, "pending")).to_have_text("1")
    ack(api, f"{batch}:0:0")
    expect(panel(page, "events").locator("[data-type='batch.succeeded']")).to_be_visible()
    expect(numbers(page, "pending")).to_have_text("0", timeout=5000)


def test_more_ranges_are_shown_even_if_the_page_is_reading(page: Page, api: httpx.Client, service_url: str) -> None:
    """A click in the middle of an update isn't lost."""
    batch = open_batch(api, items=60)
    ack(api, *(f"{batch}:0:{index}" for index in range(0, 60, 2)))
    page.goto(f"{service_url}/#/batches/{batch}")
    ranges = panel(page, "pending").locator(".range")
    expect(ranges).to_have_count(12)
    with page.expect_request("**/groups?**"):
        page.route("**/groups?**", lambda route: None)
        ack(api, f"{batch}:0:1")
    panel(page, "pending").get_by_role("button", name="Show more").click()
    page.unroute("**/groups?**")
    expect(ranges).to_have_count(29)


def test_a_batch_without_success_does_not_look_successful(page: Page, api: httpx.Client, service_url: str) -> None:
    """A batch whose items all failed is shown as such, and one that is not sealed is never shown as finished."""
    failed_batch = open_batch(api, key="lost", items=2, sealed=True)
    fail(api, "no disk", f"{failed_batch}:0:0", f"{failed_batch}:0:1")
    growing_batch = open_batch(api, key="growing", items=1)
    ack(api, f"{growing_batch}:0:0")
    page.goto(f"{service_url}/#/?key=lost")
    expect(page.locator(".batch .state")).to_have_text("all failed")
    page.goto(f"{service_url}/#/batches/{failed_batch}")
    expect(page.locator(".title .state")).to_have_text("all failed")
    expect(page.locator(".big .words")).to_have_text("every item failed")
    expect(page.locator(".tile.all-failed")).to_have_css(
        "background-color", page.locator(".bar .failed").evaluate("bar => getComputedStyle(bar).backgroundColor")
    )
    page.goto(f"{service_url}/#/?key=growing")
    expect(page.locator(".batch .share")).to_have_text("100 % so far")
    page.goto(f"{service_url}/#/batches/{growing_batch}")
    expect(page.locator(".big .unit")).to_have_text("% so far")


# Why it isn't done, and its deliveries


def test_an_open_batch_is_explained_as_not_sealed(page: Page, api: httpx.Client, service_url: str) -> None:
    """In the service's words; other reasons follow as they become true, and none is left in the end."""
    batch = open_batch(api, items=6, group_size=64)
    ack(api, f"{batch}:0:1", f"{batch}:0:2")
    page.goto(f"{service_url}/#/batches/{batch}")
    reasons = panel(page, "why").get_by_role("listitem")
    expect(reasons).to_have_count(2)
    expect(reasons.nth(0)).to_have_text(re.compile("^The batch is not sealed, so more items may be added; nothing has"))
    expect(reasons.nth(1)).to_have_text(f"4 of 6 items are pending: {batch}:0:0, {batch}:0:3 to {batch}:0:5.")
    expect(panel(page, "deliveries")).to_be_hidden()
    api.post(f"/v1/batches/{batch}/seal").raise_for_status()
    expect(reasons).to_have_count(1)
    expect(reasons).to_have_text(re.compile(rf"^4 of 6 items are pending: .* to {batch}:0:5 \(nothing has changed"))
    ack(api, *(f"{batch}:0:{index}" for index in (0, 3, 4, 5)))
    expect(page.locator(".title .state")).to_have_text("succeeded")
    expect(panel(page, "why")).to_be_hidden()


def test_a_sealed_batch_lists_the_groups_and_batches_it_waits_for(
    page: Page, api: httpx.Client, service_url: str
) -> None:
    """And a cancelled batch shows that it was cancelled."""
    batch = open_batch(api, items=128, group_size=64)
    child = open_batch(api, items=7, parent=f"{batch}:1:5")
    ack(api, f"{batch}:0:0")
    api.post(f"/v1/batches/{batch}/seal").raise_for_status()
    page.goto(f"{service_url}/#/batches/{batch}")
    reasons = panel(page, "why").get_by_role("listitem")
    expect(reasons).to_have_count(3)
    expect(reasons.nth(0)).to_contain_text(f"this batch waits for batch {child} (open, 7 pending)")
    expect(reasons.nth(1)).to_contain_text(f"127 of 128 items are pending: {batch}:0:1 to {batch}:1:63 (nothing has")
    expect(reasons.nth(2)).to_contain_text(f"Group 1 ({batch}:1:0 to {batch}:1:63) is the first group without")
    api.post(f"/v1/batches/{batch}/cancel").raise_for_status()
    expect(reasons).to_have_count(1)
    expect(reasons).to_have_text(re.compile("^The batch was cancelled at .* with 127 items pending"))


def test_a_dead_delivery_is_redelivered_after_a_confirmation(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver, webhook: int
) -> None:
    """Only dead deliveries can be redelivered. The receiver gets the same event again, and the page shows its new
    answer."""
    receiver.reply = status(500)
    batch = open_batch(api, items=1)
    page.goto(f"{service_url}/#/batches/{batch}")
    lines = panel(page, "deliveries").get_by_role("listitem")
    dead_line = lines.and_(page.locator("[data-state='dead']"))
    expect(dead_line).to_contain_text(
        re.compile(rf"dead.*opened.*webhook {webhook}.*2 attempts.*answered 500.*(now|ago)")
    )
    codes = [entry["code"] for entry in api.get(f"/v1/batches/{batch}/explain").json()["reasons"]]
    assert codes[-1] == "webhook_not_delivered"
    receiver.reply = status(200)
    api.post(f"/v1/batches/{batch}/seal").raise_for_status()
    expect(lines).to_have_count(2)
    expect(lines.nth(0)).to_contain_text(re.compile("delivered.*sealed.*1 attempt·answered 200"))
    expect(lines.nth(0).get_by_role("button")).to_have_count(0)
    expect(panel(page, "why")).to_contain_text("1 of 1 item is pending")
    expect(panel(page, "why")).not_to_contain_text("Webhook")
    button = dead_line.get_by_role("button", name="Redeliver…")
    button.click()
    dialog = page.get_by_role("dialog", name="Deliver it again?")
    expect(dialog).to_contain_text(f"“opened” is sent to webhook {webhook} once more.")
    dialog.get_by_role("button", name="Leave it").click()
    expect(button).to_be_focused()
    expect(dead_line).to_have_count(1)
    assert len(receiver.got) == 3
    button.click()
    dialog.get_by_role("button", name="Deliver again").click()
    expect(lines.nth(1)).to_contain_text(re.compile("delivered.*opened.*1 attempt·answered 200"))
    expect(dead_line).to_have_count(0)
    opening, sealing = f"batch:{batch}:opened", f"batch:{batch}:sealed"
    assert [(delivery.id, delivery.valid) for delivery in receiver.got] == [
        (id, True) for id in (opening, opening, sealing, opening)
    ]


def test_a_refused_redelivery_is_reported(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver, webhook: int, complaints: list[str]
) -> None:
    """In the dialog, which stays open: the answer 410 to a later event disables the webhook. From then on, the page
    offers no redelivery, and says why."""
    receiver.reply = status(500)
    batch = open_batch(api, items=1)
    page.goto(f"{service_url}/#/batches/{batch}")
    deliveries = panel(page, "deliveries")
    lines, buttons = deliveries.get_by_role("listitem"), deliveries.get_by_role("button", name="Redeliver…")
    expect(deliveries).to_contain_text("2 attempts·answered 500")
    buttons.click()
    receiver.reply = status(410)
    api.post(f"/v1/batches/{batch}/seal").raise_for_status()
    expect(lines).to_contain_text([r"answered 410", r"answered 500"])
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Deliver again").click()
    expect(dialog.get_by_role("alert")).to_contain_text(f"webhook {webhook} is disabled")
    dialog.get_by_role("button", name="Leave it").click()
    expect(buttons).to_have_count(0)
    expect(lines).to_contain_text(["the webhook is disabled", "the webhook is disabled"])
    assert all("409" in complaint for complaint in complaints)
    complaints.clear()


def test_a_waiting_delivery_shows_its_next_attempt(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver, webhook: int
) -> None:
    """As a time from now, requested by the receiver."""
    receiver.reply = status(503, Retry_After="7200")
    batch = open_batch(api, items=1)
    page.goto(f"{service_url}/#/batches/{batch}")
    line = panel(page, "deliveries").get_by_role("listitem")
    expect(line).to_contain_text(re.compile(r"pending.*1 attempt·answered 503.*·next attempt in (1 h 59 min|2 h)$"))


def test_an_incomplete_answer_is_described(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver, webhook: int
) -> None:
    """Next to its status, if there was one."""
    receiver.reply = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
    batch = open_batch(api, items=1)
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(panel(page, "deliveries")).to_contain_text(
        "answered 200, the connection was closed in the middle of the response"
    )


def test_deliveries_planned_after_the_end_are_shown(page: Page, receiver: Receiver) -> None:
    """A dispatcher that runs every two seconds: when the page gets the last event, there is no delivery yet."""
    settings = {"LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true", "LASTBIT_DISPATCHER_EVERY": "2"}
    with (
        sqlite_file() as database,
        running_service(database, **settings) as service,
        httpx.Client(base_url=service.url) as api,
    ):
        api.post("/v1/webhooks", json={"url": receiver.url, "types": ["batch.succeeded"]}).raise_for_status()
        batch = open_batch(api, items=1, sealed=True)
        page.goto(f"{service.url}/#/batches/{batch}")
        expect(live(page)).to_be_visible()
        expect(panel(page, "events").locator(".event")).to_have_text(["opened", "sealed"])
        ack(api, f"{batch}:0:0")
        expect(panel(page, "events").locator(".event")).to_have_count(4)
        expect(panel(page, "deliveries").get_by_role("listitem")).to_contain_text("succeeded")
        expect(panel(page, "deliveries").get_by_role("listitem")).to_contain_text("delivered")
        page.goto("about:blank")


# Hostile texts, keyboards and phones


def test_hostile_texts_stay_text(page: Page, api: httpx.Client, service_url: str) -> None:
    """Keys, labels and reasons, in every view and in the dialog."""
    batch = open_batch(api, key=HOSTILE[:255], labels={"<b>x</b>": HOSTILE, "__proto__": "x"}, items=2)
    fail(api, HOSTILE, f"{batch}:0:1")
    page.goto(service_url)
    expect(row(page, batch).locator(".name")).to_have_text(HOSTILE[:255])
    expect(row(page, batch).locator(".label-value").first).to_have_text(HOSTILE)
    row(page, batch).locator(".name").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE[:255])
    expect(panel(page, "failed").locator(".reason")).to_have_text(HOSTILE)
    page.locator(".tile").click()
    page.get_by_role("button", name="Next failed").click()
    expect(page.locator(".readout .word")).to_have_text(f"failed: {HOSTILE}")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Cancel…").click()
    expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text(f"Cancel {HOSTILE[:255]}?")
    assert page.title() == f"50 % · {HOSTILE[:255]} · Lastbit"
    assert page.locator("main img, main script, dialog img, dialog script").count() == 0


def test_the_policy_refuses_markup_from_text(page: Page, service_url: str, complaints: list[str]) -> None:
    """Even an error of the page itself could run nothing."""
    page.goto(service_url)
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("() => { document.body.innerHTML = '<p>x</p>'; }")
    assert all("TrustedHTML" in complaint for complaint in complaints)
    complaints.clear()


def focused(page: Page) -> Locator:
    return page.locator(":focus")


def tab_to(page: Page, target: Locator) -> None:
    """Move the focus with the tab key alone."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if target.evaluate("node => node === document.activeElement"):
            return
    raise AssertionError("the tab key does not reach the element")


def test_an_item_can_be_reached_by_keyboard_alone(page: Page, api: httpx.Client, service_url: str) -> None:
    """From the list to the batch, to its tiles, to the bits of one, and back."""
    key = uuid.uuid4().hex
    batch = open_batch(api, key=key, items=64 * 300, group_size=64)
    ack(api, f"{batch}:1:0")
    page.goto(f"{service_url}/#/?key={key}")
    expect(row(page, batch)).to_be_visible()
    tab_to(page, row(page, batch).locator(".name"))
    page.keyboard.press("Enter")
    tiles = page.locator(".tile")
    expect(tiles).to_have_count(300)
    expect(focused(page)).to_have_id("main")
    tab_to(page, tiles.first)
    page.keyboard.press("ArrowRight")
    expect(tiles.nth(1)).to_be_focused()
    page.keyboard.press("ArrowDown")
    focused_tile = tiles.locator(":scope:focus")
    first, focused_box = tiles.nth(1).bounding_box(), focused_tile.bounding_box()
    assert first is not None
    assert focused_box is not None
    assert first["x"] == focused_box["x"]
    assert first["y"] < focused_box["y"]
    page.keyboard.press("End")
    expect(tiles.nth(299)).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    expect(tiles.first).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    item = page.get_by_role("slider", name="Item")
    expect(item).to_be_focused()
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:1:1, pending")
    page.keyboard.press("ArrowLeft")
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:1:0, acked")
    page.keyboard.press("End")
    expect(item).to_have_attribute("aria-valuetext", f"{batch}:1:63, pending")
    outline = "node => getComputedStyle(node).outlineStyle"
    assert focused(page).evaluate(outline) == "solid"
    page.keyboard.press("Escape")
    expect(page.locator(".bits")).to_have_count(0)
    expect(tiles.nth(1)).to_be_focused()


def everything(api: httpx.Client) -> int:
    """A batch with something of everything, and with long words."""
    labels = {"name" * 20: "value" * 60, "a": ""}
    batch = open_batch(api, key="a-key-without-a-blank-" * 11, items=64 * 400, group_size=64, labels=labels)
    fail(api, "a reason without a blank ".replace(" ", "-") * 30, f"{batch}:0:1", f"{batch}:0:3")
    ack(api, *(f"{batch}:{group}:{group % 64}" for group in range(40)))
    return batch


@pytest.mark.parametrize("settings", [PHONE], ids=["phone"])
def test_a_phone_needs_no_scrolling_sideways(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver, webhook: int
) -> None:
    """With any content of the list, a batch, a group or a dialog."""
    receiver.reply = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
    batch = everything(api)
    overflow = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    page.goto(service_url)
    expect(row(page, batch)).to_be_visible()
    assert page.evaluate(overflow) <= 0
    page.goto(f"{service_url}/#/batches/{batch}?group=0")
    expect(page.locator(".tile")).to_have_count(400)
    expect(page.locator(".bits")).to_be_visible()
    expect(panel(page, "why")).to_be_visible()
    expect(panel(page, "deliveries").get_by_role("button")).to_be_visible()
    assert page.evaluate(overflow) <= 0
    page.get_by_role("button", name="Cancel…").click()
    dialog = page.get_by_role("dialog")
    assert page.evaluate(overflow) <= 0
    assert dialog.evaluate("node => node.scrollWidth <= node.clientWidth")


@pytest.mark.parametrize(
    "settings",
    [
        {"color_scheme": "light", "bypass_csp": True},
        pytest.param({"color_scheme": "dark", "bypass_csp": True}, marks=pytest.mark.nightly),
        pytest.param({"color_scheme": "light", "bypass_csp": True, **PHONE}, marks=pytest.mark.nightly),
    ],
    ids=["light", "dark", "phone"],
)
def test_axe_finds_nothing(
    page: Page, api: httpx.Client, service_url: str, fresh_url: str, receiver: Receiver, webhook: int
) -> None:
    """In the list, a batch, a group and a dialog. axe is injected into the page, which needs a browser without our
    policy."""
    axe = Axe()

    def check(view: str) -> None:
        result = axe.run(page)
        assert result.violations_count == 0, f"{view}: {result.generate_report()}"

    receiver.replies(status(500), status(500), status(503, Retry_After="7200"))
    batch = everything(api)
    receiver.wait_for(2)
    api.post(f"/v1/batches/{batch}/seal").raise_for_status()
    receiver.wait_for(3)
    done_batch = open_batch(api, key="done", items=1, sealed=True)
    fail(api, "why", f"{done_batch}:0:0")
    open_batch(api, key="succeeded", sealed=True)
    api.post(f"/v1/batches/{open_batch(api, key='cancelled')}/cancel").raise_for_status()
    page.goto(f"{fresh_url}/#/")
    expect(page.get_by_role("heading", name="No batches yet")).to_be_visible()
    check("an empty list")
    page.goto(f"{service_url}/#/?label=a:")
    expect(row(page, batch)).to_be_visible()
    check("a filtered list")
    page.goto(f"{service_url}/#/")
    expect(row(page, done_batch)).to_be_visible()
    check("the list")
    page.goto(f"{service_url}/#/batches/{batch}?group=0")
    expect(page.locator(".bits")).to_be_visible()
    expect(panel(page, "why")).to_be_visible()
    expect(panel(page, "deliveries").get_by_role("listitem")).to_have_count(2)
    expect(panel(page, "deliveries").get_by_role("button")).to_have_count(1)
    check("a batch")
    page.get_by_role("button", name="Cancel…").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    check("a dialog")
    page.get_by_label("Type").fill(str(batch))
    check("a dialog that is ready")


# Processes


def process(api: httpx.Client, name: str) -> None:
    """Create a process with three instances: one with a parked event, one running, one finished."""
    api.put(f"/v1/processes/{name}", json={"partitions": 1}).raise_for_status()
    sync_result = api.post(f"/v1/consumer-groups/process.{name}/sync", json={"worker": "w1", "session": "s1"}).json()
    fence = {"worker": "w1", "epoch": sync_result["assigned"][0]["epoch"]}
    outcomes: list[tuple[str, dict[str, Any]]] = [
        ("order/1", {"state": {"seen": [HOSTILE]}, "timers": [{"timer": "payment", "after": 3600}]}),
        ("order/1", {"version": 1, "error": f"ValueError: {HOSTILE}"}),
        ("order-2", {"commands": [{"type": "ship"}], "finish": True}),
        ("order-3", {"state": "begun"}),
    ]
    for instance, outcome in outcomes:
        id = uuid.uuid4().hex
        appended_event = api.post("/v1/events", json={"events": [{"id": id, "type": "card.charged"}]}).json()
        event = {"id": id, "position": appended_event["events"][0]["position"]}
        body = {"version": 0, **outcome, "event": event, "fence": fence}
        path = f"/v1/processes/{name}/{instance.replace('/', '%2F')}/handle"
        api.post(path, json=body).raise_for_status()


def test_a_parked_event_is_found_and_retried(page: Page, api: httpx.Client, service_url: str) -> None:
    """From the processes to the instances to the event, and it is handled again after a confirmation."""
    process(api, "found")
    page.goto(f"{service_url}/#/")
    page.get_by_role("link", name="Processes").click()
    line = page.locator("[data-process='found']")
    expect(line).to_contain_text("2 running")
    line.get_by_role("link", name="1 parked event").click()
    expect(page.locator("[data-instance]")).to_have_count(1)
    page.get_by_role("link", name="order/1").click()
    expect(page.get_by_role("heading", name="order/1", level=1)).to_be_visible()
    expect(panel(page, "state")).to_contain_text("<img src=x")
    expect(panel(page, "timers")).to_contain_text("payment")
    parked_row = page.locator("[data-status='parked']")
    expect(parked_row).to_contain_text("ValueError: <img")
    parked_row.get_by_role("button", name="Retry").click()
    page.get_by_role("button", name="Handle again").click()
    expect(page.locator("[data-status='retrying']")).to_have_count(1)
    expect(parked_row).to_have_count(0)
    assert "taken" not in page.title()


def test_instances_can_be_filtered_by_status_and_stay_current(page: Page, api: httpx.Client, service_url: str) -> None:
    """The status is part of the address; new instances appear by themselves."""
    process(api, "moves")
    page.goto(f"{service_url}/#/processes/moves")
    expect(page.locator("[data-instance]")).to_have_count(3)
    page.get_by_role("link", name="finished", exact=True).click()
    expect(page.locator("[data-instance='order-2']")).to_be_visible()
    expect(page.locator("[data-instance]")).to_have_count(1)
    page.goto(f"{service_url}/#/processes/moves/order-2")
    expect(panel(page, "commands")).to_contain_text("ship")
    process(api, "later")
    page.goto(f"{service_url}/#/processes")
    expect(page.locator("[data-process='later']")).to_be_visible()
    process(api, "latest")
    expect(page.locator("[data-process='latest']")).to_be_visible()


@pytest.mark.parametrize(
    "settings", [{"bypass_csp": True}, {"color_scheme": "dark", "bypass_csp": True, **PHONE}], ids=["light", "phone"]
)
def test_axe_finds_nothing_in_processes(page: Page, api: httpx.Client, service_url: str) -> None:
    """In their three views; and on a phone nothing is wider than the screen."""
    process(api, f"axe-{uuid.uuid4().hex[:8]}")
    name = api.get("/v1/processes").json()["processes"][0]["name"]
    for path, shows in (
        ("", "[data-process]"),
        (f"/{name}", "[data-instance]"),
        (f"/{name}/order%2F1", "[data-event]"),
    ):
        page.goto(f"{service_url}/#/processes{path}")
        expect(page.locator(shows).first).to_be_visible()
        result = Axe().run(page)
        assert result.violations_count == 0, f"{path}: {result.generate_report()}"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
