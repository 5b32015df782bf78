"""What the user prefers, in a real browser: the theme, how times are shown, and their zone.

What could go wrong: a choice is forgotten, or another tab shows something else; a field of time is read in another zone
than it was drawn in; a time stays in its old form.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.page.test_page import open_batch, panel, row

pytestmark = pytest.mark.xdist_group("page")


def choose(page: Page, **choices: str) -> None:
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog", name="Settings")
    for word in choices.values():
        dialog.get_by_role("radio", name=re.compile(f"^{word}")).check()
    dialog.get_by_role("button", name="Close").click()


LIGHT, DARK = "rgb(251, 250, 247)", "rgb(19, 21, 18)"


def expect_paper(page: Page, colour: str) -> None:
    expect(page.locator("html")).to_have_css("background-color", colour)


@pytest.mark.parametrize("settings", [{"color_scheme": "dark"}], ids=["dark"])
def test_the_theme_is_the_devices_until_one_is_chosen(page: Page, service_url: str) -> None:
    """It is remembered, other tabs follow, and the device's comes back."""
    page.goto(service_url)
    expect_paper(page, DARK)
    page.emulate_media(color_scheme="light")
    expect_paper(page, LIGHT)
    other_tab = page.context.new_page()
    other_tab.goto(service_url)
    choose(page, theme="dark")
    expect_paper(page, DARK)
    expect_paper(other_tab, DARK)
    page.reload()
    expect_paper(page, DARK)
    choose(page, theme="as the device")
    expect_paper(page, LIGHT)


@pytest.mark.parametrize("settings", [{"timezone_id": "Asia/Kolkata"}], ids=["UTC+05:30"])
def test_times_have_one_form_in_the_chosen_zone(page: Page, api: httpx.Client, service_url: str) -> None:
    """In rows, in the service's sentences and in fields. An age has the date as its title, or the other way round."""
    batch = open_batch(api, key="timed", items=1, deadline=(datetime.now(UTC) + timedelta(hours=2)).isoformat())
    opened = datetime.fromisoformat(api.get(f"/v1/batches/{batch}").json()["created_at"])
    in_utc = f"{opened:%Y-%m-%d %H:%M:%S} UTC"
    in_india = f"{opened + timedelta(hours=5.5):%Y-%m-%d %H:%M:%S}"
    page.goto(f"{service_url}/#/?key=timed&opened_after=2026-05-04T17:30:00Z")
    time, field = row(page, batch).locator(".opened time"), page.get_by_label("Opened from")
    expect(time).to_have_attribute("title", f"{in_india} +05:30")
    expect(time).to_have_text(re.compile("just now|s ago"))
    expect(field).to_have_value("2026-05-04T23:00")
    choose(page, times="dates")
    expect(time).to_have_text(in_india)
    expect(time).to_have_attribute("title", re.compile("just now|s ago"))
    choose(page, zone="UTC")
    expect(time).to_have_text(in_utc)
    expect(field).to_have_value("2026-05-04T17:30")
    field.fill("2026-05-04T18:00")
    expect(page).to_have_url(re.compile(r"opened_after=2026-05-04T18%3A00%3A00Z"))
    page.goto(f"{service_url}/#/batches/{batch}")
    expect(page.locator(".about")).to_contain_text(f"opened {in_utc}")
    expect(panel(page, "why")).to_contain_text(" UTC")
    choose(page, zone="local")
    expect(panel(page, "why")).to_contain_text(f"deadline is {opened + timedelta(hours=7.5):%Y-%m-%d %H:}")
    expect(panel(page, "why")).not_to_contain_text("UTC")
