"""What the command line says and keeps when a command ends with an error."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lastbit import Client, LastbitError, Retry
from lastbit.cli.faults import ending_without_a_reader
from tests.sdk.conftest import LOST, Reply, ScriptedService, Seen
from tests.sdk.terminals import on_terminal
from tests.sdk.test_cli import Lastbit
from tests.sdk.test_protocol import BATCH
from tests.support.servers import ROOT
from tests.support.threads import no_more_threads

UNAVAILABLE = (503, {}, {"code": "unavailable", "detail": "the database is down", "status": 503})


@pytest.fixture
def lastbit(service_url: str) -> Lastbit:
    return Lastbit(service_url)


def process(url: str, *arguments: str | bytes, environment: Mapping[str, str] | None = None) -> tuple[Any, Any]:
    """The command line of a `lastbit` whose streams or encoding matter, and the options of its process."""
    variables = {**os.environ, "LASTBIT_URL": url, "NO_PROXY": "*", **(environment or {})}
    variables.pop("LASTBIT_TOKEN", None)
    return [sys.executable, "-m", "lastbit", *arguments], {"env": variables, "cwd": ROOT}


# Acks that stop in the middle


def test_an_ack_that_stops_in_the_middle_shows_what_it_did(lastbit: Lastbit) -> None:
    """Also that it completed a batch: no later call says so."""
    with Client(lastbit.url) as client:
        small, large = client.open(items=1, sealed=True), client.open(items=10_000)
    result = lastbit("ack", small.ids[0], "-", stdin="7:0")
    assert result.returncode == 2
    assert result.stdout == f"1 acked\nbatch {small.id} is complete: this call completed it\n"
    assert "The first 1 ids were sent; sending them again is safe.\n" in result.stderr
    result = lastbit("fail", stdin="\n".join([*large.ids, "7:0"]))
    assert (result.returncode, result.stdout) == (2, "10,000 failed\n")
    result = lastbit("ack", "7:0:0", "7:0")
    assert (result.returncode, result.stdout) == (2, "")


def test_an_ack_whose_input_breaks_shows_what_it_did(lastbit: Lastbit, tmp_path: Path) -> None:
    """Standard input that can't be read; with --json the error has the partial result."""
    for as_json in (False, True):
        with Client(lastbit.url) as client:
            batch = client.open(items=1, sealed=True)
        command, options = process(lastbit.url, "ack", batch.ids[0], "-", *(["--json"] if as_json else []))
        with (tmp_path / "written").open("w") as written:
            result = subprocess.run(command, stdin=written, capture_output=True, text=True, timeout=60, **options)
        assert result.returncode == 1
        assert "standard input or output failed: Bad file descriptor" in result.stderr
        if as_json:
            assert json.loads(result.stderr)["partial"]["completed"][0]["batch"] == batch.id
        else:
            assert f"1 acked\nbatch {batch.id} is complete: this call completed it\n" == result.stdout


def test_an_interrupted_ack_shows_what_it_did(lastbit: Lastbit) -> None:
    """With the exit code of Ctrl-C."""
    with Client(lastbit.url) as client:
        batch = client.open(items=1, sealed=True)
        command, options = process(lastbit.url, "ack", batch.ids[0], "-")
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, text=True, **streams, **options) as reading:
            assert reading.stdin is not None
            reading.stdin.write("\n" * 300_000)  # more than a pipe holds, so the command has sent the id and reads on
            reading.stdin.flush()
            reading.send_signal(signal.SIGINT)
            stdout, stderr = reading.communicate(timeout=30)
    assert reading.returncode == 130
    assert stdout == f"1 acked\nbatch {batch.id} is complete: this call completed it\n"
    assert stderr == "The first 1 ids were sent; sending them again is safe.\n"


def test_a_closed_standard_input_is_refused_before_anything_is_sent(lastbit: Lastbit) -> None:
    """The ids on the command line are not acked first."""
    with Client(lastbit.url) as client:
        batch = client.open(items=1)
        command, options = process(lastbit.url, "ack", batch.ids[0], "-")
        shell = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
        result = subprocess.run(shell, capture_output=True, text=True, timeout=60, **options)
        assert result.returncode == 2
        assert "standard input is closed" in result.stderr
        assert batch.refresh().acked == 0


# Lost responses


@pytest.mark.parametrize("arguments", [["open", "--items", "2"], ["extend", "7", "2"], ["redrive", "7"]])
@pytest.mark.parametrize("reply", [LOST, UNAVAILABLE])
def test_after_a_lost_response_the_error_has_the_idempotency_key(
    scripted_service: ScriptedService, arguments: list[str], reply: Reply
) -> None:
    """The key that was sent; without it a second run would do it twice. A user who gave a key has it."""
    scripted_service.replies(reply)
    lastbit = Lastbit(scripted_service.url)
    result = lastbit(*arguments)
    keys = {request.headers["idempotency-key"] for request in scripted_service.seen}
    assert result.returncode == 1
    (key,) = re.findall(
        r"\nIt may have been carried out\. To repeat it safely, add --idempotency-key (\S+)\n", result.stderr
    )
    assert keys == {key}
    problem = json.loads(lastbit(*arguments, "--json").stderr)
    assert problem["idempotency_key"] == scripted_service.seen[-1].headers["idempotency-key"]
    assert f"add --idempotency-key {problem['idempotency_key']}" in problem["message"]
    assert "carried out" not in lastbit(*arguments, "--idempotency-key", "mine").stderr


def test_a_refused_request_was_not_carried_out(lastbit: Lastbit, unused_port: int) -> None:
    """Nor one that was never sent, or that found no service."""
    assert "carried out" not in Lastbit(f"http://127.0.0.1:{unused_port}")("open").stderr
    for arguments in (["extend", "999999", "1"], ["open", "--parent", "x"], ["extend", "no such key", "1"]):
        result = lastbit(*arguments)
        assert result.returncode in (1, 2)
        assert "carried out" not in result.stderr


def test_the_repeat_of_a_lost_open_returns_the_batch(lastbit: Lastbit, scripted_service: ScriptedService) -> None:
    """Also with a deadline from now, which would be another one in the second run: the error names the time."""
    scripted_service.replies(LOST)
    arguments = ["open", "--items", "2", "--deadline", "2h"]
    result = Lastbit(scripted_service.url)(*arguments)
    added = re.findall(r"To repeat it safely, add (.*)\n", result.stderr)[0].split()
    assert added[::2] == ["--idempotency-key", "--deadline"]
    with Client(lastbit.url) as client:
        deadline = datetime.fromisoformat(scripted_service.seen[-1].body["deadline"])
        opened = client.open(items=2, deadline=deadline, idempotency_key=added[1])
    repeated = lastbit.json(*arguments, *added)
    assert (repeated["id"], repeated["replayed"]) == (opened.id, True)
    problem = json.loads(Lastbit(scripted_service.url)(*arguments, "--json").stderr)
    assert datetime.fromisoformat(problem["deadline"]) > deadline


UNKNOWN = (503, {}, {"status": 503, "code": "unavailable", "detail": "the commit's outcome is unknown"})


@pytest.mark.parametrize("reply", [LOST, UNKNOWN], ids=["lost", "unknown"])
def test_a_command_without_a_key_says_that_it_may_have_been_carried_out(
    scripted_service: ScriptedService, reply: Any
) -> None:
    """It has no option for an idempotency key."""
    scripted_service.replies(reply)
    arguments = ["webhooks", "create", "https://example.com/hook"]
    result = Lastbit(scripted_service.url)(*arguments)
    assert result.returncode == 1
    assert result.stderr.endswith("\nIt may have been carried out: check that before you repeat it.\n")
    problem = json.loads(Lastbit(scripted_service.url)(*arguments, "--json").stderr)
    assert problem["message"].endswith(" It may have been carried out: check that before you repeat it.")


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_open_has_its_idempotency_key(scripted_service: ScriptedService, as_json: bool) -> None:
    """Ctrl-C while the command waits for the response."""
    reading: subprocess.Popen[str]

    def interrupted(request: Seen) -> Reply:
        reading.send_signal(signal.SIGINT)
        reading.wait(30)
        return LOST

    scripted_service.reply = interrupted
    command, options = process(scripted_service.url, "open", *(["--json"] if as_json else []))
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as reading:
        stdout, stderr = reading.communicate(timeout=60)
    key = scripted_service.seen[0].headers["idempotency-key"]
    assert (reading.returncode, stdout) == (130, "")
    sentence = f"It may have been carried out. To repeat it safely, add --idempotency-key {key}"
    if as_json:
        assert json.loads(stderr) == {"error": "Interrupted", "message": sentence, "idempotency_key": key}
    else:
        assert stderr == f"{sentence}\n"


# Verification of all batches


def test_a_verification_that_fails_keeps_what_it_found(scripted_service: ScriptedService) -> None:
    """The inconsistent batches so far, and the batch at which it stopped."""
    batches = [{**BATCH, "id": number} for number in (9, 8, 7)]
    report = {"ok": True, "items": 5, "acked": 4, "failed": 1, "pending": 0, "counted": {"acked": 4, "failed": 1}}
    report["faults"] = []
    wrong = {**report, "ok": False, "counted": {"acked": 3, "failed": 1}}
    failed = (500, {}, {"code": "internal_error", "detail": "broken", "status": 500})
    replies: dict[str, Reply] = {"9": (200, {}, wrong), "8": (200, {}, report), "7": failed}

    def reply(request: Seen) -> Reply:
        found = re.search("/batches/([0-9]+)", request.path)
        return replies[found[1]] if found else (200, {}, {"batches": batches, "next": None})

    scripted_service.reply = reply
    lastbit = Lastbit(scripted_service.url)
    result = lastbit("verify", "--all")
    assert result.returncode == 1
    assert "batch 9  inconsistent" in result.stdout
    assert "Stopped at batch 7, after 2 batches, 10 items: 1 inconsistent\n" in result.stderr
    result = lastbit("verify", "--all", "--json")
    assert (result.returncode, result.stdout) == (1, "")
    problem = json.loads(result.stderr)
    assert (problem["code"], problem["stopped_at"]) == ("internal_error", 7)
    assert (problem["batches"], problem["items"], problem["gone"]) == (2, 10, 0)
    assert [(one["batch"], one["counted"]["acked"]) for one in problem["inconsistent"]] == [(9, 3)]


def test_a_verification_whose_list_fails_stopped_at_no_batch(scripted_service: ScriptedService) -> None:
    """There was no batch yet."""
    scripted_service.replies((500, {}, {"code": "internal_error", "detail": "broken", "status": 500}))
    lastbit = Lastbit(scripted_service.url)
    assert "Stopped after 0 batches, 0 items: none is inconsistent\n" in lastbit("verify", "--all").stderr
    problem = json.loads(lastbit("verify", "--all", "--json").stderr)
    assert (problem["stopped_at"], problem["inconsistent"]) == (None, [])


# Arguments that no request can have


@pytest.mark.parametrize(
    "command",
    [
        *("pending 7", "events", "events --follow", "list", "webhooks deliveries 7", "tally list t"),
        *("processes instances p", "commands p", "reasons 7"),
    ],
)
def test_a_limit_that_no_list_can_reach_is_refused(lastbit: Lastbit, command: str) -> None:
    """In plain words."""
    for limit in ("9" * 20, "9007199254740992", "+" + "9" * 20):
        result = lastbit(*command.split(), "--limit", limit)
        assert (result.returncode, result.stdout) == (2, "")
        reason = "from 1 to 1000, not" if command == "reasons 7" else "is too large: a limit is below 2^53"
        assert reason in result.stderr
        assert "'--limit'" in result.stderr


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--url", [b"status", b"7", b"--url", b"http://\xff"]),
        ("--url", [b"--url", b"http://\xff", b"status", b"7"]),
        ("--prefix", [b"token", b"new", b"--role", b"read", b"--prefix", b"\xff"]),
        ("--key", [b"open", b"--key", b"bad\xff"]),
        ("--label", [b"open", b"--label", b"a:b", b"--label", b"a\xff:b"]),
        ("--key-prefix", [b"list", b"--key-prefix", b"\xff"]),
        ("BATCH", [b"status", b"bad\xff"]),
    ],
)
@pytest.mark.parametrize("end", [[], [b"--json"]])
def test_an_option_that_is_not_utf8_is_refused(option: str, arguments: list[bytes], end: list[bytes]) -> None:
    """The error names it."""
    command, options = process("http://127.0.0.1:1", *arguments, *end)
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"Invalid value for '{option}': expected text in UTF-8" in result.stderr


def test_an_address_in_the_environment_that_is_not_utf8_is_refused() -> None:
    """As any other text that is not an address."""
    command, options = process("http://\udcff", "status", "7")
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert result.returncode == 2
    assert "is not the address of a service" in result.stderr


# Closed pipes


@pytest.mark.parametrize(
    "line",
    ["pending 7 --ids", "pending 7", "list", "list --json", "status 7", "status 7 --json", "events", "--help"],
)
def test_a_reader_that_has_read_enough_is_no_refusal(lastbit: Lastbit, line: str) -> None:
    """A closed pipe ends the command quietly, with the exit code of SIGPIPE."""
    batch = str(lastbit.json("open", "--items", "3")["id"])
    command, options = process(lastbit.url, *(batch if word == "7" else word for word in line.split()))
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, **options)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_command_that_may_start_no_thread_does_without_looking_at_the_pipe() -> None:
    """It is ended by the next line that it prints."""
    with no_more_threads(), ending_without_a_reader():
        pass


@pytest.mark.parametrize("arguments", [["frobnicate"], ["status", "no such key"], ["status", "07", "--json"]])
def test_an_error_without_a_reader_ends_with_the_code_of_a_closed_pipe(lastbit: Lastbit, arguments: list[str]) -> None:
    """If standard error goes to the closed pipe too."""
    command, options = process(lastbit.url, *arguments)
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(command, stdout=writing, stderr=writing, timeout=60, **options)
    os.close(writing)
    assert result.returncode == 141


@pytest.mark.parametrize("arguments", ["watch BATCH", "watch BATCH --json", "events --batch BATCH --after 0 --follow"])
def test_a_command_that_waits_ends_when_its_reader_does(lastbit: Lastbit, arguments: str) -> None:
    """At once: not with its next line, of which there may be none."""
    with Client(lastbit.url) as client:
        batch = client.open(items=1)
    command, options = process(lastbit.url, *arguments.replace("BATCH", str(batch.id)).split())
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as waiting:
        assert waiting.stdout is not None
        if "--json" not in arguments:
            assert str(batch.id) in waiting.stdout.readline()
        waiting.stdout.close()
        try:
            assert waiting.wait(15) == 141
        finally:
            waiting.kill()
        assert waiting.stderr is not None
        assert waiting.stderr.read() == ""


# Like cases


def test_a_retry_without_parked_events_says_so(scripted_service: ScriptedService) -> None:
    scripted_service.replies((200, {}, {"retrying": 0}))
    assert Lastbit(scripted_service.url).ok("processes", "retry", "p", "i") == "none of its events is parked\n"


def test_a_redelivery_without_dead_deliveries_says_so(scripted_service: ScriptedService) -> None:
    scripted_service.replies((200, {}, {"redelivered": 0}))
    assert Lastbit(scripted_service.url).ok("webhooks", "redeliver", "1") == "no dead deliveries\n"


def test_a_path_that_the_service_refuses_is_no_wrong_use(scripted_service: ScriptedService) -> None:
    """Whether it doesn't know the path or its method; an older release may not."""
    for status, code in ((404, "not_found"), (405, "method_not_allowed")):
        scripted_service.replies((status, {}, {"code": code, "detail": "no", "status": status}))
        assert Lastbit(scripted_service.url)("seal", "7").returncode == 1


# Encodings and terminals


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_keeps_all_characters_in_any_encoding(lastbit: Lastbit, encoding: str) -> None:
    """On both streams, also in a document that is written incrementally."""
    key, reason = "naïve-日本-🎉", "größer\x7f"
    with Client(lastbit.url) as client:
        batch = client.open(key=key, items=1)
        client.fail(batch.ids, reason)

    def output(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        command, options = process(lastbit.url, *arguments, "--json", environment={"PYTHONIOENCODING": encoding})
        return subprocess.run(command, capture_output=True, timeout=60, **options)

    assert json.loads(output("status", str(batch.id)).stdout)["key"] == key
    ranges = json.loads(output("pending", str(batch.id), "--failed").stdout)["ranges"]
    assert list(ranges[0]["reasons"].values()) == [reason]
    assert f"no {key}" in json.loads(output("status", f"no {key}").stderr)["message"]
    assert ("日本" in output("status", str(batch.id)).stdout.decode()) == (encoding == "utf-8")


@pytest.mark.parametrize("arguments", [["status", "1", "\x1b[31mfoo\x07"], ["status", "--\x1b[31mfoo\x07"]])
def test_a_usage_error_cannot_control_the_terminal(lastbit: Lastbit, arguments: list[str]) -> None:
    """It quotes what was typed, escaped."""
    screen = on_terminal(lastbit.url, arguments)
    assert screen.code == 2
    assert r"\x1b[31mfoo\x07" in screen.raw
    assert "\x1b[31mfoo" not in screen.raw
    assert "\x07" not in screen.raw
    assert "Usage: " in screen.text


def test_a_label_cannot_be_set_and_removed_at_once(lastbit: Lastbit) -> None:
    """The error names the label, and nothing is changed."""
    batch = str(lastbit.json("open", "--label", "a:b")["id"])
    result = lastbit("update", batch, "--label", "a:c", "--label", "x:y", "--remove-label", "a")
    assert (result.returncode, result.stdout) == (2, "")
    assert "the label 'a' is in --label and in --remove-label" in result.stderr
    assert lastbit.json("status", batch)["labels"] == {"a": "b"}


# Questions and secrets


def test_a_command_that_cannot_ask_does_nothing(lastbit: Lastbit) -> None:
    """On a terminal whose standard error is redirected, as the manual says to do with JSON."""
    batch = lastbit.json("open", "--items", "1")["id"]
    leader, follower = pty.openpty()
    result = subprocess.run(
        [sys.executable, "-m", "lastbit", "delete", str(batch)],
        env={**os.environ, "LASTBIT_URL": lastbit.url},
        stdin=follower,
        capture_output=True,
        text=True,
        timeout=60,
    )
    os.close(leader)
    os.close(follower)
    assert (result.returncode, result.stdout) == (2, "")
    assert "standard error is redirected: add --yes" in result.stderr
    assert lastbit.json("status", str(batch))["pending"] == 1


@pytest.mark.parametrize("end", ["", "?x", " x"], ids=["unreachable", "with a query", "with a blank"])
def test_a_password_in_the_address_is_in_no_error(unused_port: int, end: str) -> None:
    """Neither in its text nor in its document."""
    lastbit = Lastbit(f"http://me:p4ss@word@127.0.0.1:{unused_port}{end}")
    for options in ((), ("--json",)):
        result = lastbit("status", "7", *options)
        assert f"http://me:***@127.0.0.1:{unused_port}" in result.stderr
        assert "p4ss" not in result.stderr + result.stdout
        assert "word" not in result.stderr + result.stdout


@pytest.mark.parametrize("status", [204, 302, 404, 500])
def test_a_password_is_in_no_error_of_an_answer(scripted_service: ScriptedService, status: int) -> None:
    """Of a gateway, or of other software."""
    scripted_service.replies((status, {}, {}))
    url = scripted_service.url.replace("//", "//me:p4ss@")
    with Client(url, retry=Retry(attempts=1)) as client, pytest.raises(LastbitError) as caught:
        client.batch(7).refresh()
    assert "p4ss" not in f"{caught.value} {caught.value!r} {client!r}"
    assert "me:***@127.0.0.1" in str(caught.value)
