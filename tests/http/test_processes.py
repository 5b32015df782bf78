"""Process managers over HTTP: an event takes effect once; instances, retries, timers and commands can be read."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from api.routes.processes import HandlingsBody, handled_many, many_of
from core.commits.operation import Done
from core.errors import Unavailable
from core.processes.inbox import Status
from core.processes.instances import Handled
from core.storage.database import Database
from lastbit.streams.partitions import partition_of
from lastbit.streams.snapshot import Snapshot
from tests.http.test_batches import code
from tests.mutants import mutant
from tests.support import templates
from tests.support.proxies import proxied
from tests.support.servers import MariaDB, running_service

PARTITIONS = 3


class Process:
    """A process whose only worker is the test."""

    def __init__(self, http: httpx.Client, name: str) -> None:
        self.http = http
        self.name = name
        self.path = f"/v1/processes/{name}"
        self.group = f"/v1/consumer-groups/process.{name}"
        answer = http.put(self.path, json={"partitions": PARTITIONS})
        assert answer.status_code == 201, answer.text
        sync_result = http.post(f"{self.group}/sync", json={"worker": "w1", "session": "s1"}).json()
        self.epochs = {entry["partition"]: entry["epoch"] for entry in sync_result["assigned"]}

    def event(self, id: str, type: str = "card.charged", key: str = "o1") -> dict[str, Any]:
        """Append an event and return it as the feed has it."""
        id = f"{self.name}:{id}"
        answer = self.http.post("/v1/events", json={"events": [{"id": id, "type": type, "key": key}]})
        return {"id": id, "position": answer.json()["events"][0]["position"]}

    def body(self, event: dict[str, Any], instance: str = "o1", version: int = 0, **outcome: Any) -> dict[str, Any]:
        epoch = self.epochs[partition_of(instance, PARTITIONS)]
        return {"event": event, "fence": {"worker": "w1", "epoch": epoch}, "version": version, **outcome}

    def handle(self, event: dict[str, Any], instance: str = "o1", version: int = 0, **outcome: Any) -> httpx.Response:
        body = self.body(event, instance, version, **outcome)
        return self.http.post(f"{self.path}/{instance}/handle", json=body)

    def get(self, instance: str = "o1") -> dict[str, Any]:
        answer = self.http.get(f"{self.path}/{instance}")
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def close(self) -> None:
        self.http.delete(f"{self.group}/workers/w1")
        self.http.delete(self.path)


@pytest.fixture
def process(http: httpx.Client, request: pytest.FixtureRequest) -> Iterator[Process]:
    process_ = Process(http, f"p{abs(hash(request.node.nodeid))}")
    yield process_
    process_.close()


def test_an_event_takes_effect_once(process: Process) -> None:
    """State, version, commands; a repeat gets the instance in its present state."""
    first, second = process.event("1"), process.event("2")
    answer = process.handle(first, state={"seen": ["card"]}).json()
    assert (answer["status"], answer["repeated"], answer["commands"]) == ("handled", False, [])
    assert (answer["instance"]["version"], answer["instance"]["state"]) == (1, {"seen": ["card"]})
    outcome: dict[str, Any] = {"commands": [{"type": "ship", "data": {"to": "Ülm"}}], "finish": True}
    outcome_read = process.handle(second, version=1, state=None, **outcome).json()
    [command] = outcome_read["commands"]
    assert command["repeated"] is False
    assert (outcome_read["instance"]["status"], outcome_read["instance"]["version"]) == ("finished", 2)
    repeat = process.handle(second, version=1, state="other", **outcome).json()
    assert (repeat["status"], repeat["repeated"], repeat["commands"]) == ("handled", True, [])
    result = process.get()
    assert repeat["instance"] == {name: result[name] for name in repeat["instance"]}
    assert [(entry["event"], entry["status"]) for entry in result["history"]] == [
        (second["id"], "handled"),
        (first["id"], "handled"),
    ]
    [command_in_state] = result["commands"]
    assert (command_in_state["id"], command_in_state["step"], command_in_state["type"], command_in_state["data"]) == (
        *(command["id"], "ship", "ship", {"to": "Ülm"}),
    )
    assert result["finished_at"] is not None


@mutant(
    "events-without-an-instance-count-twice",
    "core.processes.definitions:count_unnamed",
    "_definitions.unnamed_upto == after",
    "_definitions.unnamed_upto >= 0",
)
def test_events_without_an_instance_count_once(process: Process) -> None:
    """A call is added only if it begins where the count ends; the answer says where that is."""
    calls = [
        ((0, 12, 3), (3, 12)),
        ((0, 12, 3), (3, 12)),  # a repeat
        ((0, 20, 4), (3, 12)),  # another worker, which didn't know
        ((12, 20, 1), (4, 20)),
        ((15, 25, 1), (4, 20)),
    ]
    for (after, upto, count), expected in calls:
        answer = process.http.post(f"{process.path}/unnamed", json={"after": after, "upto": upto, "count": count})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["unnamed"], answer.json()["unnamed_upto"]) == expected
    bad = process.http.post(f"{process.path}/unnamed", json={"after": 20, "upto": 22, "count": 3})
    assert code(bad) == (422, "invalid_request")
    unknown = process.http.post("/v1/processes/nobody/unnamed", json={"after": 0, "upto": 1, "count": 1})
    assert code(unknown) == (404, "process_not_found")


def test_a_command_is_an_event_of_the_feed(process: Process) -> None:
    """At the command's position, with its id, and with the instance as its key."""
    answer = process.handle(process.event("1"), commands=[{"type": "ship", "step": "first", "data": 1}]).json()
    [command] = answer["commands"]
    page = process.http.get("/v1/events", params={"after": command["position"] - 1, "limit": 1}).json()
    [event] = page["events"]
    assert (event["id"], event["type"], event["key"]) == (f"command:{command['id']}", "command.ship", "o1")
    assert event["data"] == {
        "command": command["id"],
        "process": process.name,
        "instance": "o1",
        "step": "first",
        "data": 1,
    }


def test_many_handlings_in_one_call_have_a_result_each(process: Process) -> None:
    """Refused and malformed entries have the problem of a single call and change nothing; the others are applied, those
    of one instance in their order."""
    first, second = process.event("1"), process.event("2")
    entries: list[dict[str, Any]] = [
        {"instance": "o1", **process.body(first, state={"seen": 1}, commands=[{"type": "ship"}])},
        {"instance": "o1", **process.body(first, version=0)},
        {"instance": "o1", **process.body(second, version=0)},
        {"instance": "o1", **process.body(second, version=1, state={"seen": 2})},
        {"instance": "o/2", **process.body(first, "o/2", commands=[{"type": "no blank"}])},
        {"instance": "..", **process.body(first, "o2")},
        {"instance": "o2", **process.body(first, "o2"), "fence": {"worker": "w1", "epoch": 0}},
        {"instance": "o2", **process.body({**first, "position": 10**6}, "o2"), "error": "not there"},
        {"instance": "o/2", **process.body(first, "o/2", finish=True)},
        {"instance": "o2", **process.body(first, "o2"), "finsh": True},
    ]
    answer = process.http.post(f"{process.path}/handle", json={"handlings": entries})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert [
        result["problem"]["code"] if result["handled"] is None else (result["handled"]["repeated"], result["problem"])
        for result in results
    ] == [
        *((False, None), (True, None), "version_conflict", (False, None), "invalid_request", "invalid_request"),
        *("stale_epoch", "invalid_request", (False, None), "invalid_request"),
    ]
    assert results[9]["problem"]["detail"].startswith(
        "body.finsh: no such field here; expected one of commands, error,"
    )
    assert results[2]["problem"]["version"] == 1
    single = process.http.post(f"{process.path}/o/2/handle", json={**entries[4], "instance": None})
    assert {place["place"] for place in single.json()["errors"]} == {"body.instance", "body.commands[0].type"}
    assert [place["place"] for place in results[4]["problem"]["errors"]] == ["body.commands[0].type"]
    assert results[3]["handled"]["instance"] == {
        name: process.get()[name] for name in results[3]["handled"]["instance"]
    }
    assert process.get("o/2")["status"] == "finished"
    assert code(process.http.get(f"{process.path}/o2")) == (404, "instance_not_found")


@mutant(
    "a-call-for-many-succeeds-without-a-database",
    "api.routes.processes:handled_many",
    "results and all(result.error is not None for result in results)",
    "False",
)
@pytest.mark.mariadb
def test_a_call_for_many_is_a_503_while_the_database_is_away(mariadb: MariaDB, mariadb_url: str) -> None:
    """On both paths, as for a single one and for positions; also if another entry is malformed. An entry's 503 in a
    200 would look like a success to whoever reads the status, and has no Retry-After. Sent again, the call is
    applied."""
    with Database(mariadb_url) as database:
        templates.migrate(database)
    with (
        proxied(mariadb.port) as proxy,
        running_service(mariadb_url.replace(f":{mariadb.port}/", f":{proxy.port}/")) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        process = Process(http, "away")
        event = process.event("1")
        entries: list[Any] = [{"instance": name, **process.body(event, name)} for name in ("o1", "o2")]
        window = {"partition": 0, "epoch": process.epochs[0], "snapshot": base64.b64encode(Snapshot(0, 0).encode())}
        calls: list[tuple[str, str, Any]] = [
            ("POST", f"{process.path}/handle", {"handlings": entries}),
            ("POST", f"{process.path}/handle", {"handlings": [*entries, {"instance": "o3"}]}),
            ("POST", f"{process.path}/o1/handle", process.body(event)),
            ("PUT", f"{process.group}/positions", {"worker": "w1", "positions": [window]}),
        ]
        proxy.leave()
        for method, path, body in calls:
            content = json.dumps(body, default=bytes.decode)
            for headers in ({}, {"Connection": "close"}):  # the second one takes the ordinary path
                headers = {"Content-Type": "application/json", **headers}
                answer = http.request(method, path, content=content, headers=headers)
                assert code(answer) == (503, "unavailable"), answer.text
                assert answer.headers["Retry-After"] == "1"
        proxy.come_back()
        results = http.post(calls[1][1], json=calls[1][2]).json()["results"]
        assert [result["handled"] and result["handled"]["repeated"] for result in results] == [False, False, None]


def test_a_step_of_another_event_is_refused(process: Process) -> None:
    """In single calls and in calls for many, unless the command is `once`, as it is by default: workers of earlier
    releases issue steps again and ignore that they are repeats."""
    first, second = process.event("1"), process.event("2")
    report = {"type": "report", "step": "r"}
    [issued] = process.handle(first, state=1, commands=[{**report, "once": False}]).json()["commands"]
    refused = {"version": 1, "state": 2, "commands": [{"type": "see"}, {**report, "once": False}], "finish": True}
    single = process.handle(second, **refused)
    assert code(single) == (422, "step_reused")
    assert [place["place"] for place in single.json()["errors"]] == ["body.commands[1].step"]
    assert first["id"] in single.json()["detail"]
    assert second["id"] in single.json()["detail"]
    third = process.event("3")
    entries = [
        {"instance": "o1", **process.body(second, **refused)},
        {"instance": "o1", **process.body(third, version=1, state=3, commands=[{**report, "once": True}, report])},
    ]
    results = process.http.post(f"{process.path}/handle", json={"handlings": entries}).json()["results"]
    assert results[0] == {"handled": None, "problem": single.json()}
    assert [(each["id"], each["repeated"]) for each in results[1]["handled"]["commands"]] == [(issued["id"], True)] * 2
    details = process.get()
    assert (details["version"], details["state"], details["status"]) == (2, 3, "running")
    assert [(entry["event"], entry["status"]) for entry in details["history"]] == [
        (third["id"], "handled"),
        (first["id"], "handled"),
    ]
    assert [command["id"] for command in details["commands"]] == [issued["id"]]


@mutant(
    "workers-of-earlier-releases-issue-commands-again",
    "api.routes.processes:_commands",
    "command.step is None and not command.once",
    "command.step is None",
)
def test_a_command_without_a_step_is_issued_for_each_event_or_once(process: Process) -> None:
    """By default once; its step is its type then, as in earlier releases."""
    ids: list[str] = []
    for version in range(2):
        event = process.event(f"{version}")
        own = [{"type": "report", "once": False, "data": number} for number in range(2)]
        commands = [*own, {"type": "ship"}, {"type": "ship", "once": True}]
        answer = process.handle(event, version=version, commands=commands).json()
        assert [(command["step"], command["repeated"]) for command in answer["commands"]] == [
            *((f"report 1 {event['id']}", False), (f"report 2 {event['id']}", False)),
            *(("ship", version > 0), ("ship", True)),
        ]
        ids += [command["id"] for command in answer["commands"]]
    assert len(set(ids)) == 5
    listed = process.get()["commands"]
    assert [(command["type"], command["data"]) for command in listed] == [
        *(("report", 1), ("report", 0), ("ship", None), ("report", 1), ("report", 0)),
    ]


@mutant(
    "a-call-for-many-that-was-applied-in-part-fails",
    "api.routes.processes:handled_many",
    "all(result.error is not None for result in results)",
    "any(result.error is not None for result in results)",
)
def test_a_call_for_many_that_was_applied_in_part_has_its_results() -> None:
    """A costly call is several transactions, and the database may go away between two of them. The results of the
    entries that were applied are known only from this response."""
    commands = [{"type": "ship", "step": str(number)} for number in range(100)]
    entry = {"instance": "o", "event": {"id": "e", "position": 1}, "fence": {"worker": "w", "epoch": 1}, "version": 0}
    body = HandlingsBody.model_validate({"handlings": [{**entry, "commands": commands}] * 7})
    operations = many_of("p", body)
    assert [len(operation.handles) for operation in operations] == [5, 2]
    applied = Done([Done(Handled(Status.HANDLED, False, None, []))] * 5)
    reply = handled_many("/", body, operations, [applied, Done(error=Unavailable("no database"))])
    results = json.loads(reply.content)["results"]
    assert [(result["handled"] or result["problem"]).get("status") for result in results] == [
        *(["handled"] * 5),
        *([503] * 2),
    ]


def test_calls_for_many_are_limited(process: Process) -> None:
    """To 1 to 100 entries; a process that doesn't exist is the problem of each entry."""
    entry = {"instance": "o1", **process.body(process.event("1"))}
    for count in (0, 101):
        answer = process.http.post(f"{process.path}/handle", json={"handlings": [entry] * count})
        assert code(answer) == (422, "invalid_request")
        assert [error["place"] for error in answer.json()["errors"]] == ["body.handlings"]
    results = process.http.post(f"{process.path}/handle", json={"handlings": [entry] * 100}).json()["results"]
    assert [result["handled"]["repeated"] for result in results] == [False] + [True] * 99
    [result] = process.http.post("/v1/processes/nobody/handle", json={"handlings": [entry]}).json()["results"]
    assert result["problem"]["code"] == "process_not_found"


def test_refusals_have_their_own_codes(process: Process) -> None:
    """Another version, another owner, no such process."""
    event = process.event("1")
    conflict = process.handle(event, version=3)
    assert code(conflict) == (409, "version_conflict")
    assert conflict.json()["version"] == 0
    body = process.body(event)
    stale = {**body, "fence": {"worker": "w2", "epoch": body["fence"]["epoch"]}}
    assert code(process.http.post(f"{process.path}/o1/handle", json=stale)) == (409, "stale_epoch")
    older = {**body, "fence": {"worker": "w1", "epoch": body["fence"]["epoch"] - 1}}
    assert code(process.http.post(f"{process.path}/o1/handle", json=older)) == (409, "stale_epoch")
    assert code(process.http.post("/v1/processes/nobody/o1/handle", json=body)) == (404, "process_not_found")
    assert code(process.http.get(f"{process.path}/o1")) == (404, "instance_not_found")
    assert code(process.http.get("/v1/processes/nobody/o1")) == (404, "process_not_found")
    assert code(process.http.get("/v1/processes/nobody")) == (404, "process_not_found")
    assert code(process.http.delete("/v1/processes/nobody")) == (404, "process_not_found")
    assert code(process.http.post(f"{process.path}/o1/retry")) == (404, "instance_not_found")
    assert code(process.http.put(process.path, json={"partitions": 4})) == (409, "partitions_fixed")
    assert process.http.put(process.path).status_code == 200
    assert code(process.http.delete(process.path)) == (409, "consumer_group_in_use")
    for unknown in (
        {"id": "no-such-event", "position": event["position"]},
        {"id": event["id"], "position": event["position"] + 1},
    ):
        for outcome in ({}, {"error": "boom"}):
            missing = process.handle(unknown, **outcome)
            assert code(missing) == (422, "invalid_request")
            assert [each["place"] for each in missing.json()["errors"]] == ["body.event"]
    entries = [{"instance": name, **process.body(each, name)} for name, each in (("o2", unknown), ("o3", event))]
    answer = process.http.post(f"{process.path}/handle", json={"handlings": entries})
    assert [result["problem"] and result["problem"]["code"] for result in answer.json()["results"]] == [
        "invalid_request",
        None,
    ]


def test_a_parked_event_is_shown_and_retried(process: Process) -> None:
    """It is appended to the feed as an event that contains the parked one."""
    event = process.event("1")
    parked = process.handle(event, error="Traceback: no such item").json()
    assert (parked["status"], parked["instance"]["version"], parked["instance"]["state"]) == ("parked", 0, None)
    listing = process.http.get(process.path, params={"status": "parked"}).json()
    assert [(entry["instance"], entry["parked"]) for entry in listing["instances"]] == [("o1", 1)]
    assert process.get()["history"][0]["error"] == "Traceback: no such item"
    assert process.http.post(f"{process.path}/o1/retry", json={"event": "another"}).json() == {"retrying": 0}
    assert process.http.post(f"{process.path}/o1/retry").json() == {"retrying": 1}
    page = process.http.get("/v1/events", params={"type": f"retry.{process.name}"}).json()
    [retry_event] = page["events"]
    assert retry_event["data"]["event"] == {
        "position": event["position"],
        "id": event["id"],
        "type": "card.charged",
        "batch": None,
        "key": "o1",
        "data": None,
        "at": retry_event["data"]["event"]["at"],
    }
    assert process.get()["history"][0]["status"] == "retrying"
    assert process.handle(event, state=1).json()["status"] == "handled"
    assert process.http.get(process.path, params={"status": "parked"}).json()["instances"] == []


def test_timers_are_shown_replaced_and_cancelled(process: Process) -> None:
    """By their names; and the end of the instance removes them."""
    timers: list[dict[str, Any]] = [
        {"timer": "payment", "after": 3600, "data": {"by": "card"}},
        {"timer": "stock", "after": 60.5},
    ]
    process.handle(process.event("1"), timers=timers)
    assert [(entry["timer"], entry["data"]) for entry in process.get()["timers"]] == [
        ("stock", None),
        ("payment", {"by": "card"}),
    ]
    process.handle(process.event("2"), version=1, timers=[{"timer": "stock", "after": None}])
    assert [entry["timer"] for entry in process.get()["timers"]] == ["payment"]
    process.handle(process.event("3"), version=2, finish=True)
    assert process.get()["timers"] == []
    late = process.handle(process.event("4"), version=0, state=1).json()
    assert (late["status"], late["instance"]["version"]) == ("late", 3)


def test_a_timer_that_is_due_becomes_an_event(sqlite_http: httpx.Client) -> None:
    """The embedded service is its own dispatcher."""
    process = Process(sqlite_http, "times-out")
    event = process.event("1")
    process.handle(event, timers=[{"timer": "t", "after": 0, "data": 7}])
    params = {"after": event["position"], "type": "timer.times-out", "wait": 60}
    [timer_event] = process.http.get("/v1/events", params=params).json()["events"]
    assert timer_event["data"] == {"process": "times-out", "instance": "o1", "timer": "t", "data": 7}
    assert process.get()["timers"] == []


@pytest.mark.parametrize("instance", ["o/1", "o 1", "ö?#%", "handle", "a/handle", "\U0001f69a", "x" * 255])
def test_an_instance_may_have_any_name(process: Process, instance: str) -> None:
    """In the URL it is percent-encoded."""
    encoded_name = "".join(f"%{byte:02X}" for byte in instance.encode())
    event = process.event("1", key="k")
    answer = process.http.post(f"{process.path}/{encoded_name}/handle", json=process.body(event, instance, state=1))
    assert answer.status_code == 200, answer.text
    assert process.http.get(f"{process.path}/{encoded_name}").json()["instance"] == instance


def test_instances_are_listed_by_name_in_pages(process: Process) -> None:
    """All of them, or those with a status."""
    event = process.event("1")
    names = sorted(f"o{number:02}" for number in range(7))
    for number, name in enumerate(names):
        process.handle(event, name, state=number, finish=number % 2 == 0)
    collected: list[str] = []
    cursor: dict[str, Any] = {}
    while True:
        page = process.http.get(process.path, params={"limit": 3, **cursor}).json()
        collected += [entry["instance"] for entry in page["instances"]]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert collected == names
    finished = process.http.get(process.path, params={"status": "finished"}).json()["instances"]
    assert [entry["state"] for entry in finished] == [0, 2, 4, 6]
    [summary] = [
        entry for entry in process.http.get("/v1/processes").json()["processes"] if entry["name"] == process.name
    ]
    assert {name: summary[name] for name in ("running", "finished", "parked", "timers", "partitions")} == {
        "running": 3,
        "finished": 4,
        "parked": 0,
        "timers": 0,
        "partitions": PARTITIONS,
    }


def test_commands_are_pulled_in_their_order_and_waited_for(process: Process) -> None:
    """Of a process, of a type, from a position on."""
    last = process.http.get("/v1/commands", params={"limit": 1}).json()["last"]
    for number in range(3):
        process.handle(process.event(f"{number}"), f"o{number}", commands=[{"type": f"go{number % 2}"}])
    page = process.http.get("/v1/commands", params={"after": last, "process": process.name}).json()
    assert [entry["instance"] for entry in page["commands"]] == ["o0", "o1", "o2"]
    assert page["next"] == page["last"]
    first = process.http.get("/v1/commands", params={"after": last, "limit": 1}).json()
    assert first["next"] == first["commands"][0]["position"]
    filtered = process.http.get("/v1/commands", params={"after": last, "type": "go0"}).json()["commands"]
    assert [entry["instance"] for entry in filtered] == ["o0", "o2"]
    answers: list[Any] = []

    def wait() -> None:
        params = {"after": page["next"], "type": "go1", "wait": 30}
        answers.append(process.http.get("/v1/commands", params=params).json()["commands"])

    waiting = threading.Thread(target=wait)
    waiting.start()
    process.handle(process.event("4"), "o4", commands=[{"type": "go1"}])
    waiting.join(60)
    assert [answer["instance"] for answer in answers[0]] == ["o4"]
    assert process.http.get("/v1/commands", params={"after": page["next"] + 99, "wait": 1}).status_code == 422


def test_a_new_process_starts_at_the_given_position(http: httpx.Client) -> None:
    """With all kept events, or after a position."""
    last = http.get("/v1/commands").json()["last"]
    creation = http.put("/v1/processes/begins", json={"after": last, "ttl": 1.5, "release": 2}).json()
    assert (creation["after"], creation["partitions"], creation["group"]) == (last, 32, "process.begins")
    assert http.put("/v1/processes/all").json()["after"] == 0
    refusal = http.put("/v1/processes/future", json={"after": last + 1})
    assert code(refusal) == (422, "invalid_request")
    for name in ("begins", "all"):
        assert http.delete(f"/v1/processes/{name}").status_code == 204


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"event": None}, "body.event"),
        ({"event": {"id": "", "position": 1}}, "body.event.id"),
        ({"event": {"id": "e", "position": 0}}, "body.event.position"),
        ({"event": {"id": "e", "position": "1"}}, "body.event.position"),
        ({"fence": {"worker": "", "epoch": 1}}, "body.fence.worker"),
        ({"fence": {"worker": "w", "epoch": True}}, "body.fence.epoch"),
        ({"fence": {"worker": "w", "epoch": 2**53}}, "body.fence.epoch"),
        ({"version": -1}, "body.version"),
        ({"version": None}, "body.version"),
        ({"state": "x" * 2**20}, "body.state"),
        ({"state": "\ud800"}, "body.state"),
        ({"commands": [{"type": "a b"}]}, "body.commands[0].type"),
        ({"commands": [{"type": "x" * 201}]}, "body.commands[0].type"),
        ({"commands": [{"type": "a", "step": ""}]}, "body.commands[0].step"),
        ({"commands": [{"type": "a", "once": "yes"}]}, "body.commands[0].once"),
        ({"commands": [{"type": "a", "data": "x" * 65_536}]}, "body.commands[0].data"),
        ({"commands": [{"type": "a"}] * 101}, "body.commands"),
        ({"timers": [{"timer": ""}]}, "body.timers[0].timer"),
        ({"timers": [{"timer": "t", "after": -1}]}, "body.timers[0].after"),
        ({"timers": [{"timer": "t", "after": 1e12}]}, "body.timers[0].after"),
        ({"timers": [{"timer": "\ud800", "after": 1}]}, "body.timers[0].timer"),
        ({"finish": 1}, "body.finish"),
        ({"error": ""}, "body.error"),
        ({"error": "x" * 8193}, "body.error"),
        ({"errors": "x"}, "body.errors"),
    ],
)
def test_an_error_in_a_handling_is_named(sqlite_http: httpx.Client, body: dict[str, Any], place: str) -> None:
    """And has no effect."""
    right = {"event": {"id": "e", "position": 1}, "fence": {"worker": "w", "epoch": 1}, "version": 0}
    response = sqlite_http.post("/v1/processes/p/o1/handle", content=_json({**right, **body}), headers=_JSON)
    assert code(response) == (422, "invalid_request")
    assert place in [entry["place"] for entry in response.json()["errors"]]


_JSON = {"Content-Type": "application/json"}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "ä", "-a", "a" * 201])
def test_a_process_has_a_plain_name(sqlite_http: httpx.Client, name: str) -> None:
    """It is part of the types of its events."""
    encoded_name = "".join(f"%{byte:02X}" for byte in name.encode())
    assert sqlite_http.put(f"/v1/processes/{encoded_name}").status_code in (404, 405, 422)


@pytest.mark.parametrize("name", ["%2E", "%2E%2E", "x" * 256, "a%0Ab", "a%00", "%7F"])
def test_an_instances_name_must_fit_into_a_url(sqlite_http: httpx.Client, name: str) -> None:
    """Names that proxies would change are refused."""
    body = {"event": {"id": "e", "position": 1}, "fence": {"worker": "w", "epoch": 1}, "version": 0}
    assert sqlite_http.post(f"/v1/processes/p/{name}/handle", json=body).status_code in (404, 405, 422)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/processes/p?status=late", "query.status"),
        ("/v1/processes/p?limit=0", "query.limit"),
        ("/v1/processes/p?cursor=x", "query.cursor"),
        ("/v1/commands?after=-1", "query.after"),
        ("/v1/commands?wait=61", "query.wait"),
        ("/v1/commands?wait=1_0", "query.wait"),
        ("/v1/commands?limit=1001", "query.limit"),
    ],
)
def test_errors_in_queries_are_named(sqlite_http: httpx.Client, path: str, place: str) -> None:
    """With 422 and the location, as everywhere."""
    response = sqlite_http.get(path)
    assert code(response) == (422, "invalid_request")
    assert response.json()["errors"][0]["place"] == place


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "command:1"),
        ("id", "timer:1"),
        ("id", "retry:1"),
        *[("type", each) for each in ("command.ship", "timer.p", "retry.p")],
    ],
)
def test_the_services_own_events_can_not_be_appended(sqlite_http: httpx.Client, field: str, value: str) -> None:
    """Only the process itself can append commands, time-outs and retries."""
    event = {"id": "mine", "type": "mine", field: value}
    response = sqlite_http.post("/v1/events", json={"events": [event]})
    assert code(response) == (422, "invalid_request")
    assert response.json()["errors"][0]["place"] == f"body.events[0].{field}"
