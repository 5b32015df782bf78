"""The command line as a process: its output on both streams, and its exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import pty
import re
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console

from jobs import janitor
from lastbit import AsyncClient, Batch, BatchCounts, Client, ItemIds, Repair
from lastbit.cli import cli
from lastbit.cli.rendering import batch_table
from tests.sdk.terminals import on_terminal
from tests.sdk.test_protocol import BATCH
from tests.support.servers import ROOT, run_module, running_service

COMMANDS = [
    *(
        "open",
        "extend",
        "update",
        "seal",
        "ack",
        "fail",
        "skip",
        "status",
        "watch",
        "explain",
        "pending",
        "reasons",
        "failures",
        "redrive",
    ),
    *("list", "counts", "cancel", "reopen", "delete", "verify", "repair"),
    *("events", "append", "webhooks", "groups", "tally", "processes", "commands", "token"),
    *("login", "logout", "profiles", "completion"),
]


class Lastbit:
    """Runs `lastbit`, by default against the service under test."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, *arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "LASTBIT_URL": self.url, "COLUMNS": "120", "NO_PROXY": "*"}
        environment.pop("LASTBIT_TOKEN", None)
        result = run_module("lastbit", *arguments, stdin=stdin, environment=environment)
        assert "Traceback" not in result.stderr, result.stderr
        return result

    def json(self, *arguments: str, code: int = 0, stdin: str = "") -> Any:
        result = self(*arguments, "--json", stdin=stdin)
        assert result.returncode == code, result.stderr
        return json.loads(result.stdout)

    def ok(self, *arguments: str, stdin: str = "") -> str:
        result = self(*arguments, stdin=stdin)
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture
def lastbit(service_url: str) -> Lastbit:
    return Lastbit(service_url)


def test_the_help_lists_all_commands(lastbit: Lastbit) -> None:
    """Each command has a help text, and the exit codes are listed with them."""
    text = lastbit.ok("--help")
    names = re.findall(r"^  ([a-z]+)  +[A-Z]", text.partition("Commands:")[2].partition("Exit codes")[0], re.MULTILINE)
    assert names == COMMANDS
    assert "Exit codes:" in text
    assert "--json" in lastbit.ok("watch", "--help")


def helps(command: click.Command, name: str = "lastbit", parent: click.Context | None = None) -> Iterator[str]:
    """The help of a command and of its subcommands, at 80 columns."""
    context = click.Context(command, parent, name, terminal_width=80)
    yield command.get_help(context)
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            yield from helps(subcommand, subcommand.name or "", context)


def test_no_help_shows_the_bounds_of_a_type_or_a_cut_sentence() -> None:
    """click writes `[x<=None]` for a number without bounds, and cuts the sentences of a list of commands."""
    for text in helps(cli):
        assert not re.search(r"<=|>=|None", text), text
        assert "..." not in text.partition("\nCommands:\n")[2], text


def test_a_batch_that_seals_itself_shows_when(lastbit: Lastbit) -> None:
    batch = lastbit.json("open", "--seal-at", "3", "--items", "1")["id"]
    assert re.search("seals itself +at 3 items", lastbit.ok("status", str(batch)))
    lastbit.ok("extend", str(batch), "2")
    assert "seals itself" not in lastbit.ok("status", str(batch))
    refused = lastbit("open", "--seal-at", "3", "--items", "4")
    assert (refused.returncode, "--seal-at" in refused.stderr) == (2, True)


def test_a_batch_from_its_opening_to_its_end(lastbit: Lastbit) -> None:
    """The text output shows each step."""
    text = lastbit.ok("open", "--key", "nightly", "--label", "team:search", "--items", "3", "--group-size", "64")
    batch = re.findall(r"batch (\d+) nightly  open", text)[0]
    assert f"{batch}:0:0 … {batch}:0:2  3 items, numbers 0 to 2" in text
    assert f"{batch}:0:3 … {batch}:1:2  64 items" in lastbit.ok("extend", batch, "64")
    assert lastbit.ok("extend", batch, "0").strip() == "no items"
    assert lastbit.ok("extend", batch, "0", "--by", f"{batch}:0:0").strip() == "no items"
    assert "67 of 67 items pending" in lastbit.ok("seal", batch)
    assert "2 acked" in lastbit.ok("ack", f"{batch}:0:0", f"{batch}:0:1")
    assert "1 failed" in lastbit.ok("fail", f"{batch}:0:5", "--reason", "disk [bold]full")
    status = lastbit.ok("status", batch)
    assert "67 items: 2 acked, 1 failed, 64 pending" in status
    assert "team:search" in status
    assert "4.4 %" in status
    assert re.search("pace +[▁▂▃▄▅▆▇█]{40}  [0-9]+ s", status)
    assert "tree" not in status
    pending = lastbit.ok("pending", batch)
    assert f"{batch}:0:2 … {batch}:0:4  3 items" in pending
    assert "64 items pending in 2 ranges" in pending
    assert "disk [bold]full" in lastbit.ok("pending", batch, "--failed")
    missing = lastbit.ok("pending", batch, "--ids")
    last = lastbit.ok("ack", stdin=missing)
    assert "64 acked" in last
    assert f"batch {batch} nightly is complete, with failures: this call completed it" in last
    assert "this call made it succeed" in lastbit.ok("ack", f"{batch}:0:5")
    assert "ok, the bits agree" in lastbit.ok("verify", batch)
    assert "67 items, 67 acked" in lastbit.ok("watch", batch)
    assert lastbit.json("list", "--key", "nightly", "--unchanged-for", "0s")["batches"] == []
    text = lastbit.ok("list", "--key", "nightly")
    assert text == "".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip())
    assert "complete" in text
    assert "100 %" in text


def test_the_sums_of_a_tree_are_shown(lastbit: Lastbit) -> None:
    parent = lastbit.json("open", "--items", "3", "--sealed")["id"]
    child = lastbit.json("open", "--items", "5", "--sealed", "--parent", f"{parent}:0:2")["id"]
    lastbit.ok("ack", f"{parent}:0:0", f"{child}:0:4")
    assert "2 batches (2 sealed): 7 items, 2 acked, 0 failed, 5 pending" in lastbit.ok("status", str(parent))
    assert "tree" not in lastbit.ok("status", str(child))
    lines = lastbit("watch", str(parent), "--timeout", "3s").stdout
    assert f"batch {parent} sealed: 2 of 7 resolved, 28 %" in lines


def test_items_are_skipped_from_the_command_line(lastbit: Lastbit) -> None:
    """The counts name skipped items only if there are any."""
    ids = lastbit.ok("open", "--items", "3", "--sealed", "--ids").split()
    batch = ids[0].partition(":")[0]
    lastbit.ok("fail", *ids[:2])
    assert "skipped" not in lastbit.ok("status", batch)
    assert lastbit.ok("skip", *ids[:2], "--reason", "not needed") == "2 skipped\n"
    assert "3 items: 0 acked, 0 failed, 2 skipped, 1 pending" in lastbit.ok("status", batch)
    assert lastbit.json("skip", ids[2])["completed"][0]["succeeded"]
    assert lastbit.ok("fail", ids[2]).startswith("0 failed, 1 repeated (failed, skipped or acked before; they stay so)")


def test_failures_that_cancel_their_batch_say_so(lastbit: Lastbit) -> None:
    """So do later ones, which are rejected. Failures within the tolerance, and a batch without one, are not named."""
    policy = ("--tolerated-failures", "1", "--on-exceeded", "cancel")
    ids = lastbit.ok("open", "--key", "strict", "--items", "4", *policy, "--ids").split()
    others = lastbit.ok("open", "--items", "4", "--tolerated-failures", "1", "--ids").split()
    batch = ids[0].partition(":")[0]
    assert lastbit.ok("fail", ids[0]) == "1 failed\n"
    assert lastbit.ok("fail", *others[:2], *ids[:2]) == (
        "3 failed, 1 repeated (failed, skipped or acked before; they stay so)\n"
        f"batch {batch} strict is cancelled: its failures exceed its tolerance\n"
    )
    late = lastbit.json("fail", others[2], "999999:0:0", ids[2], code=3)
    assert (late["applied"], late["cancelled"]) == (1, [{"batch": int(batch), "key": "strict"}])
    assert lastbit.json("fail", others[3])["cancelled"] == []
    assert "cancelled" not in lastbit.json("ack", others[0])


def test_a_limit_counts_what_is_shown(lastbit: Lastbit) -> None:
    """Ranges, or ids; both are pending or failed."""
    ids = lastbit.ok("open", "--items", "9", "--ids").split()
    batch = ids[0].partition(":")[0]
    lastbit.ok("fail", ids[3], ids[4], ids[6])
    for option, shown in (("--limit=2", ids[:2]), ("--limit=5", [*ids[:3], ids[5], ids[7]])):
        assert lastbit.ok("pending", batch, "--ids", option).split() == shown
        assert lastbit.json("pending", batch, "--ids", option)["ids"] == shown
    assert lastbit.ok("pending", batch, "--failed", "--ids", "--limit", "1").split() == [ids[3]]
    ranges = lastbit.json("pending", batch, "--limit", "2")["ranges"]
    assert [one["start"] for one in ranges] == [0, 5]


def test_every_answer_is_one_json_document(lastbit: Lastbit) -> None:
    """With the service's own field names."""
    policy = ("--tolerated-failures", "1", "--tolerated-failure-percentage", "50", "--on-exceeded", "cancel")
    batch = lastbit.json(
        "open", "--items", "2", "--label", "a:b", "--label", "c:d:e", "--expires-in", "2h", "--deadline", "3h", *policy
    )
    number = str(batch["id"])
    assert (batch["state"], batch["start"], batch["count"], batch["replayed"]) == ("open", 0, 2, False)
    assert batch["labels"] == {"a": "b", "c": "d:e"}
    assert batch["expires_in"] == 7200
    span = datetime.fromisoformat(batch["deadline"]) - datetime.fromisoformat(batch["created_at"])
    assert timedelta(hours=2.9) < span < timedelta(hours=3.1)
    assert (batch["tolerated_failures"], batch["tolerated_failure_percentage"]) == (1, 50)
    assert (batch["on_exceeded"], batch["exceeded"]) == ("cancel", False)
    assert batch["created_at"].endswith("Z")
    assert lastbit.json("extend", number, "1_000")["last"] == f"{number}:0:1001"
    assert lastbit.json("extend", number, "2", "--ids")["ids"] == [f"{number}:0:1002", f"{number}:0:1003"]
    acked = lastbit.json("ack", f"{number}:0:0", f"{number}:0:4000", code=3)
    assert acked["applied"] == 1
    assert acked["rejected"] == [{"item": f"{number}:0:4000", "reason": "unknown_item"}]
    assert lastbit.json("fail", f"{number}:0:1", "--reason", "late")["applied"] == 1
    assert lastbit.json("seal", number)["newly"] is False
    assert lastbit.json("status", number)["pending"] == 1002
    ranges = lastbit.json("pending", number)["ranges"]
    assert ranges == [{"start": 2, "end": 1004, "first": f"{number}:0:2", "last": f"{number}:0:1003"}]
    assert lastbit.json("pending", number, "--failed")["ranges"][0]["reasons"] == {f"{number}:0:1": "late"}
    assert lastbit.json("verify", number)["counted"] == {"acked": 1, "failed": 1, "skipped": 0}
    assert lastbit.json("list", "--label", "c:d:e")["batches"][0]["id"] == batch["id"]
    assert lastbit.json("cancel", number)["state"] == "cancelled"
    assert lastbit.json("watch", number, code=3)["state"] == "cancelled"


def test_all_durations_have_the_same_units(lastbit: Lastbit) -> None:
    """Also those before and after now, and those of the janitor."""
    for text, seconds in (("90s", 90), ("15m", 900), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600)):
        key = f"due-in-{text}"
        batch = lastbit.json("open", "--key", key, "--items", "1", "--expires-in", text, "--deadline", text)
        assert batch["expires_in"] == seconds
        span = datetime.fromisoformat(batch["deadline"]) - datetime.fromisoformat(batch["created_at"])
        assert abs(span.total_seconds() - seconds) < 60
        assert [one["id"] for one in lastbit.json("list", "--key", key, "--since", text)["batches"]] == [batch["id"]]
        assert janitor.duration(text).total_seconds() == seconds


def test_common_options_may_precede_the_command(lastbit: Lastbit, unused_port: int) -> None:
    """An option after the command takes precedence."""
    result = lastbit("--json", "--url", f"http://127.0.0.1:{unused_port}", "open", "--url", lastbit.url)
    assert result.returncode == 0
    assert json.loads(result.stdout)["state"] == "open"


def test_idempotency_keys_make_a_script_repeatable(lastbit: Lastbit) -> None:
    """The second run gives the same batch and the same ids."""
    first = lastbit.json("open", "--items", "2", "--idempotency-key", "nightly-2026-01-02")
    second = lastbit.json("open", "--items", "2", "--idempotency-key", "nightly-2026-01-02")
    assert (second["id"], second["replayed"]) == (first["id"], True)
    number = str(first["id"])
    ids = [lastbit.ok("extend", number, "3", "--ids", "--idempotency-key", "chunk-1") for _ in range(2)]
    assert ids[0] == ids[1] == f"{number}:0:2\n{number}:0:3\n{number}:0:4\n"
    conflict = lastbit("open", "--items", "3", "--idempotency-key", "nightly-2026-01-02")
    assert conflict.returncode == 1
    assert "idempotency_key_reused" in conflict.stderr


def test_repeats_say_what_happened_before(lastbit: Lastbit) -> None:
    """A replayed extend, a failure of an item that was acked, and an empty reason."""
    batch = str(lastbit.json("open", "--items", "2")["id"])
    extend = ("extend", batch, "3", "--idempotency-key", "again")
    assert "issued before" not in lastbit.ok(*extend)
    assert f"{batch}:0:2 … {batch}:0:4  3 items, numbers 2 to 4, issued before with this id" in lastbit.ok(*extend)
    assert lastbit.json(*extend)["replayed"] is True
    assert lastbit.json("extend", batch, "1")["replayed"] is False
    lastbit.ok("ack", f"{batch}:0:0")
    assert lastbit.ok("ack", f"{batch}:0:0") == "0 acked, 1 repeated\n"
    text = "0 failed, 1 repeated (failed, skipped or acked before; they stay so)\n"
    assert lastbit.ok("fail", f"{batch}:0:0") == text
    lastbit.ok("fail", f"{batch}:0:1", "--reason", "")
    for command in (("pending", batch, "--failed"), ("reasons", batch)):
        assert "1 item  an empty reason\n" in lastbit.ok(*command)


def test_any_number_of_ids_can_come_from_standard_input(lastbit: Lastbit) -> None:
    """One a line, with blank lines and either line ending, in addition to those on the command line. A file of Windows
    may begin with a byte order mark."""
    with Client(lastbit.url) as client:
        batch = client.open(items=25_002, sealed=True)
    lines = "\r\n".join(batch.ids[1:20_000]) + "\n\n" + "\n".join(batch.ids[20_000:-1])
    result = lastbit.json("ack", batch.ids[0], "-", stdin=lines)
    assert result["applied"] == 25_001
    assert lastbit.json("ack", "-", stdin=batch.ids[-1])["completed"][0]["newly"] is True
    for arguments in ([], ["-"]):
        assert lastbit.json("ack", *arguments, stdin="")["applied"] == 0
    for text, repeats in (("\ufeff", 0), (f"\ufeff{batch.ids[0]}\r\n{batch.ids[1]}\r\n", 2)):
        assert lastbit.json("ack", stdin=text)["repeated"] == repeats


def test_no_events_of_what_does_not_exist_say_so(lastbit: Lastbit) -> None:
    """On standard error; a deleted batch still has events."""
    for arguments, text, note in (
        (("events", "--batch", "999999"), "no events\n", "There is no batch 999999 now.\n"),
        (("commands", "--process", "nosuch"), "no commands\n", "There is no process nosuch now.\n"),
    ):
        result = lastbit(*arguments)
        assert (result.returncode, result.stdout, result.stderr) == (0, text, note)
    batch = str(lastbit.json("open")["id"])
    result = lastbit("events", "--batch", batch, "--type", "batch.sealed")
    assert (result.stdout, result.stderr) == ("no events\n", "")


def test_a_malformed_id_is_named_by_its_place_among_the_ids(lastbit: Lastbit) -> None:
    result = lastbit("ack", "-", "7:0:1", "7:0")
    assert result.returncode == 2
    assert "lastbit: ID 2: '7:0' is not an item id" in result.stderr


def test_a_malformed_line_is_named_and_its_chunk_is_not_sent(lastbit: Lastbit) -> None:
    """The error reports how much was sent before the line."""
    with Client(lastbit.url) as client:
        batch = client.open(items=10_001)
        for bad_line in (b"7:0", b"\xff\xfe\x00", b"x" * 100_000):
            result = lastbit("ack", stdin=batch.ids[0].encode() + b"\n" + bad_line + b"\n")
            assert result.returncode == 2
            assert "line 2 of standard input" in result.stderr
            assert len(result.stderr) < 500
        assert batch.refresh().acked == 0
        result = lastbit("ack", stdin="\n".join([*batch.ids[:10_000], "7:0"]))
        assert result.returncode == 2
        assert "The first 10,000 ids were sent" in result.stderr
        assert batch.refresh().acked == 10_000


def test_a_billion_ids_stream(lastbit: Lastbit) -> None:
    """If the reader closes the pipe, the command ends quietly without generating the remaining ids."""
    with Client(lastbit.url) as client:
        batch = client.open()
    environment = {**os.environ, "LASTBIT_URL": lastbit.url}
    command = [sys.executable, "-m", "lastbit", "extend", str(batch.id), "1_000_000_000", "--ids"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    first = [process.stdout.readline().decode().strip() for _ in range(100_000)]
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    process.wait(60)
    assert first == list(ItemIds(batch.id, 8192, range(100_000)))
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", "07"],
        ["status", "-1"],
        ["status", "٧"],
        ["status", "9007199254740992"],
        ["status", ""],
        ["extend", "7", "-1"],
        ["extend", "7", "1.5"],
        ["extend", "7", "1000000000001"],
        ["open", "--label", "nocolon"],
        ["open", "--label", "a:b", "--label", "a:c"],
        ["open", "--group-size", "63"],
        ["open", "--group-size", "0"],
        ["open", "--items", "x"],
        ["open", "--expires-in", "soon"],
        ["open", "--key", "k" * 256],
        ["open", "--key", ""],
        ["open", "--idempotency-key", "two words"],
        ["ack", "7:0"],
        ["ack", "07:0:1"],
        ["ack", "7:0:1", "7:0:٣"],
        ["ack", "7:0:1:2"],
        ["ack", f"7:0:{10**30}"],
        ["list", "--state", "shut"],
        ["list", "--limit", "0"],
        ["list", "--since", "x"],
        ["list", "--until", "2026-13-01"],
        ["list", "--since", "9999999"],
        ["list", "--sort", "size"],
        ["list", "--outcome", "cancelled"],
        ["list", "--outcome", "failed", "--state", "open"],
        ["list", "--parent", "07"],
        ["counts", "--key", "a", "--key-prefix", "b"],
        ["counts", "--since", "1h", "--until", "2h"],
        ["list", "--sort", "failed", "--cursor", "x"],
        ["watch", "1", "--timeout", "x"],
        ["explain", "07"],
        ["events", "--after", "-1"],
        ["events", "--after", "x"],
        ["events", "--after", "9007199254740991"],
        ["events", "--limit", "0"],
        ["events", "--after", "1", "--last", "1"],
        ["events", "--batch", "07"],
        ["status", "key="],
        ["webhooks", "delete", "x"],
        ["webhooks", "delete", "../batches/1"],
        ["webhooks", "test", "key=1"],
        ["append", "x"],
        ["append", "batch:7:completed", "a"],
        ["append", "x", "batch.mine"],
        ["append", "two words", "a"],
        ["append", "x", "a", "--data", "{"],
        ["append", "x", "a", "--data", "NaN"],
        ["status", "1", "--url", "localhost:8000"],
        ["status", "1", "--token", "two words"],
        ["frobnicate"],
        ["status", "1", "--frobnicate"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_a_message_and_exit_code_2(lastbit: Lastbit, arguments: list[str]) -> None:
    """On standard error, and nothing on standard output."""
    result = lastbit(*arguments)
    assert result.returncode == 2
    assert result.stderr.strip()
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("list --limit 2.5", "'--limit': expected a whole number of at least 1, not '2.5'"),
        ("list --limit 0", "'--limit': expected a whole number of at least 1, not '0'"),
        ("reasons 7 --limit 9999", "'--limit': expected a whole number from 1 to 1000, not '9999'"),
        ("open --group-size x", "'--group-size': expected a whole number, not 'x'"),
        (
            "webhooks rotate-secret 3 --overlap 8d",
            "'--overlap': '8d' is too long: expected at most 7d (604,800 seconds)",
        ),
        ("append x a --data [-Infinity]", "'--data': this is not JSON: -Infinity is not a JSON value"),
        ("append x a --data NaN", "'--data': this is not JSON: NaN is not a JSON value"),
        ("groups create g --partitions 1 --ttl x", "'--ttl': expected a number, like 30 or 0.5, not 'x'"),
        ("status 9007199254740992", "'9007199254740992' is too large: the id of a batch is below 2^53"),
        (f"status {'9' * 20}", "is too large: the id of a batch is below 2^53"),
        ("events --after 9007199254740992", "is too large: a position of the feed is below 2^53"),
        ("status 07", "'07' is not a batch id: expected a decimal integer without leading zeros, like 7"),
        ("status 07", "; digits are the number of a batch, and key=07 names the key 07"),
        (f"status {'9' * 20}", f"; digits are the number of a batch, and key={'9' * 20} names the key {'9' * 20}"),
        ("extend 7 -15", "'-15' is not a number of items: expected a whole number from 0 to 10^12"),
        ("tally apply screws robot-7 -3.5 --topic t --offset 1", "'DELTA': expected a whole number, not '-3.5'"),
        ("append x a --data 1e999", "'--data': expected numbers that fit a double"),
        ('append x a --data "\\ud800"', "'--data': expected texts that can be encoded as UTF-8"),
        ("open --label a:1 --label b:1 --label a:2", "the label 'a' is given twice"),
        ("token new --role read --requests 0", "'--requests': expected a whole number from 1 to 999999999, not '0'"),
        ("token new --role read --items 1000000000", "'--items': expected a whole number from 1 to 999999999, not"),
    ],
)
def test_a_wrong_number_is_refused_with_what_is_expected(lastbit: Lastbit, arguments: str, problem: str) -> None:
    """In plain words, before anything is sent."""
    result = lastbit(*arguments.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr


def test_without_a_pipe_ids_must_be_arguments(lastbit: Lastbit) -> None:
    """On a terminal the command does not wait silently for input."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "LASTBIT_URL": lastbit.url}
    command = [sys.executable, "-m", "lastbit", "ack"]
    result = subprocess.run(command, env=environment, stdin=follower, capture_output=True, text=True, timeout=60)
    os.close(leader)
    os.close(follower)
    assert result.returncode == 2
    assert "pipe them in" in result.stderr


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["pending", "7", "--ids"]])
def test_output_that_cannot_be_written_is_an_error_in_one_line(lastbit: Lastbit, arguments: list[str]) -> None:
    """On a full disk. With --json it is a document, like other errors."""
    batch = Client(lastbit.url).open(items=3)
    arguments = [str(batch.id) if argument == "7" else argument for argument in arguments]
    command = [sys.executable, "-m", "lastbit", *arguments]
    environment = {**os.environ, "LASTBIT_URL": lastbit.url}
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    message = "standard input or output failed: No space left on device"
    assert line == (
        json.dumps({"error": "StreamFailed", "message": message}) if "--json" in arguments else f"lastbit: {message}"
    )


@pytest.mark.parametrize("arguments", [["pending", "7", "--ids"], ["pending", "7", "--json"], ["list", "--json"]])
def test_ids_and_documents_need_a_standard_output(lastbit: Lastbit, arguments: list[str]) -> None:
    """A closed one is an error in one line, too."""
    batch = Client(lastbit.url).open(items=3)
    arguments = [str(batch.id) if argument == "7" else argument for argument in arguments]
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "lastbit", *arguments]
    environment = {**os.environ, "LASTBIT_URL": lastbit.url}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "standard input or output failed: standard output is closed" in line


def test_a_cancel_tells_why_and_ends_what_is_below(lastbit: Lastbit) -> None:
    """Status shows the reason, and of a batch below the one that was cancelled."""
    batch = lastbit.json("open", "--items", "2")["id"]
    child = lastbit.json("open", "--items", "1", "--parent", f"{batch}:0:0")["id"]
    assert lastbit.json("cancel", str(batch), "--reason", "the wrong [catalog]", "--children")["ended_by"] is None
    shown = lastbit("status", str(child)).stdout
    assert f", because of batch {batch} above it" in shown
    assert re.search(r"reason +the wrong \[catalog\]", shown)
    assert "the wrong [catalog]" in lastbit("explain", str(child)).stdout


def test_a_batch_is_reopened(lastbit: Lastbit) -> None:
    """Its deadline is replaced or removed; a live one is refused."""
    batch = str(lastbit.json("open", "--items", "2", "--sealed")["id"])
    assert "batch_live" in lastbit("reopen", batch).stderr
    lastbit("cancel", batch)
    assert lastbit.json("reopen", batch, "--deadline", "2h", "--reason", "a mistake")["deadline"] is not None
    lastbit("cancel", batch)
    shown = lastbit("reopen", batch, "--deadline", "none").stdout
    assert "sealed" in shown
    assert "deadline" not in shown


def test_a_refusal_is_exit_code_1(lastbit: Lastbit) -> None:
    """With the service's message and code."""
    result = lastbit("status", "999999")
    assert (result.returncode, result.stdout) == (1, "")
    assert "batch_not_found" in result.stderr
    assert result.stderr.endswith("\nDigits are the number of a batch, and key=999999 names the key 999999.\n")
    batch = str(lastbit.json("open", "--sealed")["id"])
    for command in (["extend", batch, "1"], ["cancel", batch]):
        result = lastbit(*command)
        assert result.returncode == 1
        assert "batch_complete" in result.stderr


def test_an_unreachable_service_is_named(unused_port: int) -> None:
    """With its address and advice."""
    url = f"http://127.0.0.1:{unused_port}"
    result = Lastbit(url)("status", "7")
    assert (result.returncode, result.stdout) == (1, "")
    assert url in result.stderr
    assert "refused" in result.stderr.lower()
    assert "`lastbit-server` starts one" in result.stderr
    assert "--url" in result.stderr


@pytest.mark.parametrize(
    ("scheme", "remedy"),
    [("https", "use http:// instead of https://, or set another address"), ("http", "check that it is a Lastbit")],
)
def test_a_service_that_is_reached_is_not_to_be_started(scheme: str, remedy: str) -> None:
    """It speaks no TLS, or resets the connection."""

    def reset(connection: socket.socket) -> None:
        if connection.recv(65536).startswith(b"\x16"):  # the handshake of TLS
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def answer() -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                reset(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        result = Lastbit(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")("status", "7")
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert (result.returncode, result.stdout) == (1, "")
    assert remedy in result.stderr
    assert "Start the service" not in result.stderr


def test_a_service_without_tls_is_named(lastbit: Lastbit) -> None:
    """Our own."""
    result = Lastbit(lastbit.url.replace("http:", "https:"))("status", "7")
    assert "use http:// instead of https://" in result.stderr


def test_a_host_with_an_unknown_name_is_not_to_be_started() -> None:
    result = Lastbit("http://nobody.invalid:8000")("status", "7")
    assert result.returncode == 1
    assert "Check the name of the host, or set another address with --url, --profile or LASTBIT_URL." in result.stderr


def test_rejected_items_are_exit_code_3(lastbit: Lastbit) -> None:
    """They are listed; the others are applied."""
    batch = lastbit.json("open", "--items", "1")["id"]
    result = lastbit("ack", f"{batch}:0:0", *[f"{batch}:0:{index}" for index in range(1, 31)])
    assert result.returncode == 3
    assert "1 acked, 30 rejected" in result.stdout
    assert f"rejected {batch}:0:1: never issued (unknown_item)" in result.stdout
    assert "and 10 more" in result.stdout


def test_a_held_item_is_rejected_in_words(lastbit: Lastbit) -> None:
    batch = lastbit.json("open", "--items", "1")["id"]
    lastbit.json("open", "--items", "1", "--parent", f"{batch}:0:0")
    result = lastbit("fail", f"{batch}:0:0")
    assert result.returncode == 3
    assert f"{batch}:0:0: a nested batch stands for it and will resolve it (held)" in result.stdout


def test_watching_ends_with_3_if_the_batch_does_not_succeed(lastbit: Lastbit) -> None:
    """Because it failed, was cancelled, or did not end in time."""
    failed = str(lastbit.json("open", "--items", "1", "--sealed")["id"])
    assert lastbit("watch", failed, "--timeout", "0").returncode == 3
    assert "did not end within" in lastbit("watch", failed, "--timeout", "0s").stderr
    lastbit.ok("fail", f"{failed}:0:0")
    result = lastbit("watch", failed)
    assert result.returncode == 3
    assert "complete, 1 failed" in result.stdout
    assert lastbit.ok("fail", f"{failed}:0:0").endswith(f"\nbatch {failed} was already complete, with failures\n")


def test_watching_prints_each_change(lastbit: Lastbit) -> None:
    """Without a terminal it prints one line for each change, until the last item."""
    with Client(lastbit.url) as client:
        batch = client.open(items=2, sealed=True)
        environment = {**os.environ, "LASTBIT_URL": lastbit.url, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "lastbit", "watch", str(batch.id)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == f"batch {batch.id} sealed: 0 of 2 resolved, 0 %, waiting for acks\n"
        client.ack(batch.ids[0])
        line = process.stdout.readline()
        assert re.fullmatch(
            rf"batch {batch.id} sealed: 1 of 2 resolved, 50 %, [0-9.]+/s, about \d+ \w+( \d+ s)? left\n", line
        )
        client.ack(batch.ids[1])
        rest = process.stdout.read()
        process.stdout.close()
        assert process.wait(60) == 0
        assert f"batch {batch.id}  complete: 2 items, 2 acked, 0 failed, 0 pending" in rest


def test_ctrl_c_ends_a_command_quietly(lastbit: Lastbit) -> None:
    """With exit code 130: `watch` would return 0 only for a batch that succeeded."""
    environment = {**os.environ, "LASTBIT_URL": lastbit.url, "PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Client(lastbit.url) as client:
        batch = client.open(items=10_000, sealed=True)
        command = [sys.executable, "-m", "lastbit", "watch", str(batch.id)]
        with subprocess.Popen(command, env=environment, text=True, **pipes) as watching:
            assert watching.stdout is not None
            assert "0 of 10,000 resolved" in watching.stdout.readline()
            watching.send_signal(signal.SIGINT)
            assert watching.communicate(timeout=30) == ("", "")
            assert watching.returncode == 130
        command = [sys.executable, "-m", "lastbit", "fail", "--json"]
        with subprocess.Popen(command, env=environment, text=True, **pipes) as reading:
            assert reading.stdin is not None
            reading.stdin.write("".join(f"{id}\n" for id in batch.ids))
            reading.stdin.flush()
            watched = batch.wait(timeout=30)  # until the command has sent a chunk and reads on
            assert watched.failed == 10_000
            reading.send_signal(signal.SIGINT)
            assert reading.wait(30) == 130
            assert reading.communicate() == ("", "")


def test_a_terminal_shows_a_progress_bar(lastbit: Lastbit) -> None:
    """With the state and the counts."""
    with Client(lastbit.url) as client:
        batch = client.open(items=2, sealed=True)
        client.ack(batch.ids)
    screen = on_terminal(lastbit.url, ["watch", str(batch.id)], width=100)
    assert screen.code == 0
    assert "━" in screen.text
    assert "2 of 2" in screen.text


def test_counts_that_disagree_with_the_bits_are_exit_code_3(scripted_service: Any) -> None:
    """The output shows both counts and the service's faults."""
    report = {"ok": False, "items": 5, "acked": 4, "failed": 1, "pending": 0, "counted": {"acked": 3, "failed": 1}}
    report["faults"] = ["group 0: resolved_count is 5, but 4 bits are set"]
    scripted_service.replies((200, {}, report))
    result = Lastbit(scripted_service.url)("verify", "7")
    assert result.returncode == 3
    assert "inconsistent" in result.stdout
    assert "group 0: resolved_count is 5" in result.stdout
    assert "acked 4, counted 3" in result.stdout


def test_all_batches_are_verified(sqlite_url: str) -> None:
    """Inconsistent batches are listed, and the exit code is 3."""
    with running_service(sqlite_url) as running:
        lastbit = Lastbit(running.url)
        with Client(running.url) as client:
            for _ in range(3):
                client.ack(client.open(items=2).ids)
        assert "3 batches, 6 items: ok" in lastbit.ok("verify", "--all")
        no_faults = {"gone": 0, "inconsistent": []}
        assert lastbit.json("verify", "--all") == {"ok": True, "batches": 3, "items": 6, **no_faults}
        with contextlib.closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as database, database:
            database.execute("UPDATE batches SET acked = 1 WHERE id = 2")
        report = lastbit.json("verify", "--all", code=3)
        assert (report["ok"], report["batches"]) == (False, 3)
        assert [(fault["batch"], fault["counted"]["acked"]) for fault in report["inconsistent"]] == [(2, 2)]
        result = lastbit("verify", "--all")
        assert result.returncode == 3
        assert "batch 2  inconsistent" in result.stdout
        assert "3 batches, 6 items: 1 inconsistent" in result.stdout


def test_a_batch_deleted_while_all_are_verified_is_not_a_fault(scripted_service: Any) -> None:
    """The batch is in the list but deleted before it is verified."""
    batch = {**BATCH, "id": 7}
    problem = {"code": "batch_not_found", "detail": "there is no batch 7", "status": 404}
    scripted_service.replies((200, {}, {"batches": [batch], "next": None}), (404, {}, problem))
    report = Lastbit(scripted_service.url).json("verify", "--all")
    assert (report["ok"], report["batches"], report["gone"]) == (True, 0, 1)


def test_a_repair_names_the_items_to_redeliver(sqlite_url: str) -> None:
    """A dry run ends with 3 if there is something to repair. All clients behave alike."""
    with running_service(sqlite_url) as running, Client(running.url) as client:
        lastbit = Lastbit(running.url)
        for _ in range(3):
            client.ack(client.open(items=20, sealed=True).ids)
        assert "there is nothing to repair" in lastbit.ok("repair", "1", "--dry-run")
        with contextlib.closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as database, database:
            database.execute("UPDATE item_groups SET resolved = x'ff'")
        assert lastbit.json("repair", "1", "--dry-run", code=3)["after"]["pending"] == 12
        assert client.batch(1).refresh().complete
        text = lastbit.ok("repair", "1")
        for words in ("batch 1  repaired", "was truncated", "state: complete → sealed", "acked: 20 → 8"):
            assert words in text
        assert "redeliver the pending items: lastbit pending 1 --ids" in text
        result = client.batch(2).repair()
        assert (result.needed, result.dry_run, result.groups, result.newly) == (True, False, 1, False)
        assert (result.before, result.after) == (BatchCounts("complete", 20, 0, 0), BatchCounts("sealed", 8, 0, 12))

        async def awaited() -> Repair:
            async with AsyncClient(running.url) as asynchronous:
                return await asynchronous.batch(3).repair()

        assert asyncio.run(awaited()) == dataclasses.replace(
            result, faults=tuple(fault.replace("batch 2", "batch 3") for fault in result.faults)
        )
        assert lastbit.json("repair", "3")["needed"] is False
        assert lastbit.json("verify", "--all")["ok"]


@pytest.mark.parametrize("arguments", [(), ("7", "--all")])
def test_verify_wants_a_batch_or_all(lastbit: Lastbit, arguments: tuple[str, ...]) -> None:
    """Exactly one of the two is required."""
    assert lastbit("verify", *arguments).returncode == 2


def test_the_token_is_sent_and_a_missing_one_is_explained(scripted_service: Any) -> None:
    """The message names the option and the variable."""
    scripted_service.replies((401, {}, {"code": "unauthorized", "detail": "a token is needed", "status": 401}))
    result = Lastbit(scripted_service.url)("status", "7", "--token", "s3cret")
    assert scripted_service.seen[0].headers["authorization"] == "Bearer s3cret"
    assert result.returncode == 1
    assert "LASTBIT_TOKEN" in result.stderr
    assert "s3cret" not in result.stderr


@pytest.mark.parametrize("arguments", [["seal", "catalog-42"], ["seal", "catalog-42", "--json"]])
def test_a_token_that_may_not_list_batches_is_told_to_use_the_number(
    scripted_service: Any, arguments: list[str]
) -> None:
    """The refusal is of the search for the key, not of the command."""
    detail = "this route requires the role read; the token ci has produce"
    scripted_service.replies((403, {}, {"code": "forbidden", "detail": detail, "status": 403}))
    result = Lastbit(scripted_service.url)(*arguments)
    assert result.returncode == 1
    assert f"batches can't be found by their key: {detail}; name the batch by its number" in result.stderr
    assert "403" in result.stderr


def test_a_key_cannot_control_the_terminal(lastbit: Lastbit) -> None:
    """Neither with markup nor with control characters."""
    with Client(lastbit.url) as client:
        batch = client.open(key="[red]x\x1b[2J", labels={"[b]": "\x07"})
    for command in (["status", str(batch.id)], ["list", "--limit", "5"], ["cancel", str(batch.id)]):
        text = lastbit.ok(*command)
        assert "[red]x" in text
        assert "\x1b" not in text
        assert "\x07" not in text


def test_help_imports_nothing_that_only_calls_need() -> None:
    """Importing httpx takes longer than importing everything else."""
    code = "import sys, lastbit.cli; print(*sorted({'httpx', 'asyncio'} & {*sys.modules}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "\n"), result.stderr


def test_the_installed_command_runs() -> None:
    """The entry point that the package declares exists and runs."""
    command = Path(sys.executable).with_name("lastbit")
    result = subprocess.run([command, "--version"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.startswith("lastbit, version ")


# -- the feed


def test_events_are_appended_and_shown(lastbit: Lastbit) -> None:
    """The output says where the feed starts; the same id again is a repeat."""
    id = uuid.uuid4().hex
    first = lastbit.json("append", id, "card.charged", "--key", "order-1", "--data", '{"cents": 1, "of": "[red]x"}')
    assert (first["id"], first["repeated"]) == (id, False)
    assert "appended before" in lastbit.ok("append", id, "card.charged")
    after = str(first["position"] - 1)
    page = lastbit.json("events", "--after", after)
    assert [event["id"] for event in page["events"]] == [id]
    assert page["events"][0]["data"] == {"cents": 1, "of": "[red]x"}
    assert page["events"][0]["at"].endswith("Z")
    assert page["next"] == page["last"] == first["position"]
    line = lastbit.ok("events", "--after", after)
    assert line.startswith(f"{first['position']}  ")
    assert f'card.charged  {id}  order-1  {{"cents": 1, "of": "[red]x"}}' in line
    assert lastbit.ok("events", "--after", after, "--type", "other").strip() == "no events"
    for _ in range(2):
        lastbit.ok("append", uuid.uuid4().hex, "other")
    assert f"continue with --after {first['position']}" in lastbit.ok("events", "--after", after, "--limit", "1")
    assert [event["type"] for event in lastbit.json("events", "--last", "3")["events"]] == [
        *("card.charged", "other", "other")
    ]
    assert lastbit.json("events", "--last", "1000000", "--limit", "1")["events"][0]["position"] == 1
    assert lastbit.json("events", "--last", "0")["events"] == []


def test_the_events_of_a_batch_are_shown(lastbit: Lastbit) -> None:
    """All pages are read, starting at the batch's opening."""
    with Client(lastbit.url) as client:
        batch = client.open(key="nightly", items=1, sealed=True)
        client.append([{"id": uuid.uuid4().hex, "type": "noise"} for _ in range(1000)])
        client.append([{"id": uuid.uuid4().hex, "type": "noise"} for _ in range(200)])
        client.ack(batch.ids)
    types = [event["type"] for event in lastbit.json("events", "--batch", str(batch.id))["events"]]
    assert types == ["batch.opened", "batch.sealed", "batch.completed", "batch.succeeded"]
    assert len(lastbit.json("events", "--type", "noise", "--limit", "1100")["events"]) == 1100


@contextlib.contextmanager
def following(lastbit: Lastbit, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "LASTBIT_URL": lastbit.url}
    command = [sys.executable, "-m", "lastbit", "events", "--follow", *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_following_prints_events_until_it_is_stopped(lastbit: Lastbit, number: int) -> None:
    """A JSON document a line; it ends with whole lines, exit code 0 and nothing on standard error."""
    with Client(lastbit.url) as client:
        client.append_event(id=uuid.uuid4().hex, type="step", data=0)
        with following(lastbit, "--last", "1", "--type", "step", "--json") as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert json.loads(process.stdout.readline())["data"] == 0
            for data in range(1, 4):
                client.append_event(id=uuid.uuid4().hex, type="noise")
                client.append_event(id=uuid.uuid4().hex, type="step", data=data)
                event = json.loads(process.stdout.readline())
                assert (event["type"], event["data"]) == ("step", data)
            process.send_signal(number)
            rest, errors = process.communicate(timeout=30)
            assert (process.returncode, rest, errors) == (0, "", "")


def test_following_ends_at_its_limit_or_when_its_reader_is_gone(lastbit: Lastbit) -> None:
    """A script may wait for one event; a reader that closes the pipe ends the command quietly."""
    with Client(lastbit.url) as client:
        start = client.events(limit=1).last
        batch = client.open(items=1, sealed=True)
        client.ack(batch.ids)
        text = lastbit.ok("events", "--follow", "--after", str(start), "--type", "batch.completed", "--limit", "1")
        assert f"batch:{batch.id}:completed" in text
        with following(lastbit, "--after", str(start)) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert "batch.opened" in process.stdout.readline()
            process.stdout.close()
            while process.poll() is None:
                client.append_event(id=uuid.uuid4().hex, type="step")
            assert process.stderr.read() == ""


def test_a_batch_is_explained(lastbit: Lastbit) -> None:
    """In sentences of at most 80 columns, or as the service's own document: first what holds it up."""
    parent = lastbit.json("open", "--items", "2", "--sealed")["id"]
    child = lastbit.json("open", "--items", "5", "--parent", f"{parent}:0:1")
    assert child["parent"] == f"{parent}:0:1"
    lines = lastbit.ok("explain", str(parent)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"batch {parent}  sealed, not done"
    assert lines[1].startswith("  Some items are nested batches: ")
    text = " ".join(map(str.strip, lines))
    assert f"2 of 2 items are pending: {parent}:0:0 to {parent}:0:1" in text
    assert f"this batch waits for batch {child['id']} (open, 5 pending)" in text
    explanation = lastbit.json("explain", str(parent))
    assert [reason["code"] for reason in explanation["reasons"]] == [
        *("waiting_for_children", "pending", "oldest_untouched_group")
    ]
    assert explanation["reasons"][0]["children"][0]["batch"] == child["id"]
    assert lastbit("explain", "999999").returncode == 1


def test_an_explanation_names_the_commands_that_send_items_again(lastbit: Lastbit) -> None:
    """For what there is to send, and as long as the batch takes acks. A document has none."""
    batch = lastbit.json("open", "--items", "3", "--sealed")["id"]
    failed, pending = f"lastbit redrive {batch}  ", f"lastbit redrive {batch} --pending  "

    def named() -> tuple[bool, bool]:
        text = lastbit.ok("explain", str(batch))
        return failed in text, pending in text

    assert named() == (False, True)
    lastbit.ok("fail", f"{batch}:0:0", "--reason", "slow")
    assert named() == (True, True)
    lastbit.ok("ack", f"{batch}:0:1")
    lastbit.ok("fail", f"{batch}:0:2", "--reason", "slow")
    assert named() == (True, False)
    assert "follow redrives" in lastbit.ok("redrive", str(batch))
    assert "redrive" not in json.dumps(lastbit.json("explain", str(batch)))
    lastbit.ok("ack", f"{batch}:0:0", f"{batch}:0:2")
    assert named() == (False, False)
    batch = lastbit.json("open", "--items", "1")["id"]
    lastbit.ok("cancel", str(batch))
    assert named() == (False, False)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("extend 7 5 -x", "-x"),
        ("extend 7 --idempotence-key k 5", "--idempotence-key"),
        ("tally apply screws robot-7 -3 --tpoic t --offset 1", "--tpoic"),
    ],
)
def test_a_mistyped_option_is_named(lastbit: Lastbit, arguments: str, option: str) -> None:
    """Also by commands that take a negative number, which is no option."""
    result = lastbit(*arguments.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert re.search(rf"No such option:? '?{option}\b", result.stderr)


def test_a_tally_on_the_command_line(lastbit: Lastbit) -> None:
    """Added once, shown, listed, deleted; negative deltas are not options."""
    message = ["--topic", "screws", "--partition", "3", "--offset", "17"]
    assert lastbit.ok("tally", "apply", "screws", "robot-7", "5", *message) == "added\n"
    assert lastbit.ok("tally", "apply", "screws", "robot-7", "5", *message).startswith("not added: this message")
    child = lastbit.json("tally", "apply", "screws", "robot-7", "-2", *message, "--child", "1", "--generation", "4")
    assert child == {"applied": 1, "repeated": 0}
    text = lastbit.ok("tally", "value", "screws", "robot-7")
    assert text.splitlines() == [
        "3 robot-7",
        "  5 of screws, partition 3, up to offset 17",
        "  -2 of screws, partition 3, generation 4, up to offset 17, child 1",
    ]
    assert lastbit.json("tally", "list", "screws", "--prefix", "robot-", "--limit", "1") == {
        "totals": [{"key": "robot-7", "value": 3}]
    }
    assert "robot-7" in lastbit.ok("tally", "list", "screws")
    assert lastbit.ok("tally", "list", "screws", "--prefix", "x") == "no key begins with this\n"
    assert lastbit.ok("tally", "value", "screws", "robot-8") == "0 robot-8\n"
    assert "is deleted" in lastbit.ok("tally", "delete", "screws")
    for command in (["list", "screws"], ["value", "screws", "robot-7"], ["delete", "screws"]):
        result = lastbit("tally", *command)
        assert (result.returncode, result.stdout) == (1, "")
        assert "there is no tally 'screws'" in result.stderr
    assert lastbit("tally", "apply", "screws", "robot-7", "5").returncode == 2
    assert lastbit("tally", "value", "a tally", "k").returncode == 2


WIDE = [
    ("complete", 12_345_678, 12_345_678, 0),
    ("open", 999_999_999_999, 999_999_999_998, 1),
]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_list_never_cuts_numbers(width: int) -> None:
    """Texts are shortened first, then less important columns are dropped; number, state and progress are always
    shown."""
    batches = [
        Batch.from_json(
            {
                **BATCH,
                "id": 4_000_000 + place,
                "key": "k" * 40,
                "labels": {"team": "search", "region": "north", "tier": "gold"},
                "state": state,
                "items": items,
                "acked": acked - failed,
                "failed": failed,
                "pending": items - acked,
            }
        )
        for place, (state, items, acked, failed) in enumerate(WIDE)
    ]
    console = Console(width=width, file=io.StringIO(), emoji=False)
    console.print(batch_table(batches, width))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for place, words in enumerate((["4000000", "complete", "100 %"], ["4000001", "open", "99.99 %"])):
        (line,) = [line for line in lines if words[0] in line]
        assert all(word in line for word in words), line
        numbers = re.findall(r"[0-9][0-9,]{4,}", line)
        items = f"{WIDE[place][1]:,}"
        assert set(numbers) <= {words[0], items}, line
        assert (items in line) is (width >= 120), line
    assert any("k" * 40 in line for line in lines) is (width >= 200)


def test_user_texts_are_printed_unchanged(lastbit: Lastbit) -> None:
    """No emoji for `:fire:`, no style for `[bold]`; control characters are escaped, and a reason keeps its lines."""
    batch = lastbit.json("open", "--key", "job:fire:1", "--label", "a:[red]b[/]", "--items", "1")
    number = str(batch["id"])
    lastbit.ok("fail", f"{number}:0:0", "--reason", "Traceback:\n  at :bug: 👩\u200d🔧\n\x1b[31mred\x07\u202e")
    for command in (
        ["status", number],
        ["list", "--key", "job:fire:1"],
        ["seal", number],
        ["events", "--batch", number],
    ):
        assert "job:fire:1" in lastbit.ok(*command), command
    assert "[red]b[/]" in lastbit.ok("status", number)
    assert "Traceback:\n  at :bug: 👩\u200d🔧\n\\x1b[31mred\\x07\\u202e\n" in lastbit.ok("pending", number, "--failed")


def test_a_batch_can_be_named_by_its_key(lastbit: Lastbit) -> None:
    """If several batches have the key, they are listed instead."""
    key = f"catalog/{uuid.uuid4()}"
    first = lastbit.json("open", "--key", key)["id"]
    assert lastbit.json("status", key)["id"] == first
    assert lastbit.json("extend", key, "2")["batch"] == first
    second = lastbit.json("open", "--key", key)["id"]
    ambiguous = lastbit("status", key)
    assert ambiguous.returncode == 1
    lines = ambiguous.stderr.splitlines()
    assert "several batches have the key" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == [str(second), str(first)]
    digits = f"2026{uuid.uuid4().int}"
    batch = lastbit.json("open", "--key", digits)["id"]
    assert lastbit("status", digits).returncode == 2
    assert lastbit.json("status", f"key={digits}")["id"] == batch
    unknown = lastbit("status", "nobody's")
    assert unknown.returncode == 1
    assert 'no batch has the key "nobody\'s"' in unknown.stderr
    an_item = lastbit("status", "7:0:42")
    assert "no batch has the key '7:0:42'; an item's id begins with the number of its batch, here 7" in an_item.stderr
