"""One headless Chromium for all tests of the page, a fresh context for each; what the browser complains of fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from tests.page.browser import program, running_browser

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
    with browser.new_context(**{**usual, **settings}) as own:
        own.set_default_timeout(20_000)
        opened = own.new_page()

        def heard(message: ConsoleMessage) -> None:
            # The page asks once for what this release may not have.
            absent = message.location.get("url", "").rpartition("/")[2] in ("explain", "deliveries")
            if message.type in ("error", "warning") and not (absent and "404" in message.text):
                complaints.append(f"{message.text} at {message.location}")

        opened.on("console", heard)
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        yield opened
        assert complaints == []


@pytest.fixture
def api(service_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service_url, timeout=30) as client:
        yield client
