"""One headless Chromium for all tests of the page, a fresh context for each; what the browser complains of fails."""

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
    """Missing: a failure in CI, a skip at home. It is gone after its module: the driver keeps an event loop running in
    this thread, in which no other test could run its own."""
    path = program()
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("chromium is not installed")
    with running_browser(path) as running:
        yield running


@pytest.fixture
def complaints() -> list[str]:
    """Console errors, exceptions and violations of the policy, of all pages of the test. A test that provokes some
    clears them."""
    return []


@pytest.fixture
def settings() -> dict[str, Any]:
    """Of the browser's context; parametrized by tests that ask for a phone, or for dark."""
    return {}


@pytest.fixture
def page(browser: Browser, complaints: list[str], settings: dict[str, Any]) -> Iterator[Page]:
    usual = {"reduced_motion": "reduce", "viewport": {"width": 1180, "height": 860}}
    with browser.new_context(**{**usual, **settings}) as own_batch:
        own_batch.set_default_timeout(20_000)
        connection = own_batch.new_page()

        def heard(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                complaints.append(f"{message.text} at {message.location}")

        connection.on("console", heard)
        connection.on("pageerror", lambda error: complaints.append(str(error)))
        yield connection
        assert complaints == []


@pytest.fixture(scope="module")
def service_url() -> Iterator[str]:
    """Of a service that may send to this machine, tries twice, and hardly waits in between, unless it is asked to."""
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
    """One that is told of what happens to batches, while the test runs."""
    webhook = api.post("/v1/webhooks", json={"url": receiver.url, "types": ["batch.opened", "batch.sealed"]}).json()
    receiver.secrets.append(webhook["secret"])
    yield webhook["id"]
    api.delete(f"/v1/webhooks/{webhook['id']}").raise_for_status()


@pytest.fixture
def api(service_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service_url, timeout=30) as client:
        yield client
