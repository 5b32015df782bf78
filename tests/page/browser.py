"""Headless Chromium, from the system's packages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    """The path of Chromium; the variable `CHROMIUM` can name another one."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def running_browser(path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # A container has no user namespaces for the sandbox, and a small /dev/shm.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--font-render-hinting=none"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
