"""The views of an operator, in a real browser: webhooks, consumer groups, tallies, the feed, commands and tokens.

What could go wrong: a view shows something other than what the API has; an action changes nothing, or changes something
without a confirmation; a session sees a button or a section that the service refuses; a secret stays on the page.
"""

from __future__ import annotations

import base64
import re
import sqlite3
import uuid
from collections.abc import Iterator

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from lastbit import tokens
from lastbit.streams import AckWindow
from lastbit.tokens import Role
from tests.page.test_page import HOSTILE, PHONE, ack, fail, open_batch, process
from tests.support.receivers import Receiver, status
from tests.support.servers import running_service, sqlite_file

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.nightly]


def test_a_webhook_that_may_have_been_created_is_not_created_again(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver, complaints: list[str]
) -> None:
    """Without a warning: its answer was lost, and a second webhook would get each event too."""

    def lose(route: Route) -> None:
        if route.request.method == "POST":
            route.fetch()
            route.abort()
        else:
            route.continue_()

    page.goto(f"{service_url}/#/webhooks")
    page.route("**/v1/webhooks*", lose)
    page.get_by_role("button", name="New webhook…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("URL").fill(receiver.url)
    dialog.get_by_label("Label").fill("perhaps")
    dialog.get_by_role("button", name="Create", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("may have been created")
    page.get_by_role("button", name="Don’t create").click()
    row = page.locator("[data-webhook]").filter(has_text="perhaps")
    expect(row).to_have_count(1)
    webhook = row.get_attribute("data-webhook")
    api.delete(f"/v1/webhooks/{webhook}").raise_for_status()
    complaints.clear()


def group(api: httpx.Client) -> str:
    """A consumer group of three partitions, two of which have an owner; each of these is 51 offsets behind."""
    name = f"group-{uuid.uuid4().hex[:8]}"
    api.put(f"/v1/consumer-groups/{name}", json={"partitions": 3, "ttl": 3600}).raise_for_status()
    body = {"worker": "importer", "session": "s1", "capacity": 2}
    for lease in api.post(f"/v1/consumer-groups/{name}/sync", json=body).json()["assigned"]:
        window = AckWindow()
        for offset in range(10, 20):
            window.track(offset)
        position = {
            "worker": "importer",
            "epoch": lease["epoch"],
            "snapshot": base64.b64encode(window.snapshot()).decode(),
            "head": 60,
        }
        path = f"/v1/consumer-groups/{name}/partitions/{lease['partition']}/position"
        api.put(path, json=position).raise_for_status()
    return name


def tally(api: httpx.Client) -> str:
    name = f"tally-{uuid.uuid4().hex[:8]}"
    sources = [{"topic": "payments", "partition": partition, "offset": 7} for partition in range(2)]
    entries = [{"key": key, "delta": 1200, "source": source} for key in ("cart/1", HOSTILE) for source in sources]
    api.post(f"/v1/tallies/{name}/apply", json={"entries": entries}).raise_for_status()
    return name


def test_a_webhook_is_created_tested_and_deleted(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver
) -> None:
    """Its secret, with which the test is signed, is shown once. Deleting needs the webhook's number."""
    page.goto(f"{service_url}/#/webhooks")
    page.get_by_role("button", name="New webhook…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("URL").fill(receiver.url)
    dialog.get_by_label("Events").fill("nothing.such other.such")
    dialog.get_by_label("Label").fill(HOSTILE)
    dialog.get_by_role("button", name="Create", exact=True).click()
    secret = page.locator(".secret")
    expect(secret).to_contain_text("whsec_")
    receiver.secrets.append(secret.inner_text().strip())
    page.get_by_role("button", name="Close").click()
    expect(secret).to_have_count(0)
    (created,) = [webhook for webhook in api.get("/v1/webhooks").json()["webhooks"] if webhook["label"] == HOSTILE]
    assert created["types"] == ["nothing.such", "other.such"]
    row = page.locator(f"[data-webhook='{created['id']}']")
    expect(row).to_contain_text("nothing.such, other.such")
    expect(row).to_contain_text(HOSTILE)
    row.get_by_role("link", name=receiver.url).click()
    page.get_by_role("button", name="Send a test").click()
    expect(page.get_by_role("status").filter(has_text="answered")).to_contain_text("The receiver answered 204 after")
    assert receiver.wait_for(1)
    page.get_by_role("button", name="Delete…").click()
    confirm = page.get_by_role("button", name="Delete the webhook")
    expect(confirm).to_be_disabled()
    page.get_by_label("Type").fill(str(created["id"]))
    confirm.click()
    expect(page.get_by_role("heading", name="Webhooks", level=1)).to_be_visible()
    expect(row).to_have_count(0)
    assert created["id"] not in [webhook["id"] for webhook in api.get("/v1/webhooks").json()["webhooks"]]


def test_a_secret_is_rotated_and_shown_once(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver, webhook: int, complaints: list[str]
) -> None:
    """The receiver accepts messages with its old secret and with the new one; a rotation without overlap ends both."""
    old = receiver.secrets[0]
    page.goto(f"{service_url}/#/webhooks/{webhook}")
    page.get_by_role("button", name="Rotate secret…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("The old secret stays valid for")).to_have_value("86400")
    dialog.get_by_role("button", name="Rotate the secret").click()
    secret = page.locator(".secret")
    expect(secret).to_contain_text("whsec_")
    new = secret.inner_text().strip()
    page.get_by_role("button", name="Close").click()
    expect(secret).to_have_count(0)
    expect(page.locator(".about.facts")).to_contain_text("the old secret ends in")
    for known in (old, new):
        receiver.secrets[:] = [known]
        api.post(f"/v1/webhooks/{webhook}/test").raise_for_status()
    page.get_by_role("button", name="Rotate secret…").click()
    page.get_by_label("The old secret stays valid for").select_option("0")
    page.get_by_role("button", name="Rotate the secret").click()
    expect(secret).to_contain_text("whsec_")
    page.keyboard.press("Escape")
    expect(page.locator(".about.facts")).not_to_contain_text("the old secret")
    api.post(f"/v1/webhooks/{webhook}/test").raise_for_status()
    assert [request.valid for request in receiver.got] == [True, True, False]
    assert complaints == []


def test_a_webhook_that_the_service_refuses_is_explained(page: Page, service_url: str, complaints: list[str]) -> None:
    """In the dialog, beside its field."""
    page.goto(f"{service_url}/#/webhooks")
    page.get_by_role("button", name="New webhook…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("URL").fill("ftp://example.com/")
    dialog.get_by_role("button", name="Create", exact=True).click()
    expect(dialog.get_by_label("URL")).to_have_accessible_description(re.compile("begins with https"))
    assert all("422" in complaint or "400" in complaint for complaint in complaints)
    complaints.clear()


def test_a_webhooks_log_shows_each_attempt_and_redelivers(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver, webhook: int
) -> None:
    """The log can be filtered by state; one delivery or all dead ones are sent again after a confirmation."""
    receiver.replies(status(500), status(503), status(204, Content_Length="0"))
    batch = open_batch(api, items=1)
    receiver.wait_for(2)
    page.goto(f"{service_url}/#/webhooks/{webhook}?state=dead")
    dead = page.locator(".log-of > [data-state='dead']")
    expect(dead).to_have_count(1)
    expect(dead.locator(".attempts li")).to_have_count(2)
    expect(dead).to_contain_text("answered 500")
    expect(dead).to_contain_text("answered 503")
    expect(dead.get_by_role("link", name=f"batch {batch}")).to_be_visible()
    page.get_by_role("button", name="Redeliver dead…").click()
    page.get_by_role("button", name="Redeliver all").click()
    expect(page.get_by_role("status").filter(has_text="1 delivery will be sent again.")).to_be_visible()
    expect(dead).to_have_count(0)
    page.get_by_role("link", name="delivered", exact=True).click()
    delivered = page.locator(".log-of > [data-state='delivered']")
    expect(delivered.locator(".attempts li")).to_have_count(3)
    delivered.get_by_role("button", name="Redeliver…").click()
    page.get_by_role("button", name="Deliver again").click()
    expect(delivered.locator(".attempts li")).to_have_count(4)
    receiver.reply = status(410)  # disables the webhook, to which the service then redelivers nothing
    api.post(f"/v1/batches/{batch}/seal").raise_for_status()
    expect(page.locator(".about .state")).to_have_text("disabled")
    expect(delivered).to_have_count(1)
    expect(page.get_by_role("button", name="Redeliver")).to_have_count(0)


def test_a_consumer_group_shows_its_owners_and_its_lag(page: Page, api: httpx.Client, service_url: str) -> None:
    """The sum of all partitions, and those without an owner."""
    name = group(api)
    page.goto(f"{service_url}/#/consumer-groups")
    page.get_by_role("link", name=name).click()
    expect(page.locator("[data-number='lag']")).to_have_text("lag 102")
    expect(page.locator("[data-worker='importer']")).to_contain_text("2")
    owned = page.locator("[data-partition]").filter(has_text="importer")
    expect(owned).to_have_count(2)
    expect(owned.first).to_contain_text("51")
    workers = page.get_by_role("region", name="Table of workers")
    assert workers.get_attribute("tabindex") is None  # nothing to scroll, so no stop of the keyboard
    page.set_viewport_size({"width": 720, "height": 860})
    expect(workers).to_have_attribute("tabindex", "0")
    page.set_viewport_size({"width": 360, "height": 860})
    expect(workers).not_to_have_attribute("tabindex", "0")
    expect(owned.first).to_contain_text("51")
    page.get_by_role("link", name="without an owner 1").click()
    expect(page.locator("[data-partition]")).to_have_count(1)
    expect(page.locator("[data-partition]")).to_contain_text("nobody")
    api.delete(f"/v1/consumer-groups/{name}/workers/importer").raise_for_status()
    expect(page.get_by_text("No worker is in the group.")).to_be_visible()


def test_a_tally_shows_its_totals_and_their_sources(page: Page, api: httpx.Client, service_url: str) -> None:
    """Opened by its name, filtered by the beginning of a key."""
    name = tally(api)
    page.goto(f"{service_url}/#/tallies")
    page.get_by_role("textbox", name="Tally").fill(name)
    page.keyboard.press("Enter")
    expect(page.locator("[data-total]")).to_have_count(2)
    page.get_by_label("Keys that begin with").fill("cart")
    page.keyboard.press("Enter")
    expect(page.locator("[data-total]")).to_have_count(1)
    expect(page.locator("[data-total]")).to_contain_text("2,400")
    page.get_by_role("link", name="cart/1").click()
    expect(page.locator(".total")).to_contain_text("2,400")
    expect(page.locator("tbody tr")).to_have_count(2)


def test_a_tally_without_keys_may_be_mistyped(page: Page, api: httpx.Client, service_url: str) -> None:
    """The service answers alike for a tally that doesn't exist."""
    page.goto(f"{service_url}/#/tallies/mistyped")
    expect(page.locator(".empty")).to_have_text("There is no tally mistyped, or it has no keys.")
    name = tally(api)
    page.goto(f"{service_url}/#/tallies/{name}?prefix=dart")
    expect(page.locator(".empty")).to_have_text(f"There is no tally {name}, or none of its keys begins with “dart”.")


def test_the_feed_shows_the_newest_events_and_follows_new_ones(page: Page, api: httpx.Client, service_url: str) -> None:
    """An event far back is found by its type or its batch, and its data can be opened."""
    kind = f"rare.{uuid.uuid4().hex}"
    event = {"id": kind, "type": kind, "key": "the-key", "data": {"note": HOSTILE}}
    api.post("/v1/events", json={"events": [event]}).raise_for_status()
    many = [{"id": uuid.uuid4().hex, "type": "common"} for _ in range(1000)]
    for start in range(2):
        repeated = [{**line, "id": f"{line['id']}-{start}"} for line in many]
        api.post("/v1/events", json={"events": repeated}).raise_for_status()
    page.goto(f"{service_url}/#/feed")
    lines = page.locator(".log > li")
    expect(lines).to_have_count(50)
    batch = open_batch(api, key="seen-at-once", items=1)
    expect(lines.first).to_contain_text("batch.opened")
    expect(lines.first.get_by_role("link", name="seen-at-once")).to_have_attribute("href", f"#/batches/{batch}")
    page.get_by_role("button", name="Look further back").click()
    expect(lines).to_have_count(100)
    page.get_by_label("Type").fill(kind)
    page.keyboard.press("Enter")
    expect(lines).to_have_count(1)
    lines.locator("summary").click()
    expect(lines.locator("pre")).to_contain_text("<img")
    page.goto(f"{service_url}/#/feed?batch={batch}")
    expect(lines).to_have_count(1)
    expect(lines).to_contain_text("seen-at-once")


def test_the_feed_forgets_lines_that_it_no_longer_shows(page: Page, api: httpx.Client, service_url: str) -> None:
    """It may be open for days."""
    events = [{"id": uuid.uuid4().hex, "type": "common"} for _ in range(100)]
    api.post("/v1/events", json={"events": events}).raise_for_status()
    page.goto(f"{service_url}/#/feed")
    lines = page.locator(".log > li")
    expect(lines).to_have_count(50)
    for number in range(3):
        last = {"id": uuid.uuid4().hex, "type": f"last.{number}"}
        api.post("/v1/events", json={"events": [{**event, "id": uuid.uuid4().hex} for event in events] + [last]})
        expect(lines.first).to_contain_text(last["type"])
    session = page.context.new_cdp_session(page)
    prototype = session.send("Runtime.evaluate", {"expression": "HTMLLIElement.prototype"})["result"]["objectId"]
    kept = session.send("Runtime.queryObjects", {"prototypeObjectId": prototype})["objects"]["objectId"]
    result = session.send(
        "Runtime.callFunctionOn",
        {
            "objectId": kept,
            "functionDeclaration": "function () { return this.filter((node) => !node.isConnected).length; }",
            "returnByValue": True,
        },
    )
    assert result["result"]["value"] < 50


def test_the_feed_goes_on_after_a_trim_and_a_long_pause(page: Page, complaints: list[str]) -> None:
    """Events that it would read next may be trimmed, or more than it can catch up with, as after a night in which the
    computer slept."""

    def append(count: int) -> None:
        for _ in range(0, count, 1000):
            events = [{"id": uuid.uuid4().hex, "type": "rare"} for _ in range(min(count, 1000))]
            api.post("/v1/events", json={"events": events}).raise_for_status()

    def trim(kept: int) -> None:
        with sqlite3.connect(database.removeprefix("sqlite:///")) as file:
            file.execute("UPDATE feed_head SET trimmed = position - ?", (kept,))
            file.execute("DELETE FROM feed WHERE position <= (SELECT trimmed FROM feed_head)")

    with sqlite_file() as database, running_service(database) as service, httpx.Client(base_url=service.url) as api:
        common = [{"id": uuid.uuid4().hex, "type": "common"} for _ in range(1000)]
        for part in range(2):
            body = {"events": [{**event, "id": f"{event['id']}-{part}"} for event in common]}
            api.post("/v1/events", json=body).raise_for_status()
        append(60)
        page.goto(f"{service.url}/#/feed?type=rare")
        lines = page.locator(".log > li")
        expect(lines).to_have_count(50)
        trim(80)
        page.get_by_role("button", name="Look further back").click()
        append(1)
        expect(lines.first).to_contain_text("2,061")
        expect(lines).to_have_count(61)
        page.context.set_offline(True)
        append(10)
        trim(5)
        page.context.set_offline(False)
        expect(lines.first).to_contain_text("2,071")
        page.context.set_offline(True)
        append(9000)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.context.set_offline(False)
        expect(lines.first).to_contain_text("11,071")
        assert len([url for url in requests if "/v1/events?" in url]) < 9
        trim(0)
        complaints.clear()
        page.reload()
        expect(page.get_by_text("No events.")).to_be_visible()
        expect(page.get_by_role("alert")).to_be_hidden()


def test_the_commands_lead_to_their_instances(page: Page, api: httpx.Client, service_url: str) -> None:
    process(api, "commanding")
    page.goto(f"{service_url}/#/commands?process=commanding")
    expect(page.locator(".log > li")).to_have_count(1)
    expect(page.locator(".log > li")).to_contain_text("ship")
    page.get_by_role("link", name="commanding / order-2").click()
    expect(page.get_by_role("heading", name="order-2", level=1)).to_be_visible()


def test_an_open_batch_is_sealed_after_a_confirmation(page: Page, api: httpx.Client, service_url: str) -> None:
    """A sealed batch has no such button."""
    batch = open_batch(api, items=2)
    page.goto(f"{service_url}/#/batches/{batch}")
    button = page.get_by_role("button", name="Seal…")
    button.click()
    page.get_by_role("button", name="Leave it open").click()
    assert api.get(f"/v1/batches/{batch}").json()["state"] == "open"
    button.click()
    page.get_by_role("button", name="Seal the batch").click()
    expect(page.locator(".title .state")).to_have_text("sealed")
    expect(button).to_be_hidden()
    assert api.get(f"/v1/batches/{batch}").json()["state"] == "sealed"


def test_an_item_has_an_address_of_its_own(page: Page, api: httpx.Client, service_url: str) -> None:
    batch = open_batch(api, items=100, group_size=64)
    fail(api, "why it failed", f"{batch}:1:3")
    page.goto(f"{service_url}/#/items/{batch}:1:3")
    expect(page.get_by_role("slider", name="Item")).to_have_attribute(
        "aria-valuetext", f"{batch}:1:3, failed: why it failed"
    )
    page.goto(f"{service_url}/#/items/{batch}:1")
    expect(page.get_by_role("heading", level=1)).to_have_text("This is not an item")
    page.get_by_role("link", name="All batches", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Batches")


SECRETS = {name: tokens.new() for name in ("boss", "looker", "shop")}
KNOWN = [
    tokens.known(SECRETS["boss"], "boss", [Role.ADMIN]),
    tokens.known(SECRETS["looker"], "looker", [Role.READ], requests=200),
    tokens.known(SECRETS["shop"], "shop", [Role.READ, Role.PRODUCE], "shop-"),
]


@pytest.fixture(scope="module")
def guarded_url() -> Iterator[str]:
    """A service that requires a token."""
    lines = "\n".join(token.line() for token in KNOWN)
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS=lines) as running:
        yield running.url


EVERYTHING = [
    *("Batches", "Stuck", "Failures", "Feed", "Processes", "Commands", "Consumer groups", "Tallies"),
    *("Webhooks", "Tokens"),
]


@pytest.mark.parametrize(
    ("name", "sections"),
    [("boss", EVERYTHING), ("looker", EVERYTHING[:8]), ("shop", ["Batches", "Stuck", "Failures", "Feed"])],
)
def test_a_session_sees_only_what_it_may(page: Page, guarded_url: str, name: str, sections: list[str]) -> None:
    """Sections that the service would refuse are not shown, nor are buttons; each shown section opens without an
    error."""
    headers = {"Authorization": f"Bearer {SECRETS['boss']}"}
    with httpx.Client(base_url=guarded_url, headers=headers) as api:
        batch = open_batch(api, key=f"shop-{name}", items=1)
        process(api, f"of-{name}")
        group(api)
        tally(api)
    page.goto(guarded_url)
    expect(page.get_by_role("navigation")).to_have_count(0)
    page.get_by_label("Token").fill(SECRETS[name])
    page.get_by_role("button", name="Sign in").click()
    links = page.get_by_role("navigation", name="Sections").get_by_role("link")
    expect(links).to_have_text(sections)
    for section in sections:
        page.get_by_role("link", name=section, exact=True).click()
        expect(page.get_by_role("heading", name=section, level=1)).to_be_visible()
        expect(page.locator("[aria-current='page']")).to_have_text(section)
        with page.expect_response("**/session") as answer:
            page.evaluate("fetch('/session')")
        assert answer.value.ok
        expect(page.get_by_role("alert")).to_have_count(0)
    page.goto(f"{guarded_url}/#/batches/{batch}")
    expect(page.get_by_role("heading", name=f"shop-{name}", level=1)).to_be_visible()
    expect(page.locator("[data-panel='events']")).to_contain_text("opened")
    expect(page.get_by_role("button", name="Seal…")).to_have_count(0 if name == "looker" else 1)


def test_the_tokens_are_shown_without_secrets(page: Page, guarded_url: str) -> None:
    """With their roles, limits and rates, and only to operators."""
    page.goto(guarded_url)
    page.get_by_label("Token").fill(SECRETS["boss"])
    page.get_by_role("button", name="Sign in").click()
    with page.expect_response("**/session/tokens") as answer:
        page.get_by_role("link", name="Tokens").click()
    text = answer.value.text()
    assert not any(token.digest.hex() in text or secret in text for token in KNOWN for secret in SECRETS.values())
    expect(page.locator("[data-token='shop']")).to_contain_text("read, produce")
    expect(page.locator("[data-token='shop']")).to_contain_text("shop-")
    expect(page.locator("[data-token='looker']")).to_contain_text("200")
    for name, expected in (("boss", 200), ("looker", 403), ("shop", 403)):
        headers = {"Authorization": f"Bearer {SECRETS[name]}"}
        assert httpx.get(f"{guarded_url}/session/tokens", headers=headers).status_code == expected
    assert httpx.get(f"{guarded_url}/session/tokens").status_code == 401


@pytest.mark.parametrize(
    "settings",
    [{"bypass_csp": True}, {"color_scheme": "dark", "bypass_csp": True, **PHONE}],
    ids=["light", "dark-phone"],
)
def test_axe_finds_nothing_in_the_operators_views(
    page: Page, api: httpx.Client, service_url: str, receiver: Receiver, webhook: int
) -> None:
    """And on a phone nothing is wider than the screen."""
    receiver.replies(status(500), status(500))
    ack(api, f"{open_batch(api, key='for-axe', items=1, sealed=True)}:0:0")
    receiver.wait_for(2)
    process(api, f"axe-{uuid.uuid4().hex[:8]}")
    name, totals = group(api), tally(api)
    for path, shows in (
        ("feed", ".log > li"),
        ("commands", ".log > li"),
        ("consumer-groups", "[data-group]"),
        (f"consumer-groups/{name}", "[data-partition]"),
        ("tallies", "#tally"),
        (f"tallies/{totals}", "[data-total]"),
        (f"tallies/{totals}/cart%2F1", "tbody tr"),
        ("webhooks", "[data-webhook]"),
        (f"webhooks/{webhook}", ".log-of > li"),
        ("tokens", ".note:visible"),
    ):
        page.goto(f"{service_url}/#/{path}")
        expect(page.locator(shows).first).to_be_visible()
        result = Axe().run(page)
        assert result.violations_count == 0, f"{path}: {result.generate_report()}"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    page.goto(f"{service_url}/#/webhooks/{webhook}")
    page.get_by_role("button", name="Rotate secret…").click()
    expect(page.get_by_label("The old secret stays valid for")).to_be_visible()
    assert Axe().run(page).violations_count == 0
