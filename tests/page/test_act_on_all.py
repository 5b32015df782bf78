"""Acting on all batches that match a filter, finding failures, and the tree of a batch, in a real browser.

What could go wrong: a batch is cancelled that the preview did not count; one that could not be cancelled looks
cancelled; a session that may only read sees the button; the tree shows another batch's children, or old counts.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from lastbit import tokens
from lastbit.tokens import Role
from tests.page.test_page import PHONE, ack, open_batch
from tests.support.servers import running_service, sqlite_file

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.nightly]


def state(api: httpx.Client, batch: int) -> str:
    name: str = api.get(f"/v1/batches/{batch}").json()["state"]
    return name


@pytest.mark.parametrize("settings", [{"bypass_csp": True}, {"color_scheme": "dark", "bypass_csp": True, **PHONE}])
def test_exactly_the_previewed_batches_are_cancelled(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str], settings: dict[str, Any]
) -> None:
    """One fails at first and is tried again; one has ended in the meantime; one was opened later and stays."""
    word = uuid.uuid4().hex[:8]
    batches = [open_batch(api, key=f"{word}-{number}", items=2, sealed=number % 2 == 0) for number in range(10)]
    complete_batch = open_batch(api, key=f"{word}-done", sealed=True)
    other = open_batch(api, key="other")
    page.goto(f"{service_url}/#/")
    expect(page.locator(".batch").first).to_be_visible()
    expect(page.get_by_role("button", name="Act on all…")).to_be_hidden()
    page.get_by_label("Key").fill(f"{word}-none")
    expect(page.get_by_text("No batch matches")).to_be_visible()
    expect(page.get_by_role("button", name="Act on all…")).to_be_hidden()
    page.get_by_label("Key").fill(word)
    page.get_by_role("button", name="Act on all…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button")).to_have_text(["Leave them"])
    dialog.get_by_label("What to do").select_option("Cancel")
    expect(dialog.get_by_role("status")).to_contain_text("10 live batches with 20 pending items")
    expect(dialog.get_by_role("list", name="Chosen").get_by_role("listitem")).to_have_count(8)
    expect(dialog).to_contain_text("and 2 more")
    result = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
    confirm = dialog.get_by_role("button", name="Cancel 10 batches")
    dialog.get_by_label("Type").fill("11")
    expect(confirm).to_be_disabled()
    late = open_batch(api, key=f"{word}-late")
    ack(api, f"{batches[0]}:0:0", f"{batches[0]}:0:1")
    busy = re.compile(rf"/v1/batches/{batches[3]}/cancel$")
    page.route(busy, lambda route: route.fulfill(status=503, json={"code": "unavailable", "detail": "too busy"}))
    dialog.get_by_label("Type").fill("10")
    confirm.click()
    expect(dialog.get_by_role("status")).to_have_text(
        "8 batches cancelled, 1 batch had changed and was left alone, 1 refused."
    )
    failures = dialog.get_by_role("list", name="Refused").get_by_role("listitem")
    expect(failures).to_have_count(1)
    expect(failures).to_contain_text("too busy")
    expect(failures).to_contain_text(f"batch {batches[3]}")
    result = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
    assert (state(api, batches[3]), state(api, batches[0])) == ("sealed" if 3 % 2 == 0 else "open", "complete")
    page.unroute(busy)
    dialog.get_by_role("button", name="Try 1 again").click()
    expect(dialog.get_by_role("status")).to_have_text("9 batches cancelled, 1 batch had changed and was left alone.")
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator(".states [data-value='cancelled']")).to_have_text("cancelled 9")
    assert {state(api, batch) for batch in batches[1:]} == {"cancelled"}
    assert (state(api, late), state(api, complete_batch), state(api, other)) == ("open", "complete", "open")
    assert len(complaints) == 2
    assert all("503" in complaint or "409" in complaint for complaint in complaints)
    complaints.clear()


def test_a_batch_that_is_sealed_during_the_search_counts_once(page: Page, api: httpx.Client, service_url: str) -> None:
    """Open batches are searched first, and sealed ones then."""
    key = uuid.uuid4().hex
    batches = [open_batch(api, key=key, items=1) for _ in range(2)]
    page.goto(f"{service_url}/#/?key={key}")
    expect(page.locator(".batch")).to_have_count(2)

    def seal_first(route: Route) -> None:
        api.post(f"/v1/batches/{batches[0]}/seal").raise_for_status()
        route.continue_()

    page.route(re.compile(r"/v1/batches\?.*state=sealed"), seal_first)
    page.get_by_role("button", name="Act on all…").click()
    page.get_by_label("What to do").select_option("Cancel")
    expect(page.get_by_role("dialog").get_by_role("status")).to_contain_text("2 live batches with 2 pending items")


def test_other_actions_on_all(page: Page, api: httpx.Client, service_url: str, complaints: list[str]) -> None:
    """Those that fit the filter are offered. Reopened, redriven, and deleted, except a batch that came back."""
    key = uuid.uuid4().hex
    batches = [open_batch(api, key=key, items=2) for _ in range(3)]
    for batch in batches:
        api.post(f"/v1/batches/{batch}/cancel").raise_for_status()
    page.goto(f"{service_url}/#/?key={key}&state=cancelled")
    expect(page.locator(".batch")).to_have_count(3)
    dialog = page.get_by_role("dialog")

    def act(action: str, result_text: str | re.Pattern[str]) -> None:
        page.get_by_role("button", name="Act on all…").click()
        dialog.get_by_label("What to do").select_option(action)
        expect(dialog.get_by_role("status")).to_contain_text("3 batches with")
        result = Axe().run(page)
        assert result.violations_count == 0, result.generate_report()
        dialog.get_by_label("Type").fill("3")
        dialog.get_by_role("button", name="3 batches").click()
        expect(dialog.get_by_role("status")).to_have_text(result_text)
        dialog.get_by_role("button", name="Close").click()

    page.get_by_role("button", name="Act on all…").click()
    expect(dialog.get_by_label("What to do").get_by_role("option")).to_have_text(["choose…", "Reopen", "Delete"])
    page.keyboard.press("Escape")
    act("Reopen", "3 batches reopened.")
    assert {state(api, batch) for batch in batches} == {"open"}
    for batch in batches:
        api.post("/v1/failures", json={"items": [f"{batch}:0:0"], "reason": "The disk is full"}).raise_for_status()
    page.goto(f"{service_url}/#/?key={key}")
    act("Send failed items again", re.compile(r"^3 items of 3 batches asked for again\. They stay failed until they"))
    for batch in batches:
        events = api.get("/v1/events", params={"batch": batch}).json()["events"]
        assert [event["type"] for event in events].count("batch.redrive") == 1
    page.goto(f"{service_url}/#/failures")
    page.get_by_label("Reason").fill("DISK")
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("list", name="Failures").get_by_role("listitem")).to_have_count(3)
    expect(page.get_by_role("status").first).to_have_text("3 failures whose reason contains “DISK”.")
    result = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
    page.get_by_role("link", name=f"{batches[2]}:0:0").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(key)
    page.goto(f"{service_url}/#/?key={key}")
    page.route(
        re.compile(rf"/v1/batches/{batches[0]}\?state=open"),
        lambda route: (api.post(f"/v1/batches/{batches[0]}/seal").raise_for_status(), route.continue_())[1],
    )
    act("Delete", "2 batches deleted, 1 batch had changed and was left alone.")
    assert state(api, batches[0]) == "sealed"
    assert [api.get(f"/v1/batches/{batch}").status_code for batch in batches[1:]] == [404, 404]
    assert len(complaints) == 1
    assert "409" in complaints[0]
    complaints.clear()


@pytest.mark.parametrize("settings", [{"bypass_csp": True}, {"color_scheme": "dark", "bypass_csp": True, **PHONE}])
def test_the_failures_of_one_reason_are_sent_again(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str], settings: dict[str, Any]
) -> None:
    """Also those of batches that the list hasn't yet; the other failures of these batches are not. So can those in a
    filtered list be."""
    word = uuid.uuid4().hex
    old = open_batch(api, key=f"{word}-old", items=111)
    api.post("/v1/failures", json={"items": [f"{old}:0:{number}" for number in range(110)], "reason": "no disk"})
    api.post("/v1/failures", json={"items": [f"{old}:0:110"], "reason": "no disk left"})
    batches = [open_batch(api, key=f"{word}-{number}", items=4) for number in range(3)]
    for batch in batches:
        api.post("/v1/failures", json={"items": [f"{batch}:0:0", f"{batch}:0:1"], "reason": "no disk"})
    api.post("/v1/failures", json={"items": [f"{batches[0]}:0:2"], "reason": "no disk left"})

    def redrives() -> list[tuple[int, str | None, int]]:
        events = [
            event
            for batch in (old, *batches)
            for event in api.get("/v1/events", params={"batch": batch}).json()["events"]
        ]
        redrive_events = [event for event in events if event["type"] == "batch.redrive"]
        return [(event["batch"], event["data"]["reason"], event["data"]["count"]) for event in redrive_events]

    page.goto(f"{service_url}/#/failures?text=disk&key_prefix={word}")
    reasons = page.get_by_role("list", name="Why they failed").get_by_role("listitem")
    expect(reasons).to_have_count(2)
    expect(reasons.first).to_contain_text(re.compile("99.*no disk.*in 4 batches so far"))
    expect(reasons.nth(1)).to_contain_text(re.compile("1.*no disk left.*in 1 batch so far"))
    result = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    button = page.get_by_role("button", name="Send again…").nth(1)
    button.click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("status")).to_contain_text("2 batches with 2 items that failed for this reason")
    expect(dialog.locator(".reason.quoted")).to_have_text("no disk left")
    result = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
    dialog.get_by_label("Type").fill("2")
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    assert sorted(redrives()) == [(old, "no disk left", 1), (batches[0], "no disk left", 1)]
    expect(reasons.first).to_contain_text(
        "no disk leftin 2 batches2 items of 2 batches asked for again. They stay failed until they are acked. If"
    )
    expect(reasons.get_by_role("button").first).to_be_focused()
    expect(reasons.get_by_role("button").first).to_have_accessible_description("no disk left")
    page.get_by_role("button", name="Search on").first.focus()
    page.keyboard.press("Enter")
    expect(reasons.nth(1)).to_contain_text(re.compile("116.*no disk.*in 4 batches(?! so far)"))
    expect(page.get_by_text("118 failures whose reason contains “disk”.")).to_be_focused()
    page.goto(f"{service_url}/#/feed?type=batch.redrive&batch={batches[0]}")
    expect(page.get_by_role("list", name="Feed").get_by_role("listitem").first).to_contain_text("1 failed item")
    page.goto(f"{service_url}/#/?key_prefix={word}")
    page.get_by_role("button", name="Act on all…").click()
    page.get_by_label("What to do").select_option("Send failed items again")
    expect(dialog.get_by_role("status")).to_contain_text("4 batches with 118 failed items")
    cause = dialog.get_by_label("Only those that failed for")
    for key in ("Tab", "Enter"):
        cause.fill("a comet")
        cause.press(key)
        expect(dialog.get_by_role("status")).to_have_text("No item of these batches failed for this reason.")
        expect(cause).to_be_focused()
    cause.fill("no disk le")
    cause.press("Enter")
    expect(dialog.get_by_role("status")).to_have_text(
        "No item failed for exactly this reason. Choose one that contains it:"
    )
    expect(dialog.get_by_role("button", name="no disk left")).to_be_focused()
    result = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("status")).to_contain_text("2 batches with 2 items that failed for this reason.")
    expect(dialog.get_by_label("Type")).to_be_focused()
    dialog.get_by_label("Type").fill("2")
    dialog.get_by_role("button", name="Send 2 items again").press("Enter")
    expect(dialog.get_by_role("status")).to_contain_text("2 items of 2 batches asked for again.")
    assert sorted(redrives()) == [(id, "no disk left", 1) for id in (old, batches[0]) for _ in range(2)]
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Failures")).to_be_visible()
    expect(page.get_by_label("Reason")).to_have_value("no disk left")
    expect(reasons).to_contain_text("2no disk left")


def test_the_failures_follow_the_acks_of_what_was_sent_again(page: Page, api: httpx.Client, service_url: str) -> None:
    """Though nobody searches again, and all of them, not only those in the list: an operator who sees an old number
    would think that the producer hangs."""
    word = uuid.uuid4().hex
    batch = open_batch(api, key=word, items=103, sealed=True)
    items = [f"{batch}:0:{number}" for number in range(103)]
    api.post("/v1/failures", json={"items": items, "reason": "no disk"}).raise_for_status()
    page.goto(f"{service_url}/#/failures?key_prefix={word}")
    page.get_by_role("button", name="Send again…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Type").fill("1")
    dialog.get_by_role("button", name="Send 103 items again").click()
    reasons = page.get_by_role("list", name="Why they failed").get_by_role("listitem")
    expect(reasons.get_by_role("button")).to_be_focused()
    for many, acked in ((103, items[:0]), (102, items[:1]), (2, items[1:101]), (1, items[101:102]), (0, items[102:])):
        api.post("/v1/acks", json={"items": acked}).raise_for_status()
        expect(reasons.locator(".many")).to_have_text(str(many))
    expect(page.get_by_text("No failure with a reason.")).to_be_visible()
    expect(reasons).to_contain_text(
        "no disk103 items of 1 batch asked for again. None is failed for this reason any more."
    )
    expect(page.locator("#said")).to_have_text("None is failed for this reason any more.")
    expect(reasons).to_be_focused()
    page.keyboard.press("b")
    expect(page.get_by_role("heading", name="Batches")).to_be_visible()


def test_what_was_sent_before_a_stop_is_followed_too(page: Page, api: httpx.Client, service_url: str) -> None:
    word = uuid.uuid4().hex
    batches = [open_batch(api, key=word, items=1) for _ in range(2)]
    api.post("/v1/failures", json={"items": [f"{batch}:0:0" for batch in batches], "reason": "no disk"})
    page.route(f"**/v1/batches/{batches[1]}/redrive", lambda _: None)  # no answer
    page.goto(f"{service_url}/#/failures?key_prefix={word}")
    page.get_by_role("button", name="Send again…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Type").fill("2")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("status")).to_have_text("1 of 2…")
    dialog.get_by_role("button", name="Stop").click()
    reasons = page.get_by_role("list", name="Why they failed").get_by_role("listitem")
    expect(reasons).to_contain_text("2no diskin 2 batches1 item of 1 batch asked for again.")


def test_a_reader_sees_no_button(page: Page) -> None:
    """Only a session that may cancel a batch sees it."""
    secrets = {role: tokens.new() for role in (Role.READ, Role.ADMIN)}
    lines = "\n".join(tokens.known(secret, role.value, [role]).line() for role, secret in secrets.items())
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS=lines) as service:
        with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {secrets[Role.ADMIN]}"}) as api:
            batch = open_batch(api, key="some")
        for role, count in ((Role.READ, 0), (Role.ADMIN, 1)):
            page.goto(f"{service.url}/#/?key_prefix=some")
            page.get_by_label("Token").fill(secrets[role])
            page.get_by_role("button", name="Sign in").click()
            expect(page.locator(f".batch[data-batch='{batch}']")).to_be_visible()
            expect(page.get_by_role("button", name="Act on all…")).to_have_count(count)
            page.get_by_role("button", name="Sign out").click()
            expect(page.get_by_label("Token")).to_be_visible()


@pytest.mark.parametrize("settings", [{"bypass_csp": True}, {"color_scheme": "dark", "bypass_csp": True, **PHONE}])
def test_a_tree_of_batches_is_walked(page: Page, api: httpx.Client, service_url: str, settings: dict[str, Any]) -> None:
    """Down by opening children in place, with current counts; up by the ancestors above the heading."""
    word = uuid.uuid4().hex[:8]
    top = open_batch(api, key=f"{word}-top", items=30)
    parts = [open_batch(api, key=f"{word}-part-{number}", items=4, parent=f"{top}:0:{number}") for number in range(25)]
    leaf = open_batch(api, key=f"{word}-leaf", items=3, parent=f"{parts[24]}:0:2")
    page.goto(f"{service_url}/#/batches/{top}")
    panel = page.locator("[data-panel='children']")
    expect(panel.locator(".line")).to_have_count(20)
    line = panel.locator(f"[data-batch='{parts[24]}']")
    expect(line).to_contain_text("item 0:24")
    line.get_by_role("button", name=f"Children of {word}-part-24").press("Enter")
    below = line.locator(f"[data-batch='{leaf}']")
    expect(below).to_contain_text("0 of 3 items")
    result = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ack(api, f"{leaf}:0:1")
    expect(below).to_contain_text("1 of 3 items")
    below.get_by_role("link", name=f"{word}-leaf").click()
    expect(page.get_by_role("heading", name=f"{word}-leaf", level=1)).to_be_visible()
    expect(page.locator("p.up a")).to_have_text(["All batches", f"{word}-top", f"{word}-part-24"])
    expect(page.locator("[data-panel='children']")).to_be_hidden()
    page.locator("p.up").get_by_role("link", name=f"{word}-top").click()
    page.get_by_role("link", name="More than 20 children").click()
    expect(page.locator(".batch")).to_have_count(25)
    page.get_by_role("link", name=f"Without the parent {top}").click()
    expect(page).to_have_url(re.compile("#/$"))
