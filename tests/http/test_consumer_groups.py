"""Consumer groups over HTTP: created, joined, shared, handed over, fenced, listed, deleted; and invalid requests."""

from __future__ import annotations

import base64
import json
import time
from datetime import timedelta
from typing import Any

import httpx
import pytest

from core.consumer_groups import details, groups
from core.storage import schema
from core.storage.database import Database
from core.webhooks.replicas import GROUP
from lastbit.streams.snapshot import Snapshot
from tests.http.test_bad_input import JSON
from tests.http.test_batches import code
from tests.mutants import mutant
from tests.support.exposition import eventually, value
from tests.support.servers import running_service


def path(group: str, *rest: object) -> str:
    return "/".join(["/v1/consumer-groups", group, *map(str, rest)])


def create_group(http: httpx.Client, group: str, partitions: int = 4, **times: float) -> dict[str, Any]:
    answer = http.put(path(group), json={"partitions": partitions, **times})
    assert answer.status_code in (200, 201), answer.text
    body: dict[str, Any] = answer.json()
    return body


def sync(http: httpx.Client, group: str, worker: str, session: str = "1", **extra: Any) -> dict[str, Any]:
    answer = http.post(path(group, "sync"), json={"worker": worker, "session": session, **extra})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def epochs(sync_result: dict[str, Any]) -> dict[int, int]:
    return {entry["partition"]: entry["epoch"] for entry in sync_result["assigned"]}


def encoded(*window: Any) -> str:
    return base64.b64encode(Snapshot(*window).encode()).decode()


def test_a_group_is_created_once_and_keeps_its_partitions(http: httpx.Client) -> None:
    """201, then 200; the durations may change, the number of partitions may not."""
    first = http.put(path("made"), json={"partitions": 8})
    assert first.status_code == 201
    document = {"name": "made", "partitions": 8, "partition_of": "crc32", "ttl": 10.0, "release": 30.0}
    assert first.json() == {**document, "created_at": first.json()["created_at"]}
    second = http.put(path("made"), json={"partitions": 8, "ttl": 2.5})
    assert second.status_code == 200
    assert second.json() == {**first.json(), "ttl": 2.5}
    assert create_group(http, "made", 8, release=0)["ttl"] == 2.5
    assert code(http.put(path("made"), json={"partitions": 9})) == (409, "partitions_fixed")
    assert http.get(path("made")).json()["partitions"] == 8


def test_two_workers_share_and_hand_over(http: httpx.Client) -> None:
    """The first worker takes everything; each sync asks it to release its surplus until that is drained; then the
    second one gets it with a higher epoch and the committed position."""
    create_group(http, "shared")
    first = sync(http, "shared", "one")
    assert (first["ttl"], first["release_within"]) == (10.0, 30.0)
    assert first["assigned"] == [
        {"partition": number, "epoch": 1, "floor": None, "high": None, "outstanding": None, "token": None}
        for number in range(4)
    ]
    assert sync(http, "shared", "two")["assigned"] == []
    for _ in range(2):
        first = sync(http, "shared", "one")
        assert (epochs(first), first["release"]) == ({0: 1, 1: 1, 2: 1, 3: 1}, [2, 3])
    window = (2**62, 2**62 + 5, (2**62 + 1, 2**62 + 4))
    commit_response = http.put(
        path("shared", "partitions", 2, "position"),
        json={"worker": "one", "epoch": 1, "snapshot": encoded(*window), "token": "ö", "head": 2**62 + 9},
    )
    position = {"partition": 2, "epoch": 1, "floor": 2**62, "high": 2**62 + 5, "outstanding": 2, "token": "ö"}
    assert commit_response.json() == position
    outdated_reports = [{"partition": number, "epoch": 0} for number in (2, 3)]
    assert sync(http, "shared", "one", drained=outdated_reports)["release"] == [2, 3]
    drained = [2, {"partition": 3, "epoch": 1}]  # earlier releases send a plain number
    assert epochs(sync(http, "shared", "one", drained=drained)) == {0: 1, 1: 1}
    second = sync(http, "shared", "two")
    assert epochs(second) == {2: 2, 3: 2}
    lease = second["assigned"][0]
    assert (lease["floor"], lease["high"], lease["token"]) == (2**62, 2**62 + 5, "ö")
    assert Snapshot.decode(base64.b64decode(lease["outstanding"])) == Snapshot(*window)
    document = http.get(path("shared")).json()
    assert [(entry["worker"], entry["live"], entry["partitions"]) for entry in document["workers"]] == [
        ("one", True, 2),
        ("two", True, 2),
    ]
    position = document["positions"][2]
    assert (position["owner"], position["epoch"], position["outstanding"], position["lag"]) == ("two", 2, 2, 9)
    assert position["since"] is not None
    assert document["positions"][0]["lag"] is None


@mutant(
    "one-stale-position-refuses-the-call",
    "api.routes.consumer_groups:many",
    "isinstance(result, ConsumerGroupNotFound)",
    "isinstance(result, CoreError)",
)
def test_many_positions_are_committed_with_one_call(http: httpx.Client) -> None:
    """Each entry has a result of its own, in order. Those that are refused change nothing, and don't affect the others;
    the entries of one partition are merged."""
    create_group(http, "many")
    sync(http, "many", "one", "1")
    held = epochs(sync(http, "many", "one", "2"))
    entries = [
        {"partition": 2, "epoch": held[2], "snapshot": encoded(5, 9, (6, 8)), "token": "ö", "head": 20},
        {"partition": 0, "epoch": held[0] - 1, "snapshot": encoded(99, 99)},
        {"partition": 1, "epoch": held[1], "snapshot": encoded(1, 1)},
        {"partition": 4, "epoch": 1, "snapshot": encoded(99, 99)},
        {"partition": 2, "epoch": held[2], "snapshot": encoded(5, 9, (8,))},
    ]
    for _ in range(2):
        answer = http.put(path("many", "positions"), json={"worker": "one", "positions": entries})
        assert answer.status_code == 200
        assert [tuple(result.values()) for result in answer.json()["results"]] == [
            *((2, None), (0, "stale_epoch"), (1, None), (4, "stale_epoch"), (2, None))
        ]
        positions = [
            (position["floor"], position["high"], position["outstanding"], position["token"], position["head"])
            for position in http.get(path("many")).json()["positions"]
        ]
        nothing = (None,) * 5
        assert positions == [nothing, (1, 1, 0, None, None), (7, 9, 1, "ö", 20), nothing]
    other = http.put(path("many", "positions"), json={"worker": "two", "positions": entries[2:3]})
    assert other.json() == {"results": [{"partition": 1, "code": "stale_epoch"}]}


def test_an_invalid_entry_refuses_the_call_for_many_positions(sqlite_http: httpx.Client) -> None:
    """Its place is named, and the other entries aren't committed."""
    create_group(sqlite_http, "partly", 1)
    epoch = epochs(sync(sqlite_http, "partly", "one"))[0]
    good = {"partition": 0, "epoch": epoch, "snapshot": encoded(7, 7)}
    large = encoded(0, 60_000, tuple(range(1, 60_000, 3)))
    for bad, place in (
        ({**good, "snapshot": "AAAA"}, "body.positions[1].snapshot"),
        ({**good, "snapshot": "A" * 8000}, "body.positions[1].snapshot"),
        ({**good, "partition": -1}, "body.positions[1].partition"),
        ({"partition": 0, "epoch": epoch}, "body.positions[1].snapshot"),
    ):
        body = {"worker": "one", "positions": [good, bad]}
        answer = sqlite_http.put(path("partly", "positions"), json=body)
        assert code(answer) == (422, "invalid_request"), answer.text
        assert answer.json()["errors"][0]["place"] == place
    [position] = sqlite_http.get(path("partly")).json()["positions"]
    assert position["floor"] is None
    body = {"worker": "one", "positions": [good, {**good, "snapshot": large}]}
    assert sqlite_http.put(path("partly", "positions"), json=body).json()["results"][1] == {
        "partition": 0,
        "code": None,
    }


def test_a_worker_that_leaves_frees_its_partitions_at_once(http: httpx.Client) -> None:
    """A second time, or for another session, it does nothing and is no error."""
    create_group(http, "left")
    sync(http, "left", "one", "1")
    assert http.delete(path("left", "workers", "one"), params={"session": "2"}).status_code == 204
    assert len(sync(http, "left", "one", "1")["assigned"]) == 4
    for _ in range(2):
        assert http.delete(path("left", "workers", "one"), params={"session": "1"}).status_code == 204
    assert {entry["owner"] for entry in http.get(path("left")).json()["positions"]} == {None}
    assert epochs(sync(http, "left", "two")) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_an_event_under_a_stale_fence_is_not_appended(http: httpx.Client) -> None:
    """409 `stale_epoch`, none of the call's events is appended, and the refusal is counted."""
    create_group(http, "fenced", 1)
    sync(http, "fenced", "one")
    fence = {"group": "fenced", "partition": 0, "worker": "one", "epoch": 1}
    events = [{"id": f"fenced:{number}", "type": "x"} for number in range(3)]
    good = http.post("/v1/events", json={"events": events[:1], "fence": fence})
    assert good.status_code == 200
    position = good.json()["events"][0]["position"]
    sync(http, "fenced", "one", "another")
    before = value(http, "lastbit_stale_epochs_total")
    assert code(http.post("/v1/events", json={"events": events[1:], "fence": fence})) == (409, "stale_epoch")
    assert code(http.post("/v1/events", json={"events": events[:1], "fence": fence})) == (409, "stale_epoch")
    stale = {"worker": "one", "epoch": 1, "snapshot": encoded(1, 1)}
    assert code(http.put(path("fenced", "partitions", 0, "position"), json=stale)) == (409, "stale_epoch")
    eventually(lambda: value(http, "lastbit_stale_epochs_total") - before, 3)
    assert http.get("/v1/events", params={"after": position, "type": "x"}).json()["events"] == []
    fence["epoch"] = 2
    assert http.post("/v1/events", json={"events": events[1:], "fence": fence}).status_code == 200
    missing_group = {**fence, "group": "nowhere"}
    assert code(http.post("/v1/events", json={"events": [], "fence": missing_group})) == (
        404,
        "consumer_group_not_found",
    )
    assert code(http.post("/v1/events", json={"events": [], "fence": {**fence, "partition": 9}})) == (
        409,
        "stale_epoch",
    )


def test_the_earlier_of_two_processes_with_one_name_is_replaced(http: httpx.Client) -> None:
    """409 `session_replaced`: it should stop, and can't take the name back."""
    create_group(http, "named", 1)
    sync(http, "named", "one", "first")
    assert epochs(sync(http, "named", "one", "second")) == {0: 2}
    body = {"worker": "one", "session": "first"}
    assert code(http.post(path("named", "sync"), json=body)) == (409, "session_replaced")
    assert epochs(sync(http, "named", "one", "second")) == {0: 2}


def test_a_worker_that_is_silent_for_longer_than_the_ttl_loses_its_partitions(http: httpx.Client) -> None:
    """In real time: another worker that syncs gets it soon after."""
    create_group(http, "silent", 1, ttl=0.3)
    sync(http, "silent", "one")
    start = time.monotonic()
    eventually(lambda: epochs(sync(http, "silent", "two")), {0: 2})
    assert time.monotonic() - start > 0.25


def test_a_group_without_workers_can_be_deleted(http: httpx.Client) -> None:
    """409 while it has a worker; then it is unknown, and a later group of that name is a new one."""
    create_group(http, "deleted", 2)
    sync(http, "deleted", "one")
    assert code(http.delete(path("deleted"))) == (409, "consumer_group_in_use")
    http.delete(path("deleted", "workers", "one"))
    assert http.delete(path("deleted")).status_code == 204
    for answer in (
        http.get(path("deleted")),
        http.delete(path("deleted")),
        http.delete(path("deleted", "workers", "one")),
        http.post(path("deleted", "sync"), json={"worker": "one", "session": "1"}),
        http.put(
            path("deleted", "partitions", 0, "position"), json={"worker": "one", "epoch": 1, "snapshot": encoded(1, 1)}
        ),
        http.put(
            path("deleted", "positions"),
            json={"worker": "one", "positions": [{"partition": 0, "epoch": 1, "snapshot": encoded(1, 1)}]},
        ),
    ):
        assert code(answer) == (404, "consumer_group_not_found")
    assert http.put(path("deleted"), json={"partitions": 3}).status_code == 201
    assert epochs(sync(http, "deleted", "one")) == {0: 3, 1: 3, 2: 3}


def test_a_sync_shows_whether_the_group_was_created_again(http: httpx.Client) -> None:
    """Even if it has the same number of partitions and nobody has owned one."""
    create_group(http, "again", 3)
    joined = sync(http, "again", "one", capacity=0)
    assert joined["partitions"] == 3
    create_group(http, "again", 3, ttl=20)
    assert sync(http, "again", "two")["incarnation"] == joined["incarnation"]
    incarnations = {joined["incarnation"]}
    for _ in range(3):
        for worker in ("one", "two"):
            http.delete(path("again", "workers", worker))
        assert http.delete(path("again")).status_code == 204
        create_group(http, "again", 3)
        incarnations.add(sync(http, "again", "one", capacity=0)["incarnation"])
    assert len(incarnations) == 4


@mutant(
    "a-report-about-a-deleted-group-ends-its-worker",
    "core.consumer_groups.leases:sync",
    "number >= group.partitions and not is_of_deleted_group",
    "number >= group.partitions",
)
def test_reports_of_drained_partitions_of_a_deleted_group_are_ignored(http: httpx.Client) -> None:
    """Even if the group with this name has fewer partitions now. Otherwise, an unknown partition is refused."""
    create_group(http, "fewer", 4)
    old_epoch = epochs(sync(http, "fewer", "one"))[3]
    http.delete(path("fewer", "workers", "one"))
    assert http.delete(path("fewer")).status_code == 204
    create_group(http, "fewer", 2)
    before = epochs(sync(http, "fewer", "one"))
    drained = [{"partition": number, "epoch": old_epoch} for number in range(4)]
    assert epochs(sync(http, "fewer", "one", drained=drained)) == before
    for unknown in (3, {"partition": 3, "epoch": before[0]}):
        body = {"worker": "one", "session": "1", "drained": [unknown]}
        assert code(http.post(path("fewer", "sync"), json=body)) == (422, "invalid_request")


def test_groups_are_listed_by_name(http: httpx.Client) -> None:
    """In pages, each with its live workers and owned partitions."""
    names = [f"listed-{letter}" for letter in "abc"]
    for name in reversed(names):
        create_group(http, name, 2)
    sync(http, "listed-b", "one", capacity=1)
    result, cursor = [], None
    while True:
        page = http.get("/v1/consumer-groups", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        result += page["groups"]
        cursor = page["next"]
        if cursor is None:
            break
    listing = {entry["name"]: (entry["workers"], entry["owned"]) for entry in result if entry["name"] in names}
    assert listing == {"listed-a": (0, 0), "listed-b": (1, 1), "listed-c": (0, 0)}
    assert [entry["name"] for entry in result] == sorted(entry["name"] for entry in result)
    for bad in ("x", base64.urlsafe_b64encode(b"webhooks:1").decode().rstrip("=")):
        assert code(http.get("/v1/consumer-groups", params={"cursor": bad})) == (422, "invalid_request")


def test_metrics_show_workers_partitions_and_lag(http: httpx.Client) -> None:
    """For each group."""
    create_group(http, "measured", 3)
    sync(http, "measured", "one", capacity=2)
    body = {"worker": "one", "epoch": 1, "snapshot": encoded(5, 9, (6,)), "head": 15}
    http.put(path("measured", "partitions", 0, "position"), json=body)
    eventually(
        lambda: [
            value(http, "lastbit_group_workers", group="measured"),
            value(http, "lastbit_group_partitions", group="measured", state="owned"),
            value(http, "lastbit_group_partitions", group="measured", state="free"),
            value(http, "lastbit_group_lag", group="measured"),
        ],
        [1, 2, 1, 10],
    )


def test_the_services_own_groups_are_read_only(sqlite_http: httpx.Client) -> None:
    """422 for every call that would change one."""
    http, own_group = sqlite_http, "lastbit.dispatcher"
    entry = {"partition": 0, "epoch": 1, "snapshot": encoded(1, 1)}
    position = {"worker": "one", "epoch": 1, "snapshot": encoded(1, 1)}
    for answer in (
        http.put(path(own_group), json={"partitions": 3}),
        http.post(path(own_group, "sync"), json={"worker": "one", "session": "1"}),
        http.put(path(own_group, "partitions", 0, "position"), json=position),
        http.put(path(own_group, "positions"), json={"worker": "one", "positions": [entry]}),
        http.delete(path(own_group, "workers", "one")),
        http.delete(path(own_group)),
    ):
        assert code(answer) == (422, "invalid_request")
        assert answer.json()["errors"][0]["place"] == "path.group"
    assert http.get(path(own_group)).status_code in (200, 404)


@pytest.mark.slow
def test_the_workers_of_a_service_on_sqlite_share_its_deliveries(sqlite_url: str) -> None:
    """Each runs a dispatcher; a service of one process has no other one to share with, and doesn't join."""
    with Database(sqlite_url) as database:
        schema.migrate(database)
        database.write(lambda tx: groups.put(tx, GROUP, 64, timedelta(seconds=0.6), None))
        with running_service(sqlite_url, workers=2, LASTBIT_DISPATCHER_EVERY="0.05"):

            def held() -> list[int]:
                return [worker.partitions for worker in database.snapshot(details.get, GROUP).workers]

            eventually(held, [32, 32])


BODIES = [
    ("PUT", "", {"partitions": 0}, "body.partitions"),
    ("PUT", "", {"partitions": 4097}, "body.partitions"),
    ("PUT", "", {"partitions": "4"}, "body.partitions"),
    ("PUT", "", {"partitions": True}, "body.partitions"),
    ("PUT", "", {}, "body.partitions"),
    ("PUT", "", {"partitions": 4, "ttl": 0}, "body.ttl"),
    ("PUT", "", {"partitions": 4, "ttl": 3601}, "body.ttl"),
    ("PUT", "", {"partitions": 4, "ttl": float("nan")}, "body.ttl"),
    ("PUT", "", {"partitions": 4, "ttl": "10"}, "body.ttl"),
    ("PUT", "", {"partitions": 4, "release": -1}, "body.release"),
    ("PUT", "", {"partitions": 4, "release": float("inf")}, "body.release"),
    ("PUT", "", {"partitions": 4, "hash": "md5"}, "body.hash"),
    ("POST", "/sync", {}, "body.worker"),
    ("POST", "/sync", {"worker": "a/b", "session": "1"}, "body.worker"),
    ("POST", "/sync", {"worker": "", "session": "1"}, "body.worker"),
    ("POST", "/sync", {"worker": "ö", "session": "1"}, "body.worker"),
    ("POST", "/sync", {"worker": "w" * 256, "session": "1"}, "body.worker"),
    ("POST", "/sync", {"worker": "w"}, "body.session"),
    ("POST", "/sync", {"worker": "w", "session": "s" * 65}, "body.session"),
    ("POST", "/sync", {"worker": "w", "session": "two words"}, "body.session"),
    ("POST", "/sync", {"worker": "w", "session": "1", "drained": [0, 4]}, "body.drained[1]"),
    ("POST", "/sync", {"worker": "w", "session": "1", "drained": [-1]}, "body.drained[0]"),
    ("POST", "/sync", {"worker": "w", "session": "1", "drained": ["0"]}, "body.drained[0]"),
    ("POST", "/sync", {"worker": "w", "session": "1", "drained": 0}, "body.drained"),
    ("POST", "/sync", {"worker": "w", "session": "1", "drained": [True]}, "body.drained[0]"),
    ("POST", "/sync", {"worker": "w", "session": "1", "drained": [{"partition": 0}]}, "body.drained[0].epoch"),
    (
        "POST",
        "/sync",
        {"worker": "w", "session": "1", "drained": [0, {"partition": 0, "epoch": None}]},
        "body.drained[1].epoch",
    ),
    (
        "POST",
        "/sync",
        {"worker": "w", "session": "1", "drained": [{"partition": 4, "epoch": 1}]},
        "body.drained[0]",
    ),
    ("POST", "/sync", {"worker": "w", "session": "1", "capacity": -1}, "body.capacity"),
    ("POST", "/sync", {"worker": "w", "session": "1", "capacity": 1.5}, "body.capacity"),
    ("PUT", "/partitions/0/position", {"worker": "w", "epoch": 1}, "body.snapshot"),
    ("PUT", "/partitions/0/position", {"worker": "w", "epoch": -1, "snapshot": ""}, "body.epoch"),
    ("PUT", "/partitions/0/position", {"worker": "w", "epoch": 1, "snapshot": ""}, "body.snapshot"),
    ("PUT", "/partitions/0/position", {"worker": "w", "epoch": 1, "snapshot": "?"}, "body.snapshot"),
    ("PUT", "/partitions/0/position", {"worker": "w", "epoch": 1, "snapshot": "AQ"}, "body.snapshot"),
    (
        "PUT",
        "/partitions/0/position",
        {"worker": "w", "epoch": 1, "snapshot": encoded(5, 500, (6, 8)) + "="},
        "body.snapshot",
    ),
    ("PUT", "/partitions/0/position", {"worker": "w", "epoch": 1, "snapshot": "A" * 40}, "body.snapshot"),
    ("PUT", "/partitions/0/position", {"worker": "w", "epoch": 1, "snapshot": "A" * 2_000_000}, "body.snapshot"),
    ("PUT", "/partitions/4096/position", {"worker": "w", "epoch": 1, "snapshot": ""}, "path.partition"),
    ("PUT", "/partitions/01/position", {"worker": "w", "epoch": 1, "snapshot": ""}, "path.partition"),
]


@pytest.mark.parametrize(("method", "rest", "body", "place"), BODIES)
def test_bad_input_names_its_place(
    sqlite_http: httpx.Client, method: str, rest: str, body: dict[str, Any], place: str
) -> None:
    """And changes nothing."""
    create_group(sqlite_http, "bad")
    before = sqlite_http.get(path("bad")).json()
    answer = sqlite_http.request(method, path("bad") + rest, content=json.dumps(body), headers=JSON)
    assert code(answer) == (422, "invalid_request"), answer.text
    assert place in {entry["place"] for entry in answer.json()["errors"]}
    assert sqlite_http.get(path("bad")).json() == before


@pytest.mark.parametrize("group", ["%20", "a%20b", ".hidden", "g" * 256, "%C3%B6", "a%00"])
def test_a_bad_name_of_a_group_is_refused(sqlite_http: httpx.Client, group: str) -> None:
    """In the path of every call."""
    for answer in (
        sqlite_http.put(path(group), json={"partitions": 4}),
        sqlite_http.get(path(group)),
        sqlite_http.post(path(group, "sync"), json={"worker": "w", "session": "1"}),
    ):
        assert code(answer) == (422, "invalid_request")
        assert answer.json()["errors"][0]["place"] == "path.group"


def test_a_bad_fence_is_refused_with_its_place(sqlite_http: httpx.Client) -> None:
    """And no event is appended."""
    last = sqlite_http.get("/v1/events").json()["last"]
    event = {"id": "bad-fence", "type": "x"}
    for fence, place in (
        ({"group": "g", "partition": 0, "worker": "w"}, "body.fence.epoch"),
        ({"group": "g", "partition": "0", "worker": "w", "epoch": 1}, "body.fence.partition"),
        ({"group": "a/b", "partition": 0, "worker": "w", "epoch": 1}, "body.fence.group"),
    ):
        answer = sqlite_http.post("/v1/events", json={"events": [event], "fence": fence})
        assert code(answer) == (422, "invalid_request")
        assert answer.json()["errors"][0]["place"] == place
    assert sqlite_http.get("/v1/events").json()["last"] == last


@pytest.mark.parametrize("slash", ["%2F", "%2f"])
def test_an_encoded_slash_leads_to_no_other_resource(http: httpx.Client, slash: str) -> None:
    """It belongs to the name. Only keys of tallies and instances of processes may have it."""
    group = f"slashed-{slash[1:]}"
    create_group(http, group, 1)
    sync(http, group, "one")
    assert code(http.delete(f"/v1/consumer-groups/{group}{slash}workers{slash}one")) == (404, "not_found")
    assert [worker["worker"] for worker in http.get(path(group)).json()["workers"]] == ["one"]
    for other in (f"tallies/a{slash}b/c", f"tallies/a{slash}b/c/d", f"processes/a{slash}b", f"processes/a{slash}b/c"):
        assert code(http.get(f"/v1/{other}")) == (404, "not_found")
    assert http.get(f"/v1/tallies/a/b{slash}c").json()["value"] == 0
    assert code(http.get(f"/v1/processes/a/b{slash}c")) == (404, "process_not_found")
