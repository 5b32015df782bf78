"""`python -m tests.page.screenshots`: take the pictures of docs/page.md again, from a service with invented batches."""

from __future__ import annotations

import argparse
import base64
import contextlib
import random
import sqlite3
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, expect

from lastbit import tokens
from tests.page.browser import program, running_browser
from tests.support.servers import ROOT, running_service, sqlite_file

FOLDER = ROOT / "docs/images"
REASONS = (
    "HTTP 502 from the image renderer after 5 attempts",
    "no answer from the price service within 30 s",
    "source file is truncated",
)
DESKTOP = {"width": 1180, "height": 860}
PHONE = {"width": 360, "height": 760}


def open_batch(api: httpx.Client, **body: Any) -> int:
    answer = api.post("/v1/batches", json=body)
    answer.raise_for_status()
    result: int = answer.json()["id"]
    return result


def pending(api: httpx.Client, batch: int) -> int:
    result: int = api.get(f"/v1/batches/{batch}").json()["pending"]
    return result


def resolve(
    api: httpx.Client, batch: int, dice: random.Random, shares: list[float], failed_count: set[int], size: int
) -> None:
    """Ack a random share of each group, and fail three items in each group of `failed_count`, each for one of the
    reasons."""
    for first in range(0, len(shares), 64):
        acks: list[dict[str, Any]] = []
        failures: list[dict[str, Any]] = []
        for group, share in enumerate(shares[first : first + 64], first):
            acked = bytearray(b"\xff" * (size // 8)) if share >= 1 else bytearray(size // 8)
            failed = bytearray(size // 8)
            for index in dice.sample(range(size), int(size * share)) if 0 < share < 1 else []:
                acked[index // 8] |= 1 << (index % 8)
            if group in failed_count:
                for index in dice.sample(range(size), 3):
                    failed[index // 8] |= 1 << (index % 8)
            acked = bytearray(byte & ~lost_byte for byte, lost_byte in zip(acked, failed, strict=True))
            place = {"batch": batch, "group": group}
            acks.append({**place, "bits": base64.b64encode(acked).decode()})
            if any(failed):
                failures.append({**place, "bits": base64.b64encode(failed).decode()})
        for failed_group in failures:
            body = {"groups": [failed_group], "reason": REASONS[sorted(failed_count).index(failed_group["group"]) % 3]}
            api.post("/v1/failures", json=body).raise_for_status()
        api.post("/v1/acks", json={"groups": acks}).raise_for_status()


def create_batches(api: httpx.Client) -> int:
    """Create some batches; return the one to show."""
    dice = random.Random(11)

    def small(key: str, items: int, share: float, failed_count: int = 0, **extra: Any) -> int:
        batch = open_batch(api, key=key, items=items, **extra)
        ids = [f"{batch}:{number // 8192}:{number % 8192}" for number in range(items)]
        acked_ids = ids[: int(items * share)]
        for start in range(0, len(acked_ids), 8000):
            api.post(
                "/v1/acks", json={"items": acked_ids[failed_count if start == 0 else start : start + 8000]}
            ).raise_for_status()
        if failed_count:
            api.post(
                "/v1/failures", json={"items": ids[:failed_count], "reason": "source file is truncated"}
            ).raise_for_status()
        return batch

    small("invoices-2026-04", 4210, 1, sealed=True, labels={"team": "billing", "run": "monthly"})
    small("thumbnails-backfill", 60000, 0.31, labels={"team": "media"})
    cancelled_batch = small("search-index-v8", 12000, 0.42, sealed=True, labels={"team": "search"})
    api.post(f"/v1/batches/{cancelled_batch}/cancel").raise_for_status()
    small("catalog-41", 18400, 1, failed_count=3, sealed=True, labels={"team": "search", "shop": "de"})
    small("newsletter-may", 25000, 1, sealed=True, labels={"team": "crm"})
    size, groups = 8192, 184
    deadline = (datetime.now(UTC) + timedelta(hours=7, minutes=30)).isoformat()
    labels = {"team": "search", "shop": "fr"}
    shown_batch = open_batch(api, key="catalog-42", items=size * groups - 3000, labels=labels, deadline=deadline)
    shares = [1.0 if group < 92 else max(0.0, min(1.0, 1.15 - (group - 92) / 70)) for group in range(groups - 1)]
    shares = [share if share in (0.0, 1.0) else min(1.0, share + dice.uniform(-0.12, 0.12)) for share in shares]
    shares = [max(0.0, share) for share in shares]
    shares[37], shares[61] = 0.9985, 0.9991
    shares[74] = shares[90] = 0.9991
    resolve(api, shown_batch, dice, shares, {61, 74, 90, 120, 147}, size)
    api.post(f"/v1/batches/{shown_batch}/seal").raise_for_status()
    small("translations-pt", 900, 0.12, labels={"team": "content", "language": "pt"})
    return shown_batch


PROCESS = "ship-order"
TRACEBACK = """Traceback (most recent call last):
  File "shop/shipping.py", line 41, in ship_order
    parcel = parcels[event.data["parcel"]]
KeyError: 'XXL'"""


def create_process(api: httpx.Client) -> str:
    """Create a process with a parked event; return the name of its instance."""
    api.put(f"/v1/processes/{PROCESS}", json={"partitions": 1}).raise_for_status()
    sync_result = api.post(f"/v1/consumer-groups/process.{PROCESS}/sync", json={"worker": "w1", "session": "s1"}).json()
    fence = {"worker": "w1", "epoch": sync_result["assigned"][0]["epoch"]}

    def handled(instance: str, version: int, type: str, data: dict[str, Any], **outcome: Any) -> None:
        id = f"{instance}-{type}"
        event = {"id": id, "type": type, "key": instance, "data": data}
        position = api.post("/v1/events", json={"events": [event]}).json()["events"][0]["position"]
        body = {"version": version, "event": {"id": id, "position": position}, "fence": fence, **outcome}
        api.post(f"/v1/processes/{PROCESS}/{instance}/handle", json=body).raise_for_status()

    for number in range(1040, 1047):
        order = f"order-{number}"
        state = {"address": None, "paid": True, "parcel": None}
        timers = [{"timer": "payment-reminder", "after": 3600 * 24}]
        handled(order, 0, "payment.captured", {"cents": 4999}, state=state, timers=timers)
        if number % 3 == 0:
            continue
        addressed = {**state, "address": "12 Harbour Street"}
        handled(order, 1, "address.confirmed", {}, state=addressed)
        if number == 1045:
            handled(order, 2, "parcel.packed", {"parcel": "XXL"}, error=TRACEBACK)
        else:
            ship = {"step": "ship", "type": "ship", "data": {"parcel": "M"}}
            handled(order, 2, "parcel.packed", {"parcel": "M"}, state=addressed, commands=[ship], finish=True)
    return "order-1045"


def move_back(database: str) -> None:
    """Move all times back, as otherwise all batches would be from just now."""

    def earlier(column: str, minutes: int, batch: str) -> str:
        ago = f"printf('-%d minutes', {minutes} * (9 - {batch}) * (9 - {batch}))"
        return f"{column} = strftime('%Y-%m-%d %H:%M:%f', {column}, {ago})"

    moments = {"created_at": ("opened", 9), "sealed_at": ("sealed", 4), "ended_at": ("completed", 1)}
    with contextlib.closing(sqlite3.connect(database.removeprefix("sqlite:///"))) as file, file:
        for column, (event, minutes) in moments.items():
            file.execute(f"UPDATE batches SET {earlier(column, minutes, 'id')}")
            position = earlier("appended_at", minutes, "batch_id")
            file.execute(f"UPDATE feed SET {position} WHERE type = 'batch.{event}'")
        file.execute("UPDATE batches SET updated_at = ended_at WHERE ended_at IS NOT NULL")


def shoot(page: Page, name: str, folder: Path, *, full_text: bool = False) -> None:
    page.screenshot(path=folder / f"{name}.png", full_page=full_text, animations="disabled", caret="hide")


def take(browser: Browser, url: str, api: httpx.Client, batch: int, parked: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for scheme, suffix in (("light", ""), ("dark", "-dark")):
        with browser.new_context(viewport=DESKTOP, color_scheme=scheme, reduced_motion="reduce") as context:
            page = context.new_page()
            page.goto(f"{url}/#/")
            expect(page.locator(".batch")).to_have_count(7)
            expect(page.locator("#live")).to_have_text("live")
            shoot(page, f"list{suffix}", folder)
            page.goto(f"{url}/#/batches/{batch}")
            expect(page.locator(".tile")).to_have_count(184)
            expect(page.locator(".events li")).to_have_count(2)
            # So that the page can show a rate.
            moved = {"batch": batch, "group": 180 if scheme == "light" else 181, "bits": "/" * 136}
            api.post("/v1/acks", json={"groups": [moved]}).raise_for_status()
            expect(page.locator(".big .words")).to_contain_text("left")
            expect(page.locator("[data-panel='why']")).to_contain_text(f"{pending(api, batch):,} of")
            shoot(page, f"batch{suffix}", folder, full_text=True)
            if scheme == "light":
                page.locator(".tile").nth(61).click()
                field = page.get_by_role("slider", name="Item")
                expect(field).to_be_focused()
                page.locator(".picture").screenshot(path=folder / "group.png", animations="disabled")
                page.get_by_role("button", name="Cancel…").click()
                shoot(page, "cancel", folder)
                page.get_by_role("button", name="Keep it").click()
                page.locator("[data-panel='reasons']").get_by_role("button", name="Send again…").first.click()
                page.get_by_label("Note").fill("the renderer is back")
                shoot(page, "redrive", folder)
                page.get_by_role("button", name="Leave them").click()
                page.get_by_role("button", name="Edit…").click()
                page.get_by_label("Tolerated percentage").fill("5")
                page.get_by_role("button", name="Add a label").click()
                page.get_by_label("Name of the new label").fill("run")
                page.get_by_label("Value of the new label").fill("2")
                shoot(page, "edit", folder)
    with browser.new_context(viewport=DESKTOP, reduced_motion="reduce") as context:
        page = context.new_page()
        page.goto(f"{url}/#/processes/{PROCESS}")
        expect(page.locator("[data-instance]")).to_have_count(7)
        page.goto(f"{url}/#/processes/{PROCESS}/{parked}")
        expect(page.locator("[data-event]")).to_have_count(3)
        shoot(page, "instance", folder, full_text=True)
    with browser.new_context(viewport=PHONE, device_scale_factor=2, reduced_motion="reduce", has_touch=True) as context:
        page = context.new_page()
        page.goto(f"{url}/#/")
        expect(page.locator(".batch")).to_have_count(7)
        shoot(page, "phone-list", folder)
        page.goto(f"{url}/#/batches/{batch}")
        expect(page.locator(".tile")).to_have_count(184)
        expect(page.locator(".big")).to_be_visible()
        shoot(page, "phone-batch", folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=FOLDER)
    folder: Path = parser.parse_args().into
    path = program()
    if path is None:
        print("chromium is not installed", file=sys.stderr)
        return 1
    with (
        sqlite_file() as database,
        running_service(database) as service,
        running_browser(path) as browser,
        httpx.Client(base_url=service.url, timeout=60) as api,
    ):
        batch = create_batches(api)
        move_back(database)
        take(browser, service.url, api, batch, create_process(api), folder)
    with (
        sqlite_file() as database,
        running_service(
            database, LASTBIT_TOKENS=tokens.known(tokens.new(), "viewer", [tokens.Role.READ]).line()
        ) as service,
        running_browser(path) as browser,
        browser.new_context(viewport={"width": 1180, "height": 420}) as context,
    ):
        page = context.new_page()
        page.goto(service.url)
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        shoot(page, "sign-in", folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
