"""Acting on all batches that filters choose, by the command line, and finding failures.

What could go wrong: a batch is changed that the user has not counted, or that no longer matches; a batch that came back
to life is deleted; a run that was killed, or whose answer was lost, asks for items twice when it is run again; two
operators get in each other's way; a tenant acts on another's batches.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from lastbit import Client, tokens
from lastbit.tokens import Role
from tests.sdk.conftest import LOST, Reply, ScriptedService, Seen
from tests.sdk.terminals import on_terminal
from tests.sdk.test_cli import Lastbit
from tests.support.servers import ROOT, running_service, sqlite_file


@pytest.fixture
def lastbit(service_url: str) -> Lastbit:
    return Lastbit(service_url)


@pytest.fixture
def client(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client:
        yield client


@pytest.fixture
def key() -> str:
    """The key of this test's batches."""
    return uuid.uuid4().hex


@pytest.fixture
def proxy(scripted_service: ScriptedService, service_url: str) -> ScriptedService:
    """Passes requests on to the service, so that a test can act between two of them."""

    def pass_on(request: Seen) -> Reply:
        headers = {name: request.headers[name] for name in ("idempotency-key",) if name in request.headers}
        body = {} if request.body is None else {"json": request.body}
        answer = httpx.request(request.method, service_url + request.path, headers=headers, timeout=60, **body)
        return answer.status_code, dict(_own(answer)), None if answer.status_code == 204 else answer.json()

    scripted_service.reply = pass_on
    return scripted_service


def _own(answer: httpx.Response) -> Iterator[tuple[str, str]]:
    for name, value in answer.headers.items():
        if name in ("content-type", "idempotency-replayed", "retry-after"):
            yield name, value


def states(client: Client, key: str) -> list[str]:
    """The states of the batches, the oldest first."""
    return [batch.state for batch in client.batches(key=key)][::-1]


def redrives(client: Client, batch: int) -> int:
    return sum(event.type == "batch.redrive" for event in client.events(batch=batch, limit=100).events)


def some(client: Client, key: str) -> list[int]:
    """An open batch, a sealed one with a failure, a complete one with a failure, a cancelled one, an open one."""
    batches = [client.open(key=key, items=2) for _ in range(5)]
    for batch in batches[1:3]:
        client.fail(batch.ids[0], "disk is full")
        batch.seal()
    client.ack(batches[2].ids[1])
    batches[3].cancel()
    return [batch.id for batch in batches]


@pytest.mark.parametrize(
    ("command", "count", "after"),
    [
        ("cancel", 3, ["cancelled", "cancelled", "complete", "cancelled", "cancelled"]),
        ("cancel --state sealed", 1, ["open", "cancelled", "complete", "cancelled", "open"]),
        ("cancel --failed", 1, ["open", "cancelled", "complete", "cancelled", "open"]),
        ("cancel --unchanged-for 1h", 0, ["open", "sealed", "complete", "cancelled", "open"]),
        ("reopen", 1, ["open", "sealed", "complete", "open", "open"]),
        ("reopen --state expired", 0, ["open", "sealed", "complete", "cancelled", "open"]),
        ("redrive", 2, ["open", "sealed", "complete", "cancelled", "open"]),
        ("redrive --outcome failed", 1, ["open", "sealed", "complete", "cancelled", "open"]),
        ("redrive --pending", 3, ["open", "sealed", "complete", "cancelled", "open"]),
        ("delete --state cancelled", 1, ["open", "sealed", "complete", "open"]),
        ("delete", 5, []),
    ],
)
def test_an_action_on_the_batches_that_filters_choose(
    lastbit: Lastbit, client: Client, key: str, command: str, count: int, after: list[str]
) -> None:
    other = client.open(items=1)
    some(client, key)
    report = lastbit.json(*command.split(), "--key", key, "--yes")
    counts = {name: report[name] for name in ("matched", "acted", "skipped", "refused", "later")}
    assert counts == {"matched": count, "acted": count, "skipped": {}, "refused": 0, "later": 0}
    assert states(client, key) == after
    assert other.refresh().state == "open"


def test_a_redrive_of_a_reason_skips_batches_that_failed_for_others(lastbit: Lastbit, client: Client, key: str) -> None:
    ids = some(client, key)
    client.fail(f"{ids[4]}:0:0", "no picture")
    text = lastbit.ok("redrive", "--key", key, "--reason", "disk is full", "--note", "it is back", "--yes")
    assert text.splitlines()[:2] == [
        "2 batches redriven",
        "1 skipped, which changed meanwhile or don't need it: 1 with nothing failed to ask for",
    ]
    assert [redrives(client, id) for id in ids] == [0, 1, 1, 0, 0]


def test_a_terminal_asks_for_the_number(lastbit: Lastbit, client: Client, key: str) -> None:
    """It shows what is chosen first; another number, or none, changes nothing."""
    some(client, key)
    for answer in ("2\n", "\n", "\x04"):
        screen = on_terminal(lastbit.url, ["cancel", "--key", key], typed=answer, after="to confirm: ")
        assert "Cancel 3 batches (2 open, 1 sealed) with 5 pending items?\nLater acks are rejected.\n" in screen.text
        assert "nothing was changed" in screen.text
        assert screen.code == 1
    assert states(client, key).count("cancelled") == 1
    screen = on_terminal(lastbit.url, ["cancel", "--key", key], typed="3\n", after="Type 3 to confirm: ")
    assert (screen.code, "3 batches cancelled" in screen.text) == (0, True)
    assert states(client, key).count("cancelled") == 4
    assert lastbit.ok("cancel", "--key", key, "--yes") == "no batch matches\n"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("cancel", "expected a BATCH, or filters that choose batches"),
        ("cancel 7 --state open", "BATCH and filters exclude each other"),
        ("cancel --all", "not a terminal: add --yes"),
        ("delete --all --state open --yes", "--all and filters exclude each other"),
        ("cancel --state complete --yes", "only batches that are open or sealed can be cancelled"),
        ("reopen --unchanged-for 1h --yes", "--unchanged-for: expected no state but open or sealed"),
        ("cancel --outcome failed --yes", "--outcome: expected no state but complete beside it"),
    ],
)
def test_a_selection_that_is_none_is_refused(lastbit: Lastbit, command: str, problem: str) -> None:
    result = lastbit(*command.split())
    assert (result.returncode, problem in result.stderr) == (2, True), result.stderr


def _at(service: ScriptedService, is_the_one: Callable[[Seen], bool], act: Callable[[], Any]) -> None:
    """Do this once, before the first such request is passed on."""
    pass_on, waiting = service.reply, [act]

    def reply(request: Seen) -> Reply:
        if waiting and is_the_one(request):
            waiting.pop()()
        return pass_on(request)

    service.reply = reply


def test_a_selection_that_changes_between_the_count_and_the_act(
    proxy: ScriptedService, client: Client, key: str
) -> None:
    """What was opened meanwhile stays; what no longer matches is left alone, and said."""
    batches = [client.open(key=key, items=1, labels={"n": str(n)}) for n in range(5)]

    def change() -> None:
        client.ack(batches[0].ids)
        batches[0].seal()
        batches[1].delete()
        batches[2].update(labels={"keep": "yes"})
        client.open(key=key, items=1)

    _at(proxy, lambda request: "limit=100&" in f"{request.path}&", change)
    text = Lastbit(proxy.url).ok("cancel", "--key", key, "--yes")
    assert text.splitlines() == [
        "3 batches cancelled",
        "2 skipped, which changed meanwhile or don't need it: 2 no longer matching",
        "1 more batch matched later: run the command again for it",
    ]
    assert states(client, key) == ["complete", "cancelled", "cancelled", "cancelled", "open"]


def test_a_batch_that_comes_back_before_its_deletion_stays(proxy: ScriptedService, client: Client, key: str) -> None:
    """After it was listed, which no filter sees: the service judges its state in the same transaction."""
    batches = [client.open(key=key, items=1) for _ in range(3)]
    for batch in batches:
        batch.cancel()
    path = f"/v1/batches/{batches[1].id}?"
    _at(proxy, lambda request: request.method == "DELETE" and request.path.startswith(path), batches[1].reopen)
    text = Lastbit(proxy.url).ok("delete", "--key", key, "--state", "cancelled", "--yes")
    assert text.splitlines() == [
        "2 batches deleted",
        "1 skipped, which changed meanwhile or don't need it: 1 in another state",
    ]
    assert states(client, key) == ["open"]


@pytest.mark.parametrize(("command", "method"), [("redrive", "POST"), ("cancel", "POST"), ("delete", "DELETE")])
def test_a_run_that_is_killed_in_the_middle_goes_on(
    proxy: ScriptedService, client: Client, key: str, command: str, method: str
) -> None:
    """Its third call is carried out, and it is killed before the answer. A second run, with the same key, has no effect
    on what is done."""
    batches = [client.open(key=key, items=1) for _ in range(5)]
    for batch in batches:
        client.fail(batch.ids)
    pass_on, calls = proxy.reply, 0
    running: list[subprocess.Popen[str]] = []

    def reply(request: Seen) -> Reply:
        nonlocal calls
        answer = pass_on(request)
        calls += request.method == method
        if calls == 3 and running:
            running.pop().kill()
        return answer

    proxy.reply = reply
    options = ["--key", key, "--yes", *(["--idempotency-key", key] if command == "redrive" else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "lastbit", "--url", proxy.url, command, *options], cwd=ROOT, text=True
    )
    running.append(process)
    assert process.wait(60) == -signal.SIGKILL
    report = Lastbit(proxy.url).json(command, *options)
    assert (report["acted"], report["refused"]) == (5 if command == "redrive" else 2, 0)
    if command == "redrive":
        assert [redrives(client, batch.id) for batch in batches] == [1] * 5
    else:
        assert states(client, key) == (["cancelled"] * 5 if command == "cancel" else [])


def test_a_lost_answer_is_asked_for_again(proxy: ScriptedService, client: Client, key: str) -> None:
    """The call was carried out: no batch is redriven twice, and a deleted one isn't an error."""
    batches = [client.open(key=key, items=1) for _ in range(3)]
    for batch in batches:
        client.fail(batch.ids)
    pass_on = proxy.reply
    paths: set[str] = set()

    def reply(request: Seen) -> Reply:
        answer = pass_on(request)
        if request.method != "GET" and request.path not in paths:
            paths.add(request.path)
            return LOST
        return answer

    proxy.reply = reply
    assert Lastbit(proxy.url).json("redrive", "--key", key, "--yes")["acted"] == 3
    assert [redrives(client, batch.id) for batch in batches] == [1] * 3
    report = Lastbit(proxy.url).json("delete", "--key", key, "--yes")
    assert (report["acted"], report["skipped"], report["refused"]) == (3, {}, 0)
    assert states(client, key) == []


def test_an_interrupted_run_says_how_to_go_on(proxy: ScriptedService, client: Client, key: str) -> None:
    """With the key, by which its redrives are known."""
    for _ in range(3):
        client.fail(client.open(key=key, items=1).ids)
    pass_on = proxy.reply
    running: list[subprocess.Popen[str]] = []

    def reply(request: Seen) -> Reply:
        answer = pass_on(request)
        if request.method == "POST" and running and len(client_posts()) == 2:
            running.pop().send_signal(signal.SIGINT)
        return answer

    def client_posts() -> list[Seen]:
        return [request for request in proxy.seen if request.method == "POST"]

    proxy.reply = reply
    command = [sys.executable, "-m", "lastbit", "--url", proxy.url, "redrive", "--key", key, "--yes"]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.append(process)
    output, complaint = process.communicate(timeout=60)
    run = client_posts()[0].headers["idempotency-key"]
    assert process.returncode == 130
    assert output.splitlines()[0] in ("1 of 3 batches redriven", "2 of 3 batches redriven")
    assert complaint.splitlines()[-1] == f"To go on, run the same command again and add --idempotency-key {run}"
    assert Lastbit(proxy.url).json("redrive", "--key", key, "--yes", "--idempotency-key", run)["acted"] == 3
    assert [redrives(client, batch.id) for batch in client.batches(key=key)] == [1] * 3


def test_refusals_are_named_and_a_service_that_is_away_ends_the_run(
    proxy: ScriptedService, client: Client, key: str
) -> None:
    """A batch whose deadline has passed isn't reopened without another one: exit code 3. Overload of three batches in a
    row, or a lost token: exit code 1, after what was done."""
    batches = [client.open(key=f"{key}", items=1) for _ in range(5)]
    for batch in batches:
        batch.cancel()
    pass_on = proxy.reply
    problem = {"code": "invalid_request", "status": 422, "detail": "body.deadline: it has passed", "errors": []}
    busy = {"code": "unavailable", "status": 503, "detail": "too busy"}

    def reply(request: Seen) -> Reply:
        if request.path.startswith(f"/v1/batches/{batches[4].id}/"):
            return 422, {}, problem
        return pass_on(request)

    proxy.reply = reply
    result = Lastbit(proxy.url)("reopen", "--key", key, "--yes")
    assert result.returncode == 3
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "4 batches reopened",
        "1 refused:",
        f"  batch {batches[4].id} {key}  body.deadline: it has passed",
    ]
    assert lines[3].startswith("To go on, run the same command again and add --idempotency-key ")

    proxy.reply = lambda request: (503, {"retry-after": "0"}, busy) if request.method == "POST" else pass_on(request)
    result = Lastbit(proxy.url)("cancel", "--key", key, "--yes", "--json")
    assert result.returncode == 1
    document = json.loads(result.stderr)
    assert (document["code"], document["matched"], document["acted"]) == ("unavailable", 4, 0)
    assert len([request for request in proxy.seen if request.method == "POST"]) > 5


def test_two_operators_at_once(lastbit: Lastbit, client: Client, key: str) -> None:
    """Each batch is deleted by one of them, and skipped by the other; nothing is refused."""
    for _ in range(30):
        client.open(key=key, items=1)
    with ThreadPoolExecutor() as executor:
        runs = [executor.submit(lastbit.json, "delete", "--key", key, "--yes") for _ in range(2)]
        reports = [run.result() for run in runs]
    assert all(report["refused"] == 0 for report in reports)
    assert sum(report["acted"] for report in reports) == 30
    assert all(report["matched"] == report["acted"] + sum(report["skipped"].values()) for report in reports)
    assert states(client, key) == []


def test_tenants_act_on_their_own_batches_alone() -> None:
    """Even with --all, and find only their own failures."""
    secrets = {prefix: tokens.new() for prefix in ("shop-1/", "shop-2/")}
    lines = "\n".join(
        tokens.known(secret, prefix.strip("/"), [Role.ADMIN], prefix=prefix).line()
        for prefix, secret in secrets.items()
    )
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS=lines) as service:
        for prefix, secret in secrets.items():
            with Client(service.url, token=secret) as client:
                client.fail(client.open(key=f"{prefix}a", items=2).ids[0], f"why {prefix}")
        run = Lastbit(service.url)
        options = ("--token", secrets["shop-1/"])
        assert run.json("redrive", "--all", "--yes", *options)["acted"] == 1
        assert run.json("delete", "--all", "--yes", *options)["acted"] == 1
        assert run.json("failures", "--text", "why", *options) == {"failures": [], "more": False}
        failures = run.json("failures", "--text", "why", "--token", secrets["shop-2/"])
        assert [failure["reason"] for failure in failures["failures"]] == ["why shop-2/"]


def test_failures_are_found_by_a_text(lastbit: Lastbit, client: Client, key: str) -> None:
    """The newest batch first; across pages; and as many as the limit says."""
    batches = [client.open(key=key, items=3) for _ in range(3)]
    for batch in batches:
        client.fail(batch.ids[:2], "The disk is\nfull")
        client.fail(batch.ids[2], "no picture")
    expected = [item for batch in batches[::-1] for item in batch.ids[:2]]
    assert [failure.item for failure in client.failures("DISK", key=key, page_size=1)] == expected
    document = lastbit.json("failures", "--text", "disk", "--key", key, "--limit", "6")
    assert ([failure["item"] for failure in document["failures"]], document["more"]) == (expected, False)
    document = lastbit.json("failures", "--text", "disk", "--key", key, "--limit", "5")
    assert ([failure["item"] for failure in document["failures"]], document["more"]) == (expected[:5], True)
    text = lastbit.ok("failures", "--text", "picture", "--key", key)
    assert f"{batches[2].ids[2]} {key}" in text
    assert text.splitlines()[3:] == ["3 failures in 3 batches"]
    text = lastbit.ok("failures", "--text", "disk", "--key", key, "--limit", "1")
    assert text.splitlines()[-2:] == ["1 failure in 1 batch", "There are more; --limit shows more of them."]
    assert lastbit.ok("failures", "--text", "nothing", "--key", key) == "no failures\n"
    assert lastbit.json("counts", "--failed", "--key", key)["total"] == 3


@pytest.mark.nightly
def test_ten_thousand_batches_in_bounded_memory(service_url: str, key: str) -> None:
    """Each batch is a call, and so a transaction, of its own; the command keeps their ids alone."""
    with Client(service_url) as client:
        for _ in range(10_000):
            client.open(key=key)
        other_key = uuid.uuid4().hex
        client.open(key=other_key)
    peaks = [_peak(service_url, name, count) for name, count in ((other_key, 1), (key, 10_000))]
    assert peaks[1] - peaks[0] < 20_000, peaks  # KiB


def _peak(url: str, key: str, count: int) -> int:
    """The memory of a run at most, in KiB."""
    command = [sys.executable, "-m", "lastbit", "--url", url, "cancel", "--key", key, "--yes", "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    report = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert (process.returncode, report["acted"]) == (0, count)
    peak: resource.struct_rusage = usage
    return peak.ru_maxrss
