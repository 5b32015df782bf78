"""What the command line prints: user data unchanged, errors as JSON, questions before an end."""

from __future__ import annotations

import json
import shlex
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastbit import Client, chains
from lastbit.cli.output import encoded, plain_text, safe, styled
from tests.sdk.terminals import on_terminal
from tests.sdk.test_cli import Lastbit

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


# User data


@given(st.text(alphabet="\\[]/abold:=1 \ufdd0\ufdd1", max_size=12))
def test_markup_of_users_is_text(text: str) -> None:
    """Whatever stands around it."""
    line = styled(f"[bold]a[/]{safe(text)}[dim]b[/]{safe(text)}")
    shown = plain_text(text)
    assert line.plain == f"a{shown}b{shown}"
    assert [(span.start, span.end) for span in line.spans] == [(0, 1), (1 + len(shown), 2 + len(shown))]


@given(st.text(max_size=40))
def test_json_has_no_character_that_acts_on_a_terminal(text: str) -> None:
    """And decodes to the same text."""
    document = encoded({text: text})
    assert document == plain_text(document)
    assert json.loads(document) == {text: text}


def test_user_data_is_printed_unchanged_by_every_command(lastbit: Lastbit, client: Client) -> None:
    """No emoji, no markup, no control characters, and a backslash at the end stays one; nothing is cut where it is
    piped."""
    long_value = "v" * 500
    batch = client.open(key=HOSTILE, labels={"l\x1b[2J": HOSTILE + long_value}, items=2, sealed=True)
    number = str(batch.id)
    client.fail(batch.ids[:1], f"{HOSTILE}\nsecond line\\")
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
        assert result.stdout == plain_text(result.stdout, keep="\n"), command
        text = lastbit(*command, "--json").stdout
        assert text == plain_text(text, keep="\n"), command
    assert f"{SHOWN}\nsecond line\\\n" in lastbit.good("pending", number, "--failed")
    assert f"l\\x1b[2J:{SHOWN}{long_value}\n" in lastbit.good("status", number)
    assert lastbit.json("status", number)["key"] == HOSTILE
    screen = on_terminal(lastbit.url, ["status", number])
    assert SHOWN in screen.text
    assert "\x1b[2J" not in screen.raw
    missing = lastbit("status", f"no {HOSTILE}")
    assert missing.stderr == plain_text(missing.stderr, keep="\n")


# Asking first


@pytest.mark.parametrize("command", ["cancel", "delete"])
def test_a_terminal_is_asked_before_the_end_of_a_batch(lastbit: Lastbit, client: Client, command: str) -> None:
    """With the batch's key and counts; no is the default, and changes nothing. A script is not asked."""
    batch = client.open(key=f"unwanted :fire: {command}", items=4)
    client.ack(batch.ids[:1])
    client.fail(batch.ids[1:3], "broken")
    number = str(batch.id)
    screen = on_terminal(lastbit.url, [command, number], typed="\n")
    counts = "(open, 4 items, 1 acked, 2 failed, 1 pending)?"
    assert f"batch {number} unwanted :fire: {command} {counts}" in screen.text
    assert (screen.code, "nothing was changed" in screen.text) == (1, True)
    assert batch.refresh().state == "open"
    assert on_terminal(lastbit.url, [command, number], typed="y\n").code == 0
    assert lastbit("seal", number).returncode == 1
    other = str(client.open(items=1).id)
    screen = on_terminal(lastbit.url, [command, other, "--yes"])
    assert (screen.code, "[y/N]" in screen.text) == (0, False)
    lastbit.good(command, str(client.open(items=1).id))


# Errors as JSON


def test_errors_are_json_for_a_script(lastbit: Lastbit, client: Client, unused_port: int) -> None:
    """One document on standard error, nothing on standard output, and the same exit codes; wherever `--json` stands."""

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
    for before in (["--json", "status", "07"], ["--json", "webhooks"]):
        result = lastbit(*before)
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
    assert problem("tally", "list", "t", code=1, url=url)["error"] == "ServiceUnreachable"


def test_an_option_value_after_two_dashes_is_no_request_for_json(lastbit: Lastbit) -> None:
    """`--` ends the options."""
    result = lastbit("ack", "--", "--json")
    assert result.returncode == 2
    assert not result.stderr.startswith("{")


def test_an_ambiguous_key_lists_its_candidates(lastbit: Lastbit, client: Client) -> None:
    """The newest twenty, and how to see the others. Nothing is done."""
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
