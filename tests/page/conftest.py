"""One headless Chromium for all tests of the page, a fresh context for each; any browser error fails the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from tests.page.browser import program, running_browser
from tests.support.receivers import Receiver
from tests.support.servers import running_service, sqlite_file

expect.set_options(timeout=20_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Without Chromium, tests fail in CI and are skipped elsewhere. It is closed after its module: the driver keeps an
    event loop running in this thread, in which no other test could run its own."""
    path = program()
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("chromium is not installed")
    with running_browser(path) as running:
        yield running


@pytest.fixture
def complaints() -> list[str]:
    """Console errors, exceptions and violations of the policy, on all pages of the test. A test that provokes some
    clears them."""
    return []


@pytest.fixture
def settings() -> dict[str, Any]:
    """Settings of the browser's context; a test that needs a phone or a dark scheme parametrizes them."""
    return {}


@pytest.fixture
def page(browser: Browser, complaints: list[str], settings: dict[str, Any]) -> Iterator[Page]:
    usual = {"reduced_motion": "reduce", "viewport": {"width": 1180, "height": 860}}
    with browser.new_context(**{**usual, **settings}) as context:
        context.set_default_timeout(20_000)
        page_ = context.new_page()

        def heard(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                complaints.append(f"{message.text} at {message.location}")

        page_.on("console", heard)
        page_.on("pageerror", lambda error: complaints.append(str(error)))
        yield page_
        assert complaints == []


@pytest.fixture(scope="module")
def service_url() -> Iterator[str]:
    """The URL of a service that may send to this machine, tries twice, and retries almost at once unless the receiver
    asks for a pause."""
    settings = {
        "LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true",
        "LASTBIT_DISPATCHER_EVERY": "0.05",
        "LASTBIT_WEBHOOKS_TRIES": "2",
        "LASTBIT_WEBHOOKS_FIRST_DELAY": "0.01",
    }
    with sqlite_file() as url, running_service(url, **settings) as running:
        yield running.url


@pytest.fixture
def webhook(api: httpx.Client, receiver: Receiver) -> Iterator[int]:
    """A webhook for batch events that exists while the test runs."""
    webhook = api.post("/v1/webhooks", json={"url": receiver.url, "types": ["batch.opened", "batch.sealed"]}).json()
    receiver.secrets.append(webhook["secret"])
    yield webhook["id"]
    api.delete(f"/v1/webhooks/{webhook['id']}").raise_for_status()


@pytest.fixture
def api(service_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service_url, timeout=30) as client:
        yield client
