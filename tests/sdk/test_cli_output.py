"""The output of the command line: unchanged user data, errors as JSON, confirmations, help."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import click
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lastbit import Client, chains
from lastbit.cli import cli
from lastbit.cli.by_reason import ByReason
from lastbit.cli.output import encoded, plain_text, safe, styled
from lastbit.cli.rendering import pace
from lastbit.models import FailedRange, HistoryPoint
from tests.sdk.conftest import Reply, ScriptedService, Seen
from tests.sdk.terminals import on_terminal
from tests.sdk.test_cli import Lastbit
from tests.support.servers import ROOT

HOSTILE = "job:fire:1 [red]x[/] \x1b[2J\x07 \u202e \x9b1m end\\"
SHOWN = r"job:fire:1 [red]x[/] \x1b[2J\x07 \u202e \x9b1m end" + "\\"
"""How `HOSTILE` is printed."""


@pytest.fixture
def lastbit(service_url: str) -> Lastbit:
    return Lastbit(service_url)


@pytest.fixture
def client(service_url: str) -> Iterator[Client]:
    with Client(service_url) as made:
        yield made


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([(0, 0), (40, 40)], "█" * 40 + "  40 s, at most 1/s"),
        ([(0, 0), (10, 100), (30, 100), (40, 200)], "█" * 10 + "▁" * 20 + "█" * 10 + "  40 s, at most 10/s"),
        # One item in an hour is seen.
        ([(0, 0), (90, 1000), (3599, 1000), (3600, 1001)], "█" + "▁" * 38 + "▂  1 h, at most 11/s"),
        ([(0, 0), (4000, 4)], "█" * 40 + "  1 h 6 min"),
        ([(0, 0), (0, 7)], "█" * 40 + "  0 s"),
        # A repair may find fewer.
        ([(0, 0), (20, 20), (40, 10)], "█" * 20 + "▁" * 20 + "  40 s, at most 1/s"),
    ],
)
def test_a_pace_has_a_bar_for_each_part_of_the_time(line: list[tuple[int, int]], expected: str) -> None:
    start = datetime(2026, 5, 4, tzinfo=UTC)
    points = [HistoryPoint(start + timedelta(seconds=seconds), resolved, 0) for seconds, resolved in line]
    assert pace(points) == expected


# User data


@given(st.text(alphabet="\\[]/abold:=1 \ufdd0\ufdd1", max_size=12))
def test_markup_in_user_texts_is_plain_text(text: str) -> None:
    """Between and after markup of the command's own, too."""
    line = styled(f"[bold]a[/]{safe(text)}[dim]b[/]{safe(text)}")
    plain = plain_text(text)
    assert line.plain == f"a{plain}b{plain}"
    assert [(span.start, span.end) for span in line.spans] == [(0, 1), (1 + len(plain), 2 + len(plain))]


@given(st.text(max_size=40))
def test_json_has_no_control_characters(text: str) -> None:
    """And it decodes to the same text."""
    document = encoded({text: text})
    assert document == plain_text(document)
    assert json.loads(document) == {text: text}


def test_the_list_leaves_out_the_tasks_of_endings(lastbit: Lastbit, client: Client) -> None:
    batch = client.open(key="ending", labels={"team": "search", "lastbit.on_complete": '{"task": "report"}'})
    listed = lastbit.ok("list", "--key", "ending")
    assert "team:search" in listed
    assert "on_complete" not in listed
    assert 'lastbit.on_complete:{"task": "report"}' in lastbit.ok("status", str(batch.id))


def test_user_data_is_printed_unchanged_by_every_command(lastbit: Lastbit, client: Client) -> None:
    """No emoji, no markup, no control characters, and a backslash at the end stays one; nothing is shortened in a
    pipe."""
    long_value = "v" * 500
    batch = client.open(key=HOSTILE, labels={"l\x1b[2J": HOSTILE + long_value}, items=2, sealed=True)
    number = str(batch.id)
    client.fail(batch.ids[:1], f"{HOSTILE}\n\tsecond line\\")
    client.append_event(id=uuid.uuid4().hex, type="step", key=HOSTILE, data={"x": HOSTILE})
    client.tally("hostile").apply([(HOSTILE, 1, chains.Source(HOSTILE, 0, 1, 0, 0))])
    for command in (
        ["status", number],
        ["list", "--key", HOSTILE],
        ["events", "--last", "2"],
        ["pending", number, "--failed"],
        ["tally", "value", "hostile", HOSTILE],
        ["tally", "list", "hostile"],
        ["seal", HOSTILE],
    ):
        result = lastbit(*command)
        assert SHOWN in result.stdout, command
        assert result.stdout == plain_text(result.stdout, keep="\n\t"), command
        text = lastbit(*command, "--json").stdout
        assert text == plain_text(text, keep="\n"), command
    assert f"{SHOWN}\n\tsecond line\\\n" in lastbit.ok("pending", number, "--failed")
    assert f"l\\x1b[2J:{SHOWN}{long_value}\n" in lastbit.ok("status", number)
    assert lastbit.json("status", number)["key"] == HOSTILE
    screen = on_terminal(lastbit.url, ["status", number])
    assert SHOWN in screen.text
    assert "\x1b[2J" not in screen.raw
    missing = lastbit("status", f"no {HOSTILE}")
    assert missing.stderr == plain_text(missing.stderr, keep="\n")


# Listing


def test_a_list_continues_at_its_cursor(lastbit: Lastbit, client: Client) -> None:
    """Each batch once, even if the client applies the filter; `next` is null on the last page."""
    key = uuid.uuid4().hex
    batches = [client.open(key=key, items=2) for _ in range(7)]
    for batch in batches[::2]:
        client.fail(batch.ids[0])
    newest, failed = [batch.id for batch in batches[::-1]], [batch.id for batch in batches[::-2]]
    for options, expected in (
        (["--limit", "3"], newest),
        (["--limit", "7"], newest),
        (["--limit", "3", "--failed"], failed),
        (["--limit", "4", "--failed"], failed),
        (["--limit", "2", "--since", "1h"], newest),
    ):
        listed_ids: list[int] = []
        cursor: list[str] = []
        limit = int(options[1])
        while True:
            page = lastbit.json("list", "--key", key, *options, *cursor)
            listed_ids += [batch["id"] for batch in page["batches"]]
            assert page["more"] == (page["next"] is not None)
            if page["next"] is None:
                break
            assert len(page["batches"]) == limit
            cursor = ["--cursor", page["next"]]
        assert listed_ids == expected, options
        assert len(page["batches"]) == (len(expected) % limit or limit), options
    assert "--cursor " in lastbit.ok("list", "--key", key, "--limit", "3")
    assert lastbit("list", "--cursor", "nonsense").returncode == 2


def test_a_list_is_narrowed_by_time_and_failures_and_sorted(lastbit: Lastbit, client: Client) -> None:
    """A time is a duration before now or a moment in UTC."""
    key = uuid.uuid4().hex
    batches = [client.open(key=key, items=items) for items in (3, 10, 5)]
    client.fail(batches[0].ids[:1])
    client.fail(batches[2].ids[:3])
    small, large, middle = [batch.id for batch in batches]

    def listed(*options: str) -> list[int]:
        return [batch["id"] for batch in lastbit.json("list", "--key", key, *options)["batches"]]

    moment = client.batch(large).refresh().created_at
    assert listed("--since", moment.isoformat()) == [middle, large]
    assert listed("--until", moment.isoformat()) == [small]
    assert listed("--since", moment.replace(tzinfo=None).isoformat()) == [middle, large]
    assert listed("--since", "1h") == [middle, large, small]
    assert listed("--until", "1h") == []
    assert listed("--since", "2020-01-01", "--until", "2020-01-02") == []
    assert listed("--failed") == [middle, small]
    assert listed("--sort", "failed") == [middle, small, large]
    assert listed("--sort", "items", "--limit", "2") == [large, middle]
    assert listed("--sort", "items", "--reverse") == [small, middle, large]
    assert listed("--sort", "progress") == [large, small, middle]
    assert listed("--reverse") == [small, large, middle]
    assert lastbit.json("list", "--key", key, "--sort", "items", "--limit", "2")["more"] is True
    assert listed("--since", moment.isoformat(), "--failed") == [middle]
    text = lastbit.ok("list", "--key", key, "--failed", "--sort", "items")
    assert [line.split()[0] for line in text.splitlines() if key in line] == [str(middle), str(small)]


def test_a_list_and_counts_are_filtered_by_the_service(lastbit: Lastbit, client: Client) -> None:
    """By the beginning of the key, the outcome and the parent."""
    prefix = uuid.uuid4().hex
    parent = client.open(key=f"{prefix}-parent", items=2)
    child = client.open(key=f"{prefix}-child", items=1, sealed=True, parent=parent.ids[1])
    client.open(key=f"x{prefix}")
    client.fail(child.ids)

    def listed(*options: str) -> list[int]:
        return [batch["id"] for batch in lastbit.json("list", *options)["batches"]]

    assert listed("--key-prefix", prefix) == [child.id, parent.id]
    assert listed("--key-prefix", prefix, "--outcome", "failed") == [child.id]
    assert listed("--key-prefix", prefix, "--outcome", "succeeded") == []
    assert listed("--parent", str(parent.id)) == [child.id]
    assert listed("--parent", str(parent.ids[0])) == []
    states = {"open": 1, "sealed": 0, "complete": 1, "expired": 0, "cancelled": 0}
    assert lastbit.json("counts", "--key-prefix", prefix) == {"states": states, "total": 2, "exact": True}
    text = lastbit.ok("counts", "--key-prefix", prefix)
    assert dict(line.split() for line in text.splitlines()) == {name: str(n) for name, n in states.items()} | {
        "total": "2"
    }
    assert lastbit.json("counts", "--parent", str(parent.ids[1]))["total"] == 1
    assert lastbit.json("counts", "--key-prefix", prefix, "--until", "1h")["total"] == 0
    contradiction = lastbit("list", "--outcome", "failed", "--state", "open")
    assert "--outcome: " in contradiction.stderr


def test_inexact_counts_say_so(scripted_service: ScriptedService) -> None:
    """A service with more batches than it counts in one call answers so."""
    counted = {"states": {"open": 1500, "sealed": 0}, "total": 1500, "exact": False}
    scripted_service.replies((200, {}, counted))
    assert Lastbit(scripted_service.url).json("counts") == counted
    lines = Lastbit(scripted_service.url).ok("counts").splitlines()
    assert [line.split() for line in lines[:3]] == [["open", "1,500"], ["sealed", "0"], ["total", "1,500"]]
    assert lines[3:] == ["There are more batches: the service did not count all of them."]


@pytest.mark.parametrize("name", ["events", "commands"])
def test_rare_entries_of_the_feed_are_found_page_by_page(scripted_service: ScriptedService, name: str) -> None:
    """A page with a filter may be empty before the feed's end."""
    entry = {"id": "e", "type": "t", "batch": None, "key": None, "data": None, "at": "2026-01-02T03:04:05Z"}
    of_process = {"process": "p", "instance": "i", "step": "s"} if name == "commands" else {}

    def reply(request: Seen) -> Reply:
        after = int(dict(parse_qsl(urlsplit(request.path).query)).get("after", 0))
        entries = [{**entry, **of_process, "position": after + 1}] if after in (40, 60) else []
        return 200, {}, {name: entries, "next": after + 20, "last": 100}

    scripted_service.reply = reply

    def listed(*options: str) -> tuple[list[int], int, list[str]]:
        scripted_service.seen.clear()
        document = Lastbit(scripted_service.url).json(name, "--type", "t", *options)
        queries = [dict(parse_qsl(urlsplit(request.path).query)) for request in scripted_service.seen]
        limits = [query["limit"] for query in queries]
        return [entry["position"] for entry in document[name]], document["next"], limits

    assert listed() == ([41, 61], 100, ["50", "50", "50", "49", "48"])
    assert listed("--limit", "1") == ([41], 60, ["1", "1", "1"])


# Failed items


def test_failed_items_are_grouped_by_reason(lastbit: Lastbit, client: Client) -> None:
    """The most frequent first; neighbours are one range; the JSON has the ranges too."""
    batch = client.open(items=300, group_size=64)
    number = batch.id
    client.fail(batch.ids[10:12], "timed out")
    client.fail(batch.ids[12:13])
    client.fail(batch.ids[100:250:2], "Traceback:\n  no such file: C:\\")
    client.fail(batch.ids[13:14], "timed out")
    client.fail(batch.ids[63:65], "at a border")
    text = lastbit.ok("pending", str(number), "--failed")
    assert text.splitlines() == [
        "75 items  Traceback:",
        "  no such file: C:\\",
        *(f"  {item}" for item in batch.ids[100:120:2]),
        f"  and 65 more ranges: lastbit pending {number} --failed --ids",
        "3 items  timed out",
        f"  {number}:0:10 … {number}:0:11",
        f"  {number}:0:13",
        "2 items  at a border",
        f"  {number}:0:63 … {number}:1:0",
        "1 item  no reason given",
        f"  {number}:0:12",
        "81 items failed, for 4 reasons",
    ]
    document = lastbit.json("pending", str(number), "--failed")
    assert document["reasons"] == [
        {"reason": "Traceback:\n  no such file: C:\\", "count": 75},
        {"reason": "timed out", "count": 3},
        {"reason": "at a border", "count": 2},
        {"reason": None, "count": 1},
    ]
    assert document["others"] == 0
    assert sum(span["end"] - span["start"] for span in document["ranges"]) == 81
    assert document["ranges"][0]["reasons"][f"{number}:0:13"] == "timed out"
    limited = lastbit.ok("pending", str(number), "--failed", "--limit", "1").splitlines()
    assert limited[-2:] == ["4 items failed, for 2 reasons", "There are more; --limit shows more of them."]
    assert "There are more" not in lastbit.ok("pending", str(number), "--failed", "--limit", "77")
    assert lastbit.ok("pending", str(client.open(items=1).id), "--failed") == "nothing failed\n"


def test_skipped_items_are_listed_like_failed_ones(lastbit: Lastbit, client: Client) -> None:
    """Failed items are not listed with them."""
    batch = client.open(items=200, group_size=64)
    number = str(batch.id)
    client.skip(batch.ids[60:70], "the customer has left")
    client.skip(batch.ids[80:82])
    client.fail(batch.ids[70:72], "timed out")
    assert lastbit.ok("pending", number, "--skipped").splitlines() == [
        "10 items  the customer has left",
        f"  {number}:0:60 … {number}:1:5",
        "2 items  no reason given",
        f"  {number}:1:16 … {number}:1:17",
        "12 items skipped, for 2 reasons",
    ]
    document = lastbit.json("pending", number, "--skipped")
    assert document["reasons"] == [{"reason": "the customer has left", "count": 10}, {"reason": None, "count": 2}]
    assert [(span["start"], span["end"]) for span in document["ranges"]] == [(60, 70), (80, 82)]
    assert lastbit.ok("pending", number, "--skipped", "--ids", "--limit", "2").split() == list(batch.ids[60:62])
    assert lastbit.ok("pending", str(client.open(items=1).id), "--skipped") == "nothing skipped\n"
    answer = lastbit("pending", number, "--skipped", "--failed")
    assert (answer.returncode, "--failed and --skipped exclude each other" in answer.stderr) == (2, True)


def test_a_thousand_reasons_are_counted_separately() -> None:
    """Above a thousand, only the number of other reasons is kept."""
    reasons = {f"7:0:{index}": f"reason {index}" for index in range(1100)}
    groups = ByReason(7, "failed")
    groups.add(FailedRange(0, 1100, "7:0:0", "7:0:1099", reasons))
    groups.add(FailedRange(1200, 1202, "7:0:1200", "7:0:1201", {"7:0:1200": "reason 7", "7:0:1201": "reason 1050"}))
    lines = list(groups.lines())
    assert lines[:3] == ["[bold]2 items[/]  [red]reason 7[/]", "  7:0:7", "  7:0:1200"]
    assert lines[-2:] == [
        "[bold]101 items[/]  [dim]for other reasons: lastbit pending 7 --failed --ids[/]",
        "1,102 items failed, for more than 1,000 reasons",
    ]
    summary = groups.summary()
    assert (len(summary["reasons"]), summary["others"]) == (1000, 101)


# Consumer groups


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_group_never_cuts_numbers(scripted_service: ScriptedService, width: int) -> None:
    """The names of workers are shortened first, then less important columns are dropped."""
    time = "2026-01-02T03:04:05Z"
    worker = {"worker": "w" * 40, "live": True, "capacity": None, "started_at": time, "last_seen": time}
    worker |= {"lease_until": time, "partitions": 64, "releasing": 0}
    position = {"owner": "w" * 40, "epoch": 1_234_567, "since": time, "release_by": None, "floor": 8_765_432_109}
    position |= {"high": 9_876_543_210, "outstanding": 45_678, "head": 9_876_543_210, "lag": 1_111_111_101}
    position |= {"token": None, "updated_at": time}
    positions = [{**position, "partition": partition} for partition in range(0, 128, 2)]
    group = {
        "name": "orders",
        "partitions": 128,
        "partition_of": "crc32",
        "ttl": 10.0,
        "release": 30.0,
        "created_at": time,
    }
    group |= {"workers": [worker], "positions": positions}
    scripted_service.replies((200, {}, group))
    uncut = {"64", "1,234,567", "8,765,432,109", "45,678", "1,111,111,101", "71,111,110,464"}
    for option, first, lag in ((["--partitions"], "126", "1,111,111,101"), ([], "w", "71,111,110,464")):
        screen = on_terminal(scripted_service.url, ["groups", "show", "orders", *option], width=width)
        assert screen.code == 0, screen.text
        lines = screen.text.rstrip().splitlines()[1:]
        assert max(map(len, lines)) <= width
        assert lag in lines[-1]
        assert lines[-1].split()[0].startswith(first)
        assert set(re.findall(r"\d[\d,]+,\d+|\b64\b", lines[-1])) <= uncut, lines[-1]
        assert "w" * 40 in lines[-1] or width < 200


# Confirmations


@pytest.mark.parametrize("command", ["cancel", "delete"])
def test_a_terminal_asks_before_it_ends_a_batch(lastbit: Lastbit, client: Client, command: str) -> None:
    """With the batch's key and counts; no is the default and changes nothing. A script gets no question."""
    batch = client.open(key=f"unwanted :fire: {command}", items=4)
    client.ack(batch.ids[:1])
    client.fail(batch.ids[1:3], "broken")
    number = str(batch.id)
    screen = on_terminal(lastbit.url, [command, number], typed="\n")
    counts = "(open, 4 items, 1 acked, 2 failed, 1 pending)?"
    assert f"batch {number} unwanted :fire: {command} {counts}" in screen.text
    assert (screen.code, "nothing was changed" in screen.text) == (1, True)
    screen = on_terminal(lastbit.url, [command, number], typed="\x04")  # the end of the input
    assert (screen.code, "nothing was changed" in screen.text) == (1, True)
    assert batch.refresh().state == "open"
    assert on_terminal(lastbit.url, [command, number], typed="y\n").code == 0
    assert lastbit("seal", number).returncode == 1
    other = str(client.open(items=1).id)
    screen = on_terminal(lastbit.url, [command, other, "--yes"])
    assert (screen.code, "[y/N]" in screen.text) == (0, False)
    lastbit.ok(command, str(client.open(items=1).id))


def test_a_terminal_asks_before_other_deletions(lastbit: Lastbit, client: Client) -> None:
    """A tally, a consumer group and a webhook; a script gets no question."""
    client.tally("asked").apply([("k", 1, chains.Source("t", 0, 1, 0, 0))])
    client.groups.create("asked", partitions=1)
    webhook = str(client.webhooks.create("https://1.1.1.1/", types=["never"]).id)
    for kind, name in (("tally", "asked"), ("groups", "asked"), ("webhooks", webhook)):
        screen = on_terminal(lastbit.url, [kind, "delete", name], typed="n\n")
        assert (screen.code, "nothing was changed" in screen.text) == (1, True), kind
        lastbit.ok(kind, "delete", name)
    webhook = str(client.webhooks.create("https://1.1.1.1/", types=["never"]).id)
    screen = on_terminal(lastbit.url, ["webhooks", "rotate-secret", webhook], typed="n\n")
    assert f"Give webhook {webhook} a new secret? [y/N]" in screen.text
    assert "whsec_" not in screen.text
    screen = on_terminal(lastbit.url, ["processes", "delete", "asked"], typed="n\n")
    assert "Delete the process asked with its instances? [y/N]" in screen.text
    assert "[y/N]" not in on_terminal(lastbit.url, ["processes", "delete", "asked", "--yes"]).text


# Errors as JSON


def test_errors_are_json_for_a_script(lastbit: Lastbit, client: Client, unused_port: int) -> None:
    """One document on standard error, nothing on standard output, and the same exit codes, wherever `--json` is
    placed."""

    def problem(*arguments: str, code: int, stdin: str = "", url: str = lastbit.url) -> Any:
        result = Lastbit(url)(*arguments, "--json", stdin=stdin)
        assert (result.returncode, result.stdout) == (code, "")
        return json.loads(result.stderr)

    assert problem("status", "999999", code=1) == {
        "error": "BatchNotFound",
        "message": "there is no batch 999999 (404 batch_not_found)",
        "status": 404,
        "code": "batch_not_found",
        "errors": [],
    }
    assert problem("status", "no such key", code=1)["error"] == "UnknownKey"
    for wrong in (
        ["status"],
        ["status", "07"],
        ["frobnicate"],
        ["list", "--frobnicate"],
        ["list", "--limit", "0"],
        ["--frobnicate"],
        ["tally", "apply", "t", "k"],
        ["webhooks"],
        [],
    ):
        assert problem(*wrong, code=2)["error"] == "WrongUse", wrong
    assert problem("frobnicate", code=2)["message"] == "No such command 'frobnicate'."
    assert "'--offset'" in problem("tally", "apply", "t", "k", "1", "--topic", "t", code=2)["message"]
    for option_first in (["--json", "status", "07"], ["--json", "webhooks"]):
        result = lastbit(*option_first)
        assert (result.returncode, json.loads(result.stderr)["error"]) == (2, "WrongUse")
    assert "not a batch id" in problem("status", "07", code=2)["message"]
    assert problem("ack", "7:0", code=2)["error"] == "MalformedItem"
    assert problem("tally", "list", "no-such-tally", code=1) == {
        "error": "UnknownTally",
        "message": "there is no tally 'no-such-tally': nothing was added to it, or it was deleted",
    }
    timeout = problem("watch", str(client.open(items=1).id), "--timeout", "0", code=3)
    assert (timeout["error"], timeout["batch"]["state"]) == ("WaitTimeout", "open")
    assert problem("open", "--items", "1", "--label", f"a:{'x' * 2000}", code=2)["errors"]
    batch = client.open(items=10_000)
    partial = problem("ack", code=2, stdin="\n".join([*batch.ids, "7:0"]))
    assert (partial["error"], partial["partial"]["applied"]) == ("MalformedLine", 10_000)
    url = f"http://127.0.0.1:{unused_port}"
    unreachable = problem("tally", "list", "t", code=1, url=url)
    assert unreachable["error"] == "ServiceUnreachable"
    assert "set another address with --url, --profile or LASTBIT_URL." in unreachable["message"]
    assert "the url argument" not in unreachable["message"]
    assert "`make serve` in a checkout" in unreachable["message"]
    doubled = problem("status", "7", code=1, url=f"{lastbit.url}/v1")
    assert f"the client adds /v1 itself, so use the address {lastbit.url} (404 not_found)" in doubled["message"]


CHOSEN = "--state open --key k --key-prefix p --label a:b --since 2h --until 1h --parent 7 --unchanged-for 1h --failed"
"""The filters of most commands."""
EVERY_FIELD = [
    "open --key k --label a:b --items 1 --sealed --seal-at 5 --group-size 64 --parent 1:0:0 --expires-in 1h "
    "--deadline 1h --tolerated-failures 1 --tolerated-failure-percentage 2 --on-exceeded cancel --callback https://a.b "
    "--callback-type batch.opened --idempotency-key i",
    "extend 7 5 --by 7:0:1 --idempotency-key i",
    "update 7 --label a:b --remove-label c --deadline 1h --tolerated-failures 1 --tolerated-failure-percentage 2 "
    "--on-exceeded cancel --idempotency-key i",
    "seal 7",
    "ack 7:0:1",
    "fail 7:0:1 --reason r",
    "skip 7:0:1 --reason r",
    "status 7",
    "watch 7",
    "explain 7",
    "pending 7 --limit 5",
    "pending 7 --limit 5 --failed",
    "pending 7 --limit 5 --skipped",
    "reasons 7 --limit 5",
    "redrive 7 --reason r --note n --pending --unchanged-for 1h --idempotency-key i",
    f"redrive {CHOSEN} --yes",
    "redrive --outcome failed --yes",
    f"failures {CHOSEN} --outcome failed --text t --limit 5",
    f"list {CHOSEN} --outcome failed --limit 5 --cursor c",
    "counts --key k --key-prefix p --label a:b --since 2h --until 1h --outcome failed --parent 7 --unchanged-for 1h "
    "--failed",
    "cancel 7 --reason r --children",
    f"cancel {CHOSEN} --outcome exceeded --yes",
    "reopen 7 --deadline 1h --reason r --idempotency-key i",
    "reopen --state expired --key k --key-prefix p --label a:b --since 2h --until 1h --outcome exceeded --parent 7 "
    "--failed --yes",
    "reopen --unchanged-for 1h --yes",
    "delete 7",
    f"delete {CHOSEN} --outcome exceeded --yes",
    "verify 7",
    "repair 7 --dry-run",
    "events --after 5 --type a --batch 7 --limit 5",
    "append x a --key k --data 1",
    "webhooks create https://a.b --type a --label l",
    "webhooks list",
    "webhooks delete 7",
    "webhooks deliveries 7 --state dead --limit 5",
    "webhooks redeliver 7 --position 5",
    "webhooks redeliver 7 --event e",
    "webhooks test 7",
    "webhooks rotate-secret 7 --overlap 1h",
    "groups list",
    "groups create g --partitions 5 --ttl 5 --release 5",
    "groups show g",
    "groups delete g",
    "groups kick g w",
    "tally value t k",
    "tally list t --prefix p --limit 5",
    "tally apply t k 5 --topic x --partition 1 --offset 2 --child 3 --generation 4",
    "tally delete t",
    "processes list",
    "processes instances p --status parked --limit 5",
    "processes show p i",
    "processes retry p i --event e",
    "processes delete p",
    "commands --after 5 --type a --process p --limit 5",
]
"""Each command that sends a request, with every option that becomes a field of it."""
OWN_OPTIONS = {
    *("--url", "--token", "--token-file", "--json", "--yes", "--ids", "--follow", "--last", "--timeout", "--all"),
    *("--failed", "--skipped", "--sort", "--reverse", "--partitions", "--limit", "--remove-label"),
    *("--profile", "--jq", "--web"),
}
"""Options that the command line applies itself, in some commands: they are in no request, or are checked before it."""
# The command line chooses the size of pages itself.
NOT_TYPED = re.compile(r"query\.(limit|wait)|body\.entries\[0\]\.source")


@functools.cache
def _paths() -> list[str]:
    return list(yaml.safe_load((ROOT / "openapi.yaml").read_text())["paths"])


def _places(request: Seen) -> Iterator[str]:
    """The place of each value in a request."""
    url = urlsplit(request.path)
    if url.path not in _paths():
        for path in _paths():
            if re.fullmatch(re.sub(r"{\w+}", "[^/]+", path), url.path):
                yield from (f"path.{name}" for name in re.findall(r"{(\w+)}", path))
    yield from (f"query.{name}" for name, _ in parse_qsl(url.query))
    yield from _fields("body", request.body)
    yield "header Idempotency-Key"


def _fields(place: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, field in value.items():
            yield from _fields(f"{place}.{name}", field)
    elif isinstance(value, list):
        yield from _fields(f"{place}[0]", value[0])
    elif place != "body":
        yield place


@pytest.mark.parametrize("line", EVERY_FIELD)
def test_an_error_of_the_service_names_what_was_typed(scripted_service: ScriptedService, line: str) -> None:
    """Whatever place of the request is refused, its option or argument is named, and not the field."""
    refused: list[str] = []

    def refuse(request: Seen) -> Reply:
        refused[:] = _places(request)
        places = [{"place": place, "expected": "expected something else"} for place in refused]
        detail = f"{refused[0]}: expected something else"
        return 422, {}, {"code": "invalid_request", "status": 422, "detail": detail, "errors": places}

    scripted_service.reply = refuse
    result = CliRunner().invoke(cli, ["--url", scripted_service.url, *shlex.split(line)])
    assert result.exit_code == 2
    lines = [text.removeprefix("lastbit: ").strip() for text in result.stderr.splitlines()]
    unknown = [text for text in lines if re.match(r"(path|query|body)\.", text) and not NOT_TYPED.match(text)]
    assert unknown == []
    named = {text.partition(":")[0].split(" ")[0] for text in lines}
    options = {word for word in shlex.split(line) if word.startswith("--")}
    if "--idempotency-key" in options:
        assert "header Idempotency-Key" not in result.stderr
    assert options - OWN_OPTIONS <= named


def test_all_options_of_requests_are_in_the_table_of_this_test() -> None:
    for names in _commands(cli):
        command: click.Command = cli
        for name in names:
            assert isinstance(command, click.Group)
            command = command.commands[name]
        if isinstance(command, click.Group) or names[0] in ("token", "login", "logout", "profiles", "completion"):
            continue
        lines = [line for line in EVERY_FIELD if line.split()[: len(names)] == list(names)]
        assert lines, names
        options = {max(param.opts, key=len) for param in command.params if isinstance(param, click.Option)}
        assert options - OWN_OPTIONS <= {word for line in lines for word in line.split()}, names


def test_an_error_of_the_service_names_options_in_its_words(lastbit: Lastbit) -> None:
    """Also other options that it mentions."""
    for arguments, problem in (
        (["open", "--group-size", "65"], "lastbit: --group-size: expected a multiple of 8 from 64 to 32,768 (422 "),
        (["open", "--label", "a:" + "x" * 2000], "lastbit: --label a: expected at most 1,024 characters"),
        (["open", "--on-exceeded", "cancel"], "--on-exceeded: it needs --tolerated-failures or --tolerated-failure-"),
        (["list", "--since", "1h", "--until", "2h"], "--until: expected a time later than --since"),
        (["append", "two words", "a"], "lastbit: ID: expected 1 to 255 visible ASCII characters without blanks"),
        (["groups", "show", "two words"], "lastbit: NAME: expected a letter, digit or underscore"),
    ):
        result = lastbit(*arguments)
        assert (result.returncode, problem in result.stderr) == (2, True), result.stderr


def test_an_option_after_two_dashes_is_an_argument(lastbit: Lastbit) -> None:
    """`--` ends the options."""
    result = lastbit("ack", "--", "--json")
    assert result.returncode == 2
    assert not result.stderr.startswith("{")


def test_an_ambiguous_key_lists_its_candidates(lastbit: Lastbit, client: Client) -> None:
    """The newest twenty, and the command that lists the others. It has no effect."""
    key = f"it's {uuid.uuid4().hex}"
    ids = [client.open(key=key, items=1).id for _ in range(22)]
    result = lastbit("cancel", key)
    assert (result.returncode, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert [line.split()[:8] for line in lines[1:-1]] == [
        [str(id), "open,", "0", "of", "1", "resolved,", "opened", lines[1].split()[7]] for id in reversed(ids[2:])
    ]
    assert lines[-1] == f"  … and more: lastbit list --key {shlex.quote(key)}"
    document = json.loads(lastbit("cancel", key, "--json").stderr)
    assert (document["error"], document["more"]) == ("AmbiguousKey", True)
    assert [candidate["id"] for candidate in document["candidates"]] == ids[:1:-1]
    assert all(client.batch(id).refresh().state == "open" for id in ids)


# Help and completion


def _commands(group: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*names, name)
        if isinstance(command, click.Group):
            yield from _commands(command, *names, name)


@pytest.mark.parametrize("names", [(), *_commands(cli)], ids=" ".join)
def test_every_help_has_examples_that_parse(names: tuple[str, ...]) -> None:
    """Each has an example of its own with valid options. The help fits 80 columns, and so do the summaries."""
    context = click.Context(cli, info_name="lastbit", terminal_width=80)
    command: click.Command = cli
    for name in names:
        assert isinstance(command, click.Group)
        command = command.commands[name]
        context = click.Context(command, context, info_name=name, terminal_width=80)
    text = command.get_help(context)
    assert max(map(len, text.splitlines())) <= 80
    assert not re.findall(r"\w\.\.\.$", text, re.MULTILINE)  # a command's summary that was cut off
    lines = text.partition("Examples:\n")[2].split("\n\n")[0].splitlines()
    assert lines
    for line in lines:
        calls = re.findall(r"(?:^|\| )lastbit ([^|><]*)", line.strip())
        assert calls, line
        assert any(shlex.split(call)[: len(names)] == list(names) for call in calls), line
        for call in calls:
            _parse(cli, shlex.split(call))


def _parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    if isinstance(command, click.Group):
        _parse(command.commands[words[0]], words[1:], click.Context(command, parent))
    else:
        command.make_context("", words, parent=parent)


COMPLETION = {
    "bash": """
        eval "$(lastbit completion bash)"
        COMP_WORDS=(lastbit {words}); COMP_CWORD={last}
        _lastbit_completion lastbit; printf '%s\\n' "${{COMPREPLY[@]}}"
    """,
    "zsh": """
        compdef() {{ :; }}
        _describe() {{ print -l -- "${{(@P)3}}"; }}
        compadd() {{ print -l -- "${{(@P)5}}"; }}
        eval "$(lastbit completion zsh)"
        words=(lastbit {words}); CURRENT={count}; _lastbit_completion
    """,
    "fish": """
        lastbit completion fish | source
        complete --do-complete 'lastbit {words}'
    """,
}


@pytest.mark.parametrize("shell", COMPLETION)
@pytest.mark.parametrize(
    ("typed", "candidate", "excluded"),
    [("expl", "explain", "list"), ("webhooks del", "delete", "list"), ("list --sin", "--since", "--until")],
)
def test_a_shell_completes_commands_and_options(
    shell: str, typed: str, candidate: str, excluded: str, tmp_path: Path
) -> None:
    """With the script that `lastbit completion` prints."""
    program = shutil.which(shell)
    if program is None:
        (pytest.fail if os.environ.get("CI") and shell == "bash" else pytest.skip)(f"{shell} is not installed")
    words = typed.split()
    script = COMPLETION[shell].format(words=typed, last=len(words), count=len(words) + 1)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
    }
    command = [program, "-c", script]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    candidates = [re.split(r"[\t:]", line)[0] for line in result.stdout.split()]
    assert candidate in candidates, result
    assert excluded not in candidates
