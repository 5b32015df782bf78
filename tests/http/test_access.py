"""Permissions: each role at each route, what a limited token sees, tokens that come and go, sessions, headers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import APIRouter

from api.__main__ import _check_access
from api.access.rules import REFUSED, Rule
from api.access.sessions import SECONDS, Sessions, cookie
from api.app import create
from api.openapi import rules
from api.routes.route import GuardedRoute
from core import errors
from core.settings import Settings
from core.storage import schema
from core.storage.database import Database
from lastbit import tokens
from lastbit.tokens import Role, Token
from tests.http.test_fast_path import JSON, Wire, chunked, request
from tests.http.test_main import run
from tests.support.exposition import eventually
from tests.support.servers import ROOT, ServiceProcess, running_service, sqlite_file

RULES = [(f"{method} {path}", rule) for method, path, rule in rules(create(Settings()).fastapi)]
ASKED = [(route, rule) for route, rule in RULES if not rule.everybody]
SECRETS = {name: tokens.new() for name in (*Role, "shop", "shop-admin", "none")}
KNOWN = [
    *(tokens.known(SECRETS[role], role, [role]) for role in Role),
    tokens.known(SECRETS["shop"], "shop", [Role.READ, Role.PRODUCE, Role.CONSUME], "shop-"),
    tokens.known(SECRETS["shop-admin"], "shop-admin", [Role.ADMIN], "shop-"),
]


def lines(tokens: list[Token]) -> str:
    return "\n".join(token.line() for token in tokens)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[name]}"}


quick = functools.partial(httpx.Client, verify=False)
"""Reading the machine's certificates takes longer than most of these tests."""


class Service(NamedTuple):
    url: str

    def client(self, name: str | None = None, **headers: str) -> httpx.Client:
        given = {} if name is None else bearer(name)
        return quick(base_url=self.url, timeout=70, headers={**given, **headers})


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS=lines(KNOWN)) as running:
        yield Service(running.url)


@pytest.fixture(scope="module", params=["sqlite", "mariadb"])
def each_service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """On each kind of database: they compare keys by means of their own."""
    if request.param == "sqlite":
        yield request.getfixturevalue("service")
        return
    url = request.getfixturevalue("mariadb").new_database()
    with Database(url) as database:
        schema.migrate(database)
    with running_service(url, LASTBIT_TOKENS=lines(KNOWN)) as running:
        yield Service(running.url)


def opened(client: httpx.Client, **body: Any) -> int:
    answer = client.post("/v1/batches", json=body)
    assert answer.status_code == 201, answer.text
    batch: int = answer.json()["id"]
    return batch


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def ask(client: httpx.Client, route: str, **names: Any) -> httpx.Response:
    """A call of the route with nothing in it. An answer without an end, as a stream's, is not read."""
    method, _, path = route.partition(" ")
    values = {"id": 10**9, "group": 0, "partition": 0, "name": "main.js", **names}
    path = re.sub(r"{(\w+)(:path)?}", lambda name: str(values.get(name[1], "none")), path)
    body = {"json": {}} if method == "POST" else {}
    with client.stream(method, path, **body) as answer:  # type: ignore[arg-type]
        if not answer.headers["content-type" if answer.status_code != 204 else "date"].startswith("text/event-stream"):
            answer.read()
        return answer


# Each role at each route


@pytest.mark.parametrize(("route", "rule"), RULES, ids=[route for route, _ in RULES])
def test_each_role_is_let_in_where_the_route_says_so_and_nowhere_else(service: Service, route: str, rule: Rule) -> None:
    """Without a token, or with a wrong one, 401; with one that hasn't the role, 403 and the name of the role. Nothing
    of the request is judged before."""
    assert rule != REFUSED, "this route must declare who may call it: @needs(…) or @open_to_all"
    for name in (None, "none", *Role):
        with service.client(name) as client:
            answer = ask(client, route)
        if rule.everybody:
            # At the sign-in, nothing is no token.
            assert answer.status_code not in (401, 403), name
        elif name in (None, "none"):
            assert problem(answer) == (401, "unauthorized"), name
            assert answer.headers["www-authenticate"].startswith("Bearer ")
        elif name == Role.ADMIN or name in rule.roles:
            assert answer.status_code not in (401, 403), name
        else:
            assert problem(answer) == (403, "forbidden"), name
            assert f"the token {name} has {name}" in answer.json()["detail"]
            assert all(role in answer.json()["detail"] for role in rule.roles)
            assert 'error="insufficient_scope"' in answer.headers["www-authenticate"]


def test_the_table_of_roles_is_what_the_routes_declare() -> None:
    """docs/access.md has each route, once, with its roles and whether limited tokens may call it."""
    rows = re.findall(r"^\| `([A-Z]+ /[^`]*)` \| ([^|]*) \| ([^|]*) \|", (ROOT / "docs/access.md").read_text(), re.M)
    replies = {route: (", ".join(rule.roles), "yes" if rule.limited else "no") for route, rule in ASKED}
    assert {route: (roles, is_limited) for route, roles, is_limited in rows} == replies


def test_a_route_that_says_nothing_is_refused_to_everybody() -> None:
    """Of the usual class or not, and where no token is asked for."""
    app = create(Settings())
    router = APIRouter(route_class=GuardedRoute)
    calls = []
    router.add_api_route("/usual", lambda: calls.append("usual"), methods=["POST"])
    app.fastapi.include_router(router)
    app.fastapi.add_api_route("/other", lambda: calls.append("other"), methods=["POST"])

    async def answers() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://lastbit") as client:
            return [await client.post("/usual"), await client.post("/other")]

    assert [problem(answer) for answer in asyncio.run(answers())] == [(403, "forbidden")] * 2
    assert not calls
    undeclared_paths = {path for _, path, rule in rules(app.fastapi) if rule == REFUSED}
    assert undeclared_paths == {"/usual", "/other"}


def test_a_service_without_tokens_asks_for_none(service_url: str) -> None:
    """And minds none that is sent."""
    for headers in ({}, bearer("none"), {"Authorization": "Basic eDp5"}):
        assert httpx.get(f"{service_url}/v1/batches", headers=headers).status_code == 200
        assert httpx.post(f"{service_url}/v1/acks", json={"items": []}, headers=headers).status_code == 200


@pytest.mark.parametrize("value", ["", "Bearer", "Basic eDp5", "Bearer a b", f"Bearer {'x' * 9000}"])
@pytest.mark.parametrize("path", ["/v1/acks", "/v1/batches"])
def test_what_is_no_token_is_refused(service: Service, path: str, value: str) -> None:
    """401, whatever stands in the header; so is a digest of a token that is known."""
    digest = tokens.digest(SECRETS["admin"].encode()).hex()
    with service.client() as client:
        for entry in (value, f"Bearer {digest}", f"Bearer sha256:{digest}"):
            answer = client.post(path, json={"items": []}, headers={"Authorization": entry})
            assert problem(answer) == (401, "unauthorized")


def test_the_schemes_name_is_written_in_any_way(service: Service) -> None:
    """HTTP says so."""
    for scheme in ("bearer", "BEARER", "Bearer "):
        headers = {"Authorization": f"{scheme} {SECRETS['admin']}"}
        for path in ("/v1/acks", "/v1/failures"):
            assert httpx.post(f"{service.url}{path}", json={"items": []}, headers=headers).status_code == 200


def test_a_stranger_is_refused_before_his_body_is_read(service: Service) -> None:
    """The client has sent nothing of the body yet, and has its answer."""
    for path in ("/v1/acks", "/v1/batches", "/v1/events"):
        wire = Wire(int(service.url.rpartition(":")[2]))
        wire.send(f"POST {path} HTTP/1.1\r\nHost: lastbit\r\n{JSON}Content-Length: 1000\r\n\r\n".encode())
        status, _, content = wire.answer()
        assert (status, content["code"]) == (401, "unauthorized")
        wire.close()


# Limited tokens


def test_a_token_in_a_trailer_is_none(service: Service) -> None:
    """It comes after the body, which is read for those alone who may send it."""
    trailer = f"Authorization: Bearer {SECRETS['admin']}\r\n"
    for path, body in (("/v1/batches", {}), ("/v1/acks", {"items": []})):
        wire = Wire(httpx.URL(service.url).port or 0)
        wire.send(chunked(path, body, trailers=trailer))
        assert wire.answer()[0] == 401
        wire.close()


def test_a_limited_token_opens_and_touches_its_own_batches(each_service: Service) -> None:
    """All that its roles allow."""
    with each_service.client("shop") as client, each_service.client("shop-admin") as admin:
        batch = opened(client, key="shop-1", items=3)
        child = opened(client, key="shop-1-child", items=1, sealed=True, parent=f"{batch}:0:2")
        assert client.post(f"/v1/batches/{batch}/items", json={"count": 1}).status_code == 201
        answer = client.post("/v1/acks", json={"items": [f"{batch}:0:0"]}).json()
        assert (answer["applied"], answer["rejected"]) == (1, [])
        mask = {"groups": [{"batch": batch, "group": 0, "bits": "CA=="}]}
        for attempt in (0, 1):
            answer = client.post("/v1/failures", json=mask).json()
            assert (answer["repeated"], answer["rejected"]) == (attempt, [])
        assert client.post("/v1/acks", json={"items": [f"{child}:0:0"]}).json()["completed"][0]["key"] == "shop-1-child"
        for path in ("", "/pending", "/failed", "/groups", "/groups/0", "/verify", "/watermark", "/explain"):
            assert client.get(f"/v1/batches/{batch}{path}").status_code == 200, path
        assert client.post(f"/v1/batches/{batch}/seal").json()["pending"] == 1
        assert problem(client.delete(f"/v1/batches/{batch}")) == (403, "forbidden")
        assert admin.delete(f"/v1/batches/{batch}").status_code == 204


@pytest.mark.parametrize("key", [None, "", "shop", "Shop-1", "other", " shop-1"])
def test_a_limited_token_opens_no_other_batches(service: Service, key: str | None) -> None:
    """403, naming the key."""
    with service.client("shop") as client:
        answer = client.post("/v1/batches", json={"key": key})
    assert problem(answer) == (403, "forbidden")
    assert answer.json()["detail"].startswith("body.key")


ODD = ["shop%", "shop_1", "SHOP-1", "shop", "shop.", "shoq-", None, "a", "shop/-"]


@pytest.fixture(scope="module")
def others(each_service: Service) -> list[int]:
    """Batches of others, each with an event of its own in the feed."""
    with each_service.client("admin") as client:
        return [opened(client, key=key, items=10, labels={"team": "other"}, group_size=64) for key in ODD]


LIMITED = [(route, rule) for route, rule in RULES if "{id}" in route and "/v1/batches" in route]


@pytest.mark.parametrize("route", [route for route, _ in LIMITED])
@pytest.mark.parametrize("name", ["shop", "shop-admin"])
def test_the_batch_of_another_is_one_that_is_not_there(
    each_service: Service, others: list[int], route: str, name: str
) -> None:
    """Word for word, at each route of a batch, and nothing has happened to it."""
    with each_service.client(name) as client, each_service.client("admin") as admin:
        before = [admin.get(f"/v1/batches/{batch}").json() for batch in others]
        output = set()
        for batch in (10**9, *others):
            answer = ask(client, route, id=batch)
            assert answer.status_code in (403, 404)
            output.add(re.sub(rf"\b{batch}\b", "N", answer.text))
        assert len(output) == 1, output
        assert [admin.get(f"/v1/batches/{batch}").json() for batch in others] == before


@pytest.mark.parametrize(("route", "rule"), ASKED, ids=[route for route, _ in ASKED])
def test_a_limited_token_is_refused_where_nothing_is_said_of_limits(service: Service, route: str, rule: Rule) -> None:
    """Even one with all roles; webhooks above all."""
    with service.client("shop-admin") as client:
        answer = ask(client, route)
    if route == "POST /v1/batches":
        assert answer.json()["detail"].startswith("body.key")  # its own rule
    elif rule.limited:
        assert answer.status_code not in (401, 403)
    else:
        assert problem(answer) == (403, "forbidden")
        assert "limited" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/acks", "/v1/failures"])
def test_an_ack_of_anothers_item_is_rejected_as_unknown(each_service: Service, others: list[int], path: str) -> None:
    """As one of a batch that was never opened, by id and by mask; the call's own items count; the other's are as they
    were. Nor is a mask measured by the other's group size."""
    with each_service.client("shop") as client, each_service.client("admin") as admin:
        own_batch = opened(client, key="shop-acks", items=10, group_size=64)
        missing = 10**9
        for attempt in range(2):
            foreign = [*others, missing]
            answer = client.post(
                path,
                json={
                    "items": [f"{own_batch}:0:0", *(f"{batch}:0:0" for batch in foreign)],
                    "groups": [
                        {"batch": own_batch, "group": 0, "bits": "Ag=="},
                        # 16 bytes: more than 64 items have, and a group of theirs has 64.
                        *({"batch": batch, "group": 0, "bits": "AgAAAAAAAAAAAAAAAAAAAA=="} for batch in foreign),
                    ],
                },
            )
            assert answer.status_code == 200, answer.text
            replies = answer.json()
            assert (replies["applied"], replies["repeated"]) == ((2, 0) if attempt == 0 else (0, 2))
            assert {entry["reason"] for entry in replies["rejected"]} == {"unknown_batch"}
            assert {entry["item"] for entry in replies["rejected"] if "item" in entry} == {f"{b}:0:0" for b in foreign}
            assert {entry["group"] for entry in replies["rejected"] if "group" in entry} == {f"{b}:0" for b in foreign}
        assert client.post(path, json={"items": [f"{others[0]}:0:0"]}).json()["rejected"] == [
            {"reason": "unknown_batch", "item": f"{others[0]}:0:0"}
        ]
        assert [admin.get(f"/v1/batches/{batch}").json()["pending"] for batch in others] == [10] * len(others)
        # Those who may, can.
        assert admin.post(path, json={"items": [f"{own_batch}:0:5", f"{own_batch}:0:6"]}).json()["applied"] == 2


def test_a_limited_list_has_its_own_batches_alone(each_service: Service, others: list[int]) -> None:
    """By page, by state, by label; a filter by another's key finds nothing."""
    with each_service.client("shop") as client:
        own_batch = [
            opened(client, key=key, labels={"team": "other"})
            for key in ("shop-", "shop-ü", "shop-~", "shop-\U0010ffff")
        ]
        result, cursor = [], None
        while True:
            page = client.get("/v1/batches", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
            result += page["batches"]
            cursor = page["next"]
            if cursor is None:
                break
        assert {batch["id"] for batch in result} >= set(own_batch)
        assert all(batch["key"].startswith("shop-") for batch in result)
        labelled_batches = client.get("/v1/batches", params={"label": "team:other", "state": "open"}).json()["batches"]
        assert {batch["id"] for batch in labelled_batches} == set(own_batch)
        assert client.get("/v1/batches", params={"key": "shop%"}).json()["batches"] == []
        assert client.get("/v1/batches", params={"key": "shop-ü"}).json()["batches"] != []


def test_a_limited_reader_of_the_feed_sees_its_own_events_alone(each_service: Service, others: list[int]) -> None:
    """Read, waited for and streamed; asked for another's batch, there are none."""
    with each_service.client("shop") as client, each_service.client("admin") as admin:
        start = admin.get("/v1/events?limit=1&after=0").json()["last"]
        batch = opened(client, key="shop-feed", items=1)
        opened(admin, key="other-feed", items=1)
        admin.post(
            "/v1/events", json={"events": [{"id": f"x{batch}", "type": "mine", "key": "other"}]}
        ).raise_for_status()
        own_batch = {"id": f"shop-{batch}", "type": "mine", "key": "shop-x", "data": 1}
        client.post("/v1/events", json={"events": [own_batch]}).raise_for_status()
        for query in ("", "&wait=5"):
            page = client.get(f"/v1/events?after={start}{query}").json()
            assert [event["id"] for event in page["events"]] == [f"batch:{batch}:opened", f"shop-{batch}"]
        all_events = client.get("/v1/events?limit=1000").json()["events"]
        assert all(event["key"].startswith("shop-") for event in all_events)
        assert client.get(f"/v1/events?batch={others[0]}").json()["events"] == []
        with client.stream("GET", f"/v1/events/stream?after={start}") as stream:
            data = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
            assert [next(data)["id"] for _ in range(2)] == [f"batch:{batch}:opened", f"shop-{batch}"]
            opened(admin, key="other-live", items=1)
            admin.post("/v1/events", json={"events": [{"id": f"y{batch}", "type": "mine"}]}).raise_for_status()
            seal = client.post(f"/v1/batches/{batch}/seal").json()
            assert seal["state"] == "sealed"
            assert next(data)["id"] == f"batch:{batch}:sealed"


@pytest.mark.parametrize(
    ("event", "place"),
    [
        ({"id": "shop-1", "type": "t"}, "key"),
        ({"id": "shop-1", "type": "t", "key": "other"}, "key"),
        ({"id": "1", "type": "t", "key": "shop-1"}, "id"),
    ],
)
def test_a_limited_token_appends_its_own_events_alone(service: Service, event: dict[str, Any], place: str) -> None:
    """The id too, or it could have another's event taken for a repeat; and nothing of such a call is appended."""
    with service.client("shop") as client:
        fine = {"id": f"shop-fine-{len(event)}-{place}", "type": "t", "key": "shop-"}
        answer = client.post("/v1/events", json={"events": [fine, event]})
        assert problem(answer) == (403, "forbidden")
        assert f"body.events[1].{place}" in answer.json()["detail"]
        assert client.post("/v1/events", json={"events": [fine]}).json()["events"][0]["repeated"] is False


@pytest.mark.parametrize("group", ["there", "not-there"])
def test_a_fence_of_a_limited_token_shows_no_consumer_group(service: Service, group: str) -> None:
    """One answer, whether the group exists or not, and even if the fence would hold."""
    with service.client("admin") as admin:
        admin.put("/v1/consumer-groups/there", json={"partitions": 1})
        [lease] = admin.post("/v1/consumer-groups/there/sync", json={"worker": "w", "session": "s"}).json()["assigned"]
        fence = {"group": group, "partition": 0, "worker": "w", "epoch": lease["epoch"]}
        event = {"id": f"shop-fenced-{group}", "type": "t", "key": "shop-"}
        with service.client("shop") as client:
            answers = [
                client.post("/v1/events", json={"events": [event], "fence": {**fence, "epoch": epoch}})
                for epoch in (lease["epoch"], lease["epoch"] + 1)
            ]
        for answer in answers:
            assert problem(answer) == (403, "forbidden")
            assert "consumer groups are not for limited tokens" in answer.json()["detail"]
        assert admin.post("/v1/events", json={"events": [event]}).json()["events"][0]["repeated"] is False


def test_idempotency_keys_of_others_are_not_met(each_service: Service) -> None:
    """The same key opens a batch of each, neither is told of the other, and each is replayed to its own."""
    with each_service.client("shop") as client, each_service.client("admin") as admin:
        headers = {"Idempotency-Key": "nightly"}
        other_batch = admin.post("/v1/batches", json={"key": "other", "items": 1}, headers=headers).json()["id"]
        own_batch = [client.post("/v1/batches", json={"key": "shop-1"}, headers=headers) for _ in range(2)]
        assert own_batch[0].json()["id"] == own_batch[1].json()["id"] != other_batch
        assert own_batch[1].headers["idempotency-replayed"] == "true"
        reuse = client.post("/v1/batches", json={"key": "shop-2"}, headers=headers)
        assert problem(reuse) == (422, "idempotency_key_reused")
        assert "'nightly'" in reuse.json()["detail"]
        assert str(other_batch) not in re.findall(r"\d+", reuse.json()["detail"])


def test_an_item_of_anothers_batch_can_be_no_parent(each_service: Service, others: list[int]) -> None:
    """As if it were not there; and of a child that is another's, an explanation names the number alone."""
    with each_service.client("shop") as client, each_service.client("admin") as admin:
        output = []
        for batch in (10**9, others[0]):
            answer = client.post("/v1/batches", json={"key": "shop-1", "parent": f"{batch}:0:0"})
            assert problem(answer) == (422, "invalid_request")
            output.append(answer.text.replace(str(batch), "N"))
        assert output[0] == output[1]
        own_batch = opened(client, key="shop-parent", items=2, sealed=True)
        for index, (opener, key) in enumerate([(admin, "other-child"), (client, "shop-child")]):
            opened(opener, key=key, items=1, parent=f"{own_batch}:0:{index}")
        reasons = client.get(f"/v1/batches/{own_batch}/explain").json()["reasons"]
        (waits,) = [reason for reason in reasons if reason["code"] == "waiting_for_children"]
        assert [child["key"] for child in waits["children"]] == [None, "shop-child"]
        assert "other-child" not in json.dumps(reasons)


# Tokens come and go


class Changing:
    """A service whose tokens stand in a file."""

    def __init__(self, running: ServiceProcess, file: Path, log: Path) -> None:
        self.running = running
        self.file = file
        self.log = log

    def write(self, text: str) -> None:
        """As it should be done: the file is there whole, or not at all."""
        other = self.file.with_suffix(".new")
        other.write_text(text)
        other.rename(self.file)

    def hang_up(self) -> None:
        assert self.running.process is not None
        self.running.process.send_signal(signal.SIGHUP)

    def said(self, event: str) -> int:
        """How often."""
        return sum(json.loads(line)["event"] == event for line in self.log.read_text().splitlines())

    def status(self, name: str) -> set[int]:
        """By several connections, so that each worker is asked."""
        result = set()
        for _ in range(6 if self.running.workers > 1 else 1):
            with quick(base_url=self.running.url, headers=bearer(name)) as client:
                result.add(client.post("/v1/acks", json={"items": []}).status_code)
        return result


@contextlib.contextmanager
def changing_service(folder: Path, workers: int) -> Iterator[Changing]:
    file, log = folder / "tokens", folder / "log"
    file.write_text(lines(KNOWN))
    with sqlite_file() as url:
        environment = {"LASTBIT_TOKENS_FILE": str(file), "TMPDIR": str(folder)}
        running = ServiceProcess(url, workers=workers, environment=environment, log=log)
        try:
            yield Changing(running.start(), file, log)
        finally:
            running.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def changing_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changing]:
    with changing_service(tmp_path_factory.mktemp("changing"), workers=1) as service:
        yield service


@pytest.fixture
def changing(changing_module: Changing) -> Changing:
    """With all tokens."""
    changing_module.write(lines(KNOWN))
    changing_module.hang_up()
    eventually(lambda: changing_module.status("consume"), {200})
    return changing_module


def test_a_changed_file_is_heeded_by_all_processes(tmp_path: Path) -> None:
    """Without a signal: removed tokens are refused; a session that one process began is known to the other."""
    with changing_service(tmp_path, workers=2) as service:
        assert service.status("consume") == service.status("admin") == {200}
        with quick(base_url=service.running.url) as client:
            cookies = dict(client.post("/session", json={"token": SECRETS["admin"]}).cookies)
        for _ in range(6):
            with quick(base_url=service.running.url, cookies=cookies) as client:
                assert client.get("/v1/batches").status_code == 200
        service.write(lines([KNOWN[3]]))
        eventually(lambda: (service.status("consume"), service.status("admin")), ({401}, {200}))


def test_a_connection_that_has_acked_is_not_trusted_for_ever(changing: Changing) -> None:
    """Its requests all look alike, and the server knows them; the token in them is looked up each time. And a stream
    that is open ends without another event."""
    url = changing.running.url
    # In one packet each, so that their first bytes are known again.
    consumer = Wire(changing.running.port)
    ack = request([], headers=f"{JSON}Authorization: {bearer('consume')['Authorization']}\r\n")

    def answered() -> int:
        consumer.send(ack)
        return consumer.answer()[0]

    with (
        contextlib.closing(consumer),
        quick(base_url=url, headers=bearer("read"), timeout=30) as reader,
        quick(base_url=url, headers=bearer("admin")) as admin,
        reader.stream("GET", "/v1/events/stream") as stream,
    ):
        data = stream.iter_lines()
        assert next(data) == "retry: 1000"
        for _ in range(3):
            assert answered() == 200
        changing.write(lines([KNOWN[3]]))
        changing.hang_up()
        eventually(answered, 401)
        admin.post("/v1/batches", json={"key": "outside-its-prefix"}).raise_for_status()
        assert not any("outside-its-prefix" in line for line in data)


def test_a_file_that_is_broken_changes_nothing(changing: Changing) -> None:
    """The known tokens stay, and the log gives the reason without quoting the file."""
    for text in (f"oops {SECRETS['none']}\n", "", lines([KNOWN[2], KNOWN[2]])):
        collected = changing.said("tokens_not_reloaded")
        changing.write(text)
        changing.hang_up()
        eventually(lambda collected=collected: changing.said("tokens_not_reloaded") > collected, True)  # type: ignore[misc]
        assert changing.status("consume") == {200}
    assert SECRETS["none"] not in changing.log.read_text()


# Where it listens


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "lastbit.example", "127.0.0.1.example"])
def test_without_tokens_it_listens_to_this_machine_alone(host: str) -> None:
    """Unless it is told that this is meant."""
    with pytest.raises(errors.Misconfigured, match="can be reached by others"):
        _check_access(Settings(host=host))
    _check_access(Settings(host=host, insecure=True))
    _check_access(Settings(host=host, tokens=KNOWN[0].line()))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_this_machine_no_token_is_needed(host: str) -> None:
    """It is reached by those who are on it already."""
    _check_access(Settings(host=host))


def test_the_refusal_is_a_sentence(tmp_path: Path) -> None:
    """Exit status 1, and what to do."""
    refusal = run("--host", "0.0.0.0", "--database-url", f"sqlite:///{tmp_path}/lastbit.db")
    assert (refusal.returncode, "Traceback" in refusal.stderr) == (1, False)
    assert all(word in refusal.stderr for word in ("lastbit token new", "LASTBIT_TOKENS_FILE", "--insecure"))


def test_tokens_that_can_not_be_read_are_refused_and_not_shown(tmp_path: Path) -> None:
    """The text may be a token itself."""
    broken_file = tmp_path / "broken"
    broken_file.write_text(f"# mine\nmine {SECRETS['none']}")
    (tmp_path / "bytes").write_bytes(SECRETS["none"].encode() + b"\xff")
    for settings, output in (
        (Settings(tokens=SECRETS["none"]), "line 1"),
        (Settings(tokens_file=str(broken_file)), "line 2"),
        (Settings(tokens_file=str(tmp_path / "bytes")), "not UTF-8"),
        (
            Settings(tokens_file=str(tmp_path / "absent")),
            "there is no such file; `lastbit token new` makes a line for it",
        ),
        (Settings(tokens="# none yet"), "there is no token"),
        (Settings(tokens=""), "there is no token"),
    ):
        with pytest.raises(errors.Misconfigured, match=output) as refusal:
            _check_access(settings)
        assert SECRETS["none"] not in str(refusal.value)


# Sessions


@pytest.fixture
def session(service: Service) -> Iterator[httpx.Client]:
    """A browser's, signed in as admin."""
    with service.client() as client:
        client.post("/session", json={"token": SECRETS["admin"]}).raise_for_status()
        assert "lastbit" in client.cookies
        yield client


def test_a_session_changes_something_only_for_our_own_page(service: Service, session: httpx.Client) -> None:
    """The browser has to say so; a token has no need of it."""
    foreign: list[dict[str, str]] = [
        {},
        {"Origin": "https://elsewhere.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": service.url},
        {"Origin": f"{service.url}.elsewhere.example"},
    ]
    for headers in foreign:
        assert problem(session.post("/v1/batches", json={}, headers=headers)) == (403, "forbidden"), headers
        assert problem(session.delete("/v1/batches/1", headers=headers)) == (403, "forbidden"), headers
    for headers in ({"Origin": service.url}, {"Sec-Fetch-Site": "same-origin"}):
        assert session.post("/v1/batches", json={}, headers=headers).status_code == 201
    assert session.get("/v1/batches").status_code == 200
    with service.client("admin") as client:
        assert client.post("/v1/batches", json={}, headers=foreign[1]).status_code == 201


def test_no_other_sites_page_signs_anybody_in_or_out(service: Service, session: httpx.Client) -> None:
    """Whose session it is, is for the page's own user to say."""
    foreign = {"Origin": "https://elsewhere.example"}
    assert problem(session.post("/session", json={"token": SECRETS["read"]}, headers=foreign)) == (403, "forbidden")
    assert problem(session.delete("/session", headers=foreign)) == (403, "forbidden")
    assert session.get("/session").json()["name"] == "admin"


def test_who_is_signed_in_is_said(service: Service, session: httpx.Client) -> None:
    """To the page, which asks first; nobody is no error. Signing out has the browser forget it."""
    assert session.get("/session").json() == {"needed": True, "name": "admin", "roles": ["admin"], "prefix": None}
    assert session.delete("/session").status_code == 204
    assert "lastbit" not in session.cookies
    anonymous = session.get("/session")
    assert (anonymous.status_code, anonymous.json()["name"]) == (200, None)
    wrong = session.post("/session", json={"token": SECRETS["none"]})
    assert problem(wrong) == (401, "unauthorized")
    assert "set-cookie" not in wrong.headers


def test_an_ack_takes_a_token_and_no_session(session: httpx.Client) -> None:
    """Programs ack; so the short way asks for nothing else."""
    assert problem(session.post("/v1/acks", json={"items": []}, headers={"Sec-Fetch-Site": "same-origin"})) == (
        401,
        "unauthorized",
    )


def test_a_session_ends_in_time_and_can_not_be_forged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any change and any other signature is refused."""
    own_sessions, other_batch = Sessions("k" * 32), Sessions("l" * 32)
    digest = tokens.digest(b"token")
    creation = own_sessions.make(digest)
    assert own_sessions.read(f"a=b; lastbit={creation}; c".encode()) == digest
    assert own_sessions.read(f"__Host-lastbit={creation}".encode()) == digest
    assert Sessions("k" * 32).read(f"lastbit={creation}".encode()) == digest
    until, _, rest = creation.partition(".")
    later_cookie = f"{int(until) + 1}.{rest}"
    for forgery in (
        later_cookie,
        creation[:-1],
        creation + "x",
        "",
        ".",
        "..",
        "1.2.3",
        creation.upper(),
        other_batch.make(digest),
    ):
        assert own_sessions.read(f"lastbit={forgery}".encode()) == b""
    assert own_sessions.read(b"\xff\xfe=;=;lastbit=\xff") == b""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + SECONDS - 1)
    assert own_sessions.read(f"lastbit={creation}".encode()) == digest
    monkeypatch.setattr(time, "time", lambda: now + SECONDS + 1)
    assert own_sessions.read(f"lastbit={creation}".encode()) == b""


@pytest.mark.parametrize(
    ("headers", "scheme", "secure"),
    [
        ({}, "http", False),
        ({"origin": "http://127.0.0.1:8000"}, "http", False),
        ({}, "https", True),
        ({"x-forwarded-proto": "https"}, "http", True),
        ({"origin": "https://lastbit.example"}, "http", True),
    ],
)
def test_over_https_the_cookie_stays_there(headers: dict[str, str], scheme: str, secure: bool) -> None:
    """Also where a proxy ends it: the browser says where it is."""
    creation = cookie("x", headers, scheme)
    assert ("; Secure" in creation) is secure
    assert creation.startswith("__Host-lastbit=x" if secure else "lastbit=x")
    assert "HttpOnly" in creation
    assert "SameSite=Strict" in creation


# Logged, and not logged


@pytest.mark.parametrize(("route", "rule"), RULES, ids=[route for route, _ in RULES])
def test_each_answer_has_the_headers_that_keep_browsers_in_bounds(service: Service, route: str, rule: Rule) -> None:
    """Right or wrong."""
    for name in (None, "admin"):
        with service.client(name) as client:
            answer = ask(client, route)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] in ("no-store", "no-cache")
        assert "access-control-allow-origin" not in answer.headers
    assert not rule.everybody or answer.status_code != 401


def test_no_log_says_a_token(tmp_path: Path) -> None:
    """Of whatever is sent, right or wrong; but it says whose request it was."""
    with sqlite_file() as url:
        running = ServiceProcess(
            url, log=tmp_path / "log", environment={"LASTBIT_TOKENS": lines(KNOWN), "LASTBIT_LOG_LEVEL": "debug"}
        )
        try:
            running.start()
            with httpx.Client(base_url=running.url) as client:
                for name in ("read", "none", "consume"):
                    for method, path, body in (
                        ("GET", "/v1/batches", None),
                        ("POST", "/v1/acks", {"items": ["x"]}),
                        ("POST", "/v1/batches", {"key": 7}),
                        ("POST", "/session", {"token": SECRETS[name]}),
                        ("POST", "/session", {"token": [SECRETS[name]]}),
                        ("POST", "/session", {"token": SECRETS[name] * 500}),
                    ):
                        answer = client.request(method, path, json=body, headers=bearer(name))
                        assert SECRETS[name] not in answer.text
                client.get(f"/v1/batches?key={'x' * 300}", headers={**bearer("read"), "X-Request-Id": "last"})
            path = tmp_path / "log"
            eventually(lambda: '"request_id": "last"' in path.read_text(), True)
        finally:
            running.stop()
        text = (tmp_path / "log").read_text()
        assert all(secret not in text for secret in SECRETS.values())
        assert all(token.digest.hex() not in text for token in KNOWN)
        names = [line["token"] for line in map(json.loads, text.splitlines()) if line.get("request_id") == "last"]
        assert names == ["read"]
