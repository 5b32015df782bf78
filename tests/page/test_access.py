"""Signing in, the permissions of a session, and other sites' pages: in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from lastbit import tokens
from lastbit.tokens import Role
from tests.page.test_page import PHONE, live, open_batch, row
from tests.support.servers import running_service, sqlite_file

pytestmark = pytest.mark.xdist_group("page")

SECRETS = {name: tokens.new() for name in ("boss", "looker", "worker", "shop", "long")}
KNOWN = [
    tokens.known(SECRETS["boss"], "boss", [Role.ADMIN]),
    tokens.known(SECRETS["looker"], "looker", [Role.READ]),
    tokens.known(SECRETS["worker"], "worker", [Role.CONSUME]),
    tokens.known(SECRETS["shop"], "shop", [Role.READ, Role.PRODUCE], "shop-"),
    tokens.known(SECRETS["long"], "n" * 64, [Role.READ]),
]


def lines(known: list[tokens.Token] = KNOWN) -> str:
    return "\n".join(token.line() for token in known)


@pytest.fixture(scope="module")
def tokens_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(lines())
    return file


@pytest.fixture(scope="module")
def service_url(tokens_file: Path) -> Iterator[str]:
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS_FILE=str(tokens_file)) as running:
        yield running.url


@pytest.fixture
def api(service_url: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {SECRETS['boss']}"}
    with httpx.Client(base_url=service_url, timeout=30, headers=headers) as client:
        yield client


def sign_in(page: Page, url: str, name: str) -> None:
    page.goto(url)
    page.get_by_label("Token").fill(SECRETS[name])
    page.get_by_role("button", name="Sign in").click()


def test_the_page_shows_nothing_before_signing_in_and_after_signing_out(
    page: Page, api: httpx.Client, service_url: str
) -> None:
    """A wrong token is reported; a session survives a reload, and no script can read its cookie."""
    batch = open_batch(api, key="secret-plan", items=1)
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    expect(page.get_by_text("secret-plan")).to_have_count(0)
    sign_in(page, service_url, "looker")
    expect(live(page)).to_be_visible()
    expect(row(page, batch)).to_contain_text("secret-plan")
    page.reload()
    expect(row(page, batch)).to_contain_text("secret-plan")
    (cookie,) = page.context.cookies()
    assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"]) == ("lastbit", True, "Strict")
    assert SECRETS["looker"] not in cookie["value"]
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Sign out looker").click()
    expect(page.get_by_label("Token")).to_be_focused()
    expect(row(page, batch)).to_have_count(0)
    assert page.context.cookies() == []


def test_the_page_asks_for_the_session_until_the_service_answers(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str]
) -> None:
    """Meanwhile it offers nothing: it doesn't know yet what the session may do."""
    batch = open_batch(api, key="asked-again", items=1)
    sign_in(page, service_url, "looker")
    expect(row(page, batch)).to_be_visible()
    refusal = {"code": "unavailable", "detail": "too many requests are waiting"}
    page.route("**/session", lambda route: route.fulfill(status=503, json=refusal))
    page.goto(f"{service_url}/#/batches/{batch}")
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("too many requests are waiting Trying again")
    expect(page.get_by_role("heading")).to_have_count(0)
    page.unroute("**/session")
    expect(page.locator("[data-panel='events']")).to_contain_text("opened")
    expect(page.get_by_role("button", name="Sign out looker")).to_be_visible()
    expect(page.get_by_role("button", name="Cancel…")).to_be_hidden()
    expect(page.get_by_role("alert")).to_be_hidden()
    assert all("503" in complaint for complaint in complaints)
    complaints.clear()


def test_a_wrong_token_is_reported(page: Page, service_url: str, complaints: list[str]) -> None:
    """And so is a token that may not read; neither leaves a session behind."""
    page.goto(service_url)
    page.get_by_label("Token").fill("lastbit_wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("The token is invalid")
    assert len(complaints) == 1  # the browser's own error about the 401
    complaints.clear()
    page.get_by_label("Token").fill(SECRETS["worker"])
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_have_text("The token worker has the role consume; this page needs read.")
    assert page.context.cookies() == []


def test_actions_without_permission_are_not_offered(page: Page, api: httpx.Client, service_url: str) -> None:
    """A reader can't cancel; a limited session sees its own batches, and the browser reports no errors."""
    own_batch, other = open_batch(api, key="shop-1", items=2), open_batch(api, key="other-1", items=2)
    sign_in(page, service_url, "looker")
    row(page, other).get_by_role("link", name="other-1").click()
    expect(page.locator("[data-panel='events']")).to_contain_text("opened")
    expect(page.get_by_role("button", name="Cancel…")).to_be_hidden()
    page.get_by_role("button", name="Sign out looker").click()
    sign_in(page, service_url, "shop")
    expect(row(page, own_batch)).to_be_visible()
    expect(row(page, other)).to_have_count(0)
    row(page, own_batch).get_by_role("link", name="shop-1").click()
    expect(page.locator("[data-panel='events']")).to_contain_text("opened")
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_label("Type").fill(str(own_batch))
    page.get_by_role("button", name="Cancel the batch").click()
    expect(page.locator("main .title .state")).to_have_text("cancelled")


def test_removing_a_token_ends_its_session(
    page: Page, api: httpx.Client, service_url: str, tokens_file: Path, complaints: list[str]
) -> None:
    """While the page is open: at its next poll it asks for a token."""
    batch = open_batch(api, key="looked-at", items=1)
    sign_in(page, service_url, "looker")
    expect(row(page, batch)).to_be_visible()
    tokens_file.write_text(lines([token for token in KNOWN if token.name != "looker"]))
    try:
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    finally:
        tokens_file.write_text(lines())
    assert all("401" in complaint for complaint in complaints)
    complaints.clear()


def test_a_tab_follows_the_session_of_another(page: Page, api: httpx.Client, service_url: str) -> None:
    """The cookie belongs to both: a tab that goes on showing another token's name and sections would be wrong."""
    batch = open_batch(api, key="two-tabs", items=1)
    sign_in(page, service_url, "boss")
    expect(page.get_by_role("link", name="Tokens")).to_be_visible()
    other_tab = page.context.new_page()
    other_tab.goto(service_url)
    other_tab.get_by_role("button", name="Sign out boss").click()
    expect(page.get_by_label("Token")).to_be_visible()
    sign_in(other_tab, service_url, "looker")
    expect(row(other_tab, batch)).to_be_visible()
    expect(page.get_by_role("button", name="Sign out looker")).to_be_visible()
    expect(row(page, batch)).to_be_visible()
    expect(page.get_by_role("link", name="Tokens")).to_have_count(0)


def test_signing_out_that_fails_is_reported(
    page: Page, api: httpx.Client, service_url: str, complaints: list[str]
) -> None:
    """The session goes on, as only the service can delete its cookie, and the page doesn't claim otherwise."""
    batch = open_batch(api, key="still-in", items=1)
    sign_in(page, service_url, "looker")
    expect(row(page, batch)).to_be_visible()
    page.route("**/session", lambda route: route.abort())
    page.get_by_role("button", name="Sign out looker").click()
    expect(page.get_by_role("dialog")).to_contain_text("You are still signed in")
    page.get_by_role("button", name="Close").click()
    expect(row(page, batch)).to_be_visible()
    page.unroute("**/session")
    page.get_by_role("button", name="Sign out looker").click()
    expect(page.get_by_label("Token")).to_be_visible()
    assert page.context.cookies() == []
    complaints.clear()


def test_another_sites_page_cannot_use_the_session(page: Page, api: httpx.Client, service_url: str) -> None:
    """The browser sends no cookie with another site's request, and names that site."""
    batch = open_batch(api, key="shop-2", items=1)
    sign_in(page, service_url, "boss")
    expect(row(page, batch)).to_be_visible()
    port = service_url.rpartition(":")[2]
    # Another host than 127.0.0.1, and so another site.
    other_page = page.context.new_page()
    other_page.goto(f"http://localhost:{port}/healthz")
    form = f"""() => {{
      const form = document.createElement("form");
      form.method = "POST";
      form.action = "{service_url}/v1/batches/{batch}/cancel";
      document.body.append(form);
      form.submit();
    }}"""
    with other_page.expect_navigation() as navigation:
        other_page.evaluate(form)
    assert navigation.value is not None
    assert navigation.value.status == 403
    assert api.get(f"/v1/batches/{batch}").json()["state"] == "open"


def test_the_apis_pages_work_under_their_policy(page: Page, service_url: str) -> None:
    """They are displayed, a call can be tried with a token, and the browser reports no errors."""
    page.goto(f"{service_url}/docs")
    expect(page.get_by_text("Knows, exactly, when")).to_be_visible()
    page.get_by_role("button", name="Authorize").first.click()
    page.get_by_label("auth-bearer-value").or_(page.locator(".auth-container input")).first.fill(SECRETS["looker"])
    page.locator(".auth-btn-wrapper").get_by_role("button", name="Apply credentials").click()
    page.get_by_role("button", name="Close").first.click()
    page.locator("#operations-batches-list_batches .opblock-summary-control").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table .response .response-col_status").first).to_contain_text("200")


@pytest.mark.parametrize("settings", [PHONE])
def test_on_a_phone_only_a_long_name_is_cut(page: Page, service_url: str) -> None:
    """No scrolling sideways, before and after signing in."""
    overflow = "document.documentElement.scrollWidth - innerWidth"
    page.goto(service_url)
    expect(page.get_by_label("Token")).to_be_visible()
    assert page.evaluate(overflow) <= 0
    sign_in(page, service_url, "long")
    expect(live(page)).to_be_visible()
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    assert page.evaluate(overflow) <= 0


@pytest.mark.parametrize("settings", [{"bypass_csp": True}, {"bypass_csp": True, "color_scheme": "dark"}])
def test_axe_finds_nothing_on_the_sign_in_page(page: Page, service_url: str, settings: dict[str, Any]) -> None:
    """axe is injected into the page, which needs a browser without our policy."""
    page.goto(service_url)
    expect(page.get_by_label("Token")).to_be_visible()
    result = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
    sign_in(page, service_url, "boss")
    expect(live(page)).to_be_visible()
    result = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
