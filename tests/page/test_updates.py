"""Updates of a batch in a real browser: how the page shows them, and the dialog that makes them.

What could go wrong: the dialog sends what was not changed, and undoes what another client changed; an error is shown
beside another field; a retry after a lost answer undoes a later update; a session sees a button that the service
refuses.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, Route, expect

from tests.page.test_operations import SECRETS, guarded_url  # noqa: F401
from tests.page.test_page import PHONE, open_batch, panel

pytestmark = pytest.mark.xdist_group("page")

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


def edit(page: Page, url: str, batch: int) -> Locator:
    page.goto(f"{url}/#/batches/{batch}")
    page.get_by_role("button", name="Edit…").click()
    return page.get_by_role("dialog")


def patches(api: httpx.Client, batch: int) -> list[Any]:
    events = api.get("/v1/events", params={"batch": batch, "type": "batch.updated"}).json()["events"]
    return [event["data"]["patch"] for event in events]


@pytest.mark.parametrize("settings", [{"timezone_id": "Asia/Kolkata"}])
def test_only_what_was_changed_is_sent(page: Page, api: httpx.Client, service_url: str) -> None:
    """What another client changes meanwhile, it keeps. Labels whose text a field can't show are left alone."""
    labels = {"team": "search", "run": "1", "trial": "yes", "lines": "two\nlines", "__proto__": "x"}
    policy = {"tolerated_failures": 7, "tolerated_failure_percentage": 5, "deadline": "2098-05-04T17:30:41.5Z"}
    batch = open_batch(api, key="edited", items=3, labels=labels, **policy)
    dialog = edit(page, service_url, batch)
    expect(dialog.get_by_label("Deadline")).to_have_value("2098-05-04T23:00")
    api.patch(f"/v1/batches/{batch}", json={"labels": {"run": "2"}, "tolerated_failures": 8}).raise_for_status()
    dialog.get_by_label("Tolerated percentage").fill("")
    dialog.get_by_label("Value of team").fill("index")
    dialog.get_by_role("button", name="Remove trial").click()
    dialog.get_by_role("button", name="Add a label").click()
    page.keyboard.type(" shop ")
    page.keyboard.press("Tab")
    page.keyboard.type(HOSTILE)
    dialog.get_by_role("button", name="Save", exact=True).click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("button", name="Edit…")).to_be_focused()
    expect(page.get_by_role("link", name=f"shop: {HOSTILE}")).to_be_visible()
    expect(page.get_by_text("tolerates 8 items failed")).to_be_visible()
    changed = {"trial": None, "team": "index", "shop": HOSTILE}
    assert patches(api, batch)[1:] == [{"tolerated_failure_percentage": None, "labels": changed}]
    dialog = edit(page, service_url, batch)
    dialog.get_by_label("Tolerated failures").fill("0")
    dialog.get_by_label("If more fail").select_option("cancel")
    dialog.get_by_label("Deadline").fill("2099-01-01T00:00")
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    moved = {"tolerated_failures": 0, "on_exceeded": "cancel", "deadline": "2098-12-31T18:30:00+00:00"}
    assert patches(api, batch)[2:] == [moved]


def test_nothing_changed_is_nothing_sent(page: Page, api: httpx.Client, service_url: str) -> None:
    """Whether the dialog is confirmed, with an empty line for a label, or left."""
    batch = open_batch(api, items=1, deadline="2098-05-04T17:30:41.5Z", labels={"team": "search"})
    dialog = edit(page, service_url, batch)
    dialog.get_by_role("button", name="Add a label").click()
    dialog.get_by_role("button", name="Save", exact=True).click()
    expect(dialog).to_have_count(0)
    page.get_by_role("button", name="Edit…").click()
    dialog.get_by_label("Value of team").fill("other")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert patches(api, batch) == []


def test_an_error_is_shown_beside_its_field(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str]
) -> None:
    """The first of them has the focus and is described by its error; errors of no field are shown below."""
    batch = open_batch(api, items=1)
    dialog = edit(page, service_url, batch)
    failures, percentage = dialog.get_by_label("Tolerated failures"), dialog.get_by_label("Tolerated percentage")
    failures.fill("many")
    percentage.fill("101")
    dialog.get_by_role("button", name="Add a label").click()
    dialog.get_by_label("Value of the new label").fill("no name")
    save = dialog.get_by_role("button", name="Save", exact=True)
    save.click()
    expect(failures).to_be_focused()
    expect(failures).to_have_accessible_description("expected an integer")
    expect(percentage).to_have_accessible_description("expected at most 100")
    expect(dialog.get_by_label("Name of the new label")).to_have_accessible_description(re.compile("at least 1 char"))
    expect(dialog.locator("[aria-invalid]")).to_have_count(3)
    expect(dialog.get_by_role("alert")).to_be_hidden()
    failures.fill("")
    percentage.fill("")
    dialog.get_by_role("button", name="Remove the new label").click()
    exceeded, deadline = dialog.get_by_label("If more fail"), dialog.get_by_label("Deadline")
    exceeded.select_option("cancel")
    save.click()
    expect(exceeded).to_have_accessible_description("it needs tolerated_failures or tolerated_failure_percentage")
    expect(dialog.locator("[aria-invalid]")).to_have_count(1)
    exceeded.select_option("continue")
    deadline.fill("2001-01-01T00:00")
    save.click()
    expect(deadline).to_have_accessible_description(re.compile("expected a time in the future"))
    deadline.fill("2099-01-01T00:00")
    api.post(f"/v1/batches/{batch}/cancel").raise_for_status()
    save.click()
    expect(dialog.get_by_role("alert")).to_contain_text(f"batch {batch} was cancelled")
    expect(dialog.locator("[aria-invalid]")).to_have_count(0)
    dialog.get_by_role("button", name="Don’t save").click()
    expect(page.get_by_role("button", name="Edit…")).to_be_hidden()
    assert patches(api, batch) == []
    assert all("422" in complaint or "409" in complaint for complaint in complaints)
    complaints.clear()


def test_a_retry_after_a_lost_answer_undoes_no_later_update(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str]
) -> None:
    """It asks for the same, with the same key."""
    batch = open_batch(api, items=1)
    dialog = edit(page, service_url, batch)

    def lose(route: Route) -> None:
        if route.request.method == "PATCH":
            route.fetch()
            route.abort()
        else:
            route.continue_()

    page.route(f"**/v1/batches/{batch}", lose)
    dialog.get_by_label("Tolerated failures").fill("1")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("The service doesn’t answer")
    expect(dialog.get_by_role("button", name="Save", exact=True)).to_be_focused()
    expect(dialog.locator(".edit")).to_have_attribute("inert", "")
    api.patch(f"/v1/batches/{batch}", json={"tolerated_failures": 2}).raise_for_status()
    page.unroute(f"**/v1/batches/{batch}")
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    expect(page.get_by_text("tolerates 2 items failed")).to_be_visible()
    assert patches(api, batch) == [{"tolerated_failures": 1}, {"tolerated_failures": 2}]
    assert all("ERR_FAILED" in complaint for complaint in complaints)
    complaints.clear()


@pytest.mark.parametrize(("name", "buttons"), [("looker", 0), ("shop", 1)])
def test_only_a_producer_can_edit(page: Page, guarded_url: str, name: str, buttons: int) -> None:  # noqa: F811
    with httpx.Client(base_url=guarded_url, headers={"Authorization": f"Bearer {SECRETS['boss']}"}) as api:
        batch = open_batch(api, key=f"shop-edit-{name}", items=1)
    page.goto(f"{guarded_url}/#/batches/{batch}")
    page.get_by_label("Token").fill(SECRETS[name])
    page.get_by_role("button", name="Sign in").click()
    expect(panel(page, "events")).to_contain_text("opened")
    expect(page.get_by_role("button", name="Edit…")).to_have_count(buttons)


@pytest.mark.parametrize(
    "settings",
    [{"bypass_csp": True}, {"bypass_csp": True, "color_scheme": "dark", **PHONE}],
    ids=["light", "dark-phone"],
)
def test_axe_finds_nothing_in_the_dialog(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str]
) -> None:
    """With errors, and long names; nothing is wider than the screen."""
    batch = open_batch(api, key="k" * 200, items=1, labels={"n" * 200: "v" * 900, HOSTILE.replace(":", ""): HOSTILE})
    dialog = edit(page, service_url, batch)
    dialog.get_by_label("Tolerated percentage").fill("101")
    dialog.get_by_role("button", name="Add a label").click()
    dialog.get_by_label("Value of the new label").fill("no name")
    dialog.get_by_role("button", name="Save", exact=True).click()
    expect(dialog.locator("[aria-invalid]")).to_have_count(2)
    result = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert dialog.evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth")
    complaints.clear()
