"""Permissions: each role at each route, the view of a limited token, changes of tokens, sessions, headers."""

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
from api.limits import Limits
from api.openapi import rules
from api.routes.route import GuardedRoute
from core import errors
from core.settings import Settings
from core.storage import schema
from core.storage.database import Database
from lastbit import tokens
from lastbit.tokens import Role, Token
from tests.conftest import KINDS
from tests.http.test_fast_path import JSON, Wire, chunked, request
from tests.http.test_main import run
from tests.mutants import mutant
from tests.support.exposition import eventually
from tests.support.servers import ServiceProcess, running_service, sqlite_file

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
        authorization = {} if name is None else bearer(name)
        return quick(base_url=self.url, timeout=70, headers={**authorization, **headers})


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS=lines(KNOWN)) as running:
        yield Service(running.url)


@pytest.fixture(scope="module", params=KINDS)
def each_service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A service on each kind of database, as each compares keys in its own way."""
    if request.param == "sqlite":
        yield request.getfixturevalue("service")
        return
    url = request.getfixturevalue(request.param).new_database()
    with Database(url) as database:
        schema.migrate(database)
    with running_service(url, LASTBIT_TOKENS=lines(KNOWN)) as running:
        yield Service(running.url)


def open_batch(client: httpx.Client, **body: Any) -> int:
    answer = client.post("/v1/batches", json=body)
    assert answer.status_code == 201, answer.text
    batch: int = answer.json()["id"]
    return batch


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def ask(client: httpx.Client, route: str, **names: Any) -> httpx.Response:
    """An empty call of the route. An endless answer, such as a stream, is not read."""
    method, _, path = route.partition(" ")
    values = {"id": 10**9, "group": 0, "partition": 0, "name": "main.js", **names}
    path = re.sub(r"{(\w+)}", lambda name: str(values.get(name[1], "none")), path)
    body = {"json": {}} if method == "POST" else {}
    with client.stream(method, path, **body) as answer:  # type: ignore[arg-type]
        if not answer.headers["content-type" if answer.status_code != 204 else "date"].startswith("text/event-stream"):
            answer.read()
        return answer


# Each role at each route


@mutant(
    "a-role-is-not-needed-on-the-fast-path",
    "api.fast_path.verbs:RouteVerb.exchange",
    "caller is None or caller.is_limited or not caller.has(self._rule.roles)",
    "caller is None or caller.is_limited",
)
@pytest.mark.parametrize(("route", "rule"), RULES, ids=[route for route, _ in RULES])
def test_each_role_can_call_exactly_the_routes_that_allow_it(service: Service, route: str, rule: Rule) -> None:
    """Without a token or with a wrong one, 401; with a token that lacks the role, 403 and the name of the role. Nothing
    else of the request is checked before."""
    assert rule != REFUSED, "this route must declare who may call it: @needs(…) or @open_to_all"
    for name in (None, "none", *Role):
        with service.client(name) as client:
            answer = ask(client, route)
        if rule.everybody:
            # Signing in has no token to check.
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


def test_a_route_without_a_rule_is_refused_to_everyone() -> None:
    """Whether or not it has the usual class, and even where no token is required."""
    app = create(Settings())
    router = APIRouter(route_class=GuardedRoute)
    calls = []
    router.add_api_route("/usual", lambda: calls.append("usual"), methods=["POST"])
    app.fastapi.include_router(router)
    app.fastapi.add_api_route("/other", lambda: calls.append("other"), methods=["POST"])

    async def answers() -> list[httpx.Response]:
        app.state.limits = Limits(Settings(), asyncio.get_running_loop())
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://lastbit") as client:
            return [await client.post("/usual"), await client.post("/other")]

    assert [problem(answer) for answer in asyncio.run(answers())] == [(403, "forbidden")] * 2
    assert not calls
    undeclared_paths = {path for _, path, rule in rules(app.fastapi) if rule == REFUSED}
    assert undeclared_paths == {"/usual", "/other"}


def test_a_service_without_tokens_requires_none(service_url: str) -> None:
    """And ignores a token that is sent."""
    for headers in ({}, bearer("none"), {"Authorization": "Basic eDp5"}):
        assert httpx.get(f"{service_url}/v1/batches", headers=headers).status_code == 200
        assert httpx.post(f"{service_url}/v1/acks", json={"items": []}, headers=headers).status_code == 200


@pytest.mark.parametrize("value", ["", "Bearer", "Basic eDp5", "Bearer a b", f"Bearer {'x' * 9000}"])
@pytest.mark.parametrize("path", ["/v1/acks", "/v1/batches"])
def test_anything_that_is_not_a_known_token_is_refused(service: Service, path: str, value: str) -> None:
    """401 for any other header; also for the digest of a known token."""
    digest = tokens.digest(SECRETS["admin"].encode()).hex()
    with service.client() as client:
        for entry in (value, f"Bearer {digest}", f"Bearer sha256:{digest}"):
            answer = client.post(path, json={"items": []}, headers={"Authorization": entry})
            assert problem(answer) == (401, "unauthorized")


def test_the_schemes_name_is_case_insensitive(service: Service) -> None:
    """As HTTP requires."""
    for scheme in ("bearer", "BEARER", "Bearer "):
        headers = {"Authorization": f"{scheme} {SECRETS['admin']}"}
        for path in ("/v1/acks", "/v1/failures"):
            assert httpx.post(f"{service.url}{path}", json={"items": []}, headers=headers).status_code == 200


def test_a_client_without_a_token_is_refused_before_its_body_is_read(service: Service) -> None:
    """The client has sent none of the body yet, and has its answer."""
    for path in ("/v1/acks", "/v1/batches", "/v1/events"):
        wire = Wire(int(service.url.rpartition(":")[2]))
        wire.send(f"POST {path} HTTP/1.1\r\nHost: lastbit\r\n{JSON}Content-Length: 1000\r\n\r\n".encode())
        status, _, content = wire.answer()
        assert (status, content["code"]) == (401, "unauthorized")
        wire.close()


# Limited tokens


@mutant(
    "trailers-are-read-as-headers", "api.server.upgrades:Http1Protocol._ignore_trailers", "self.headers = []", "pass"
)
def test_a_token_in_a_trailer_does_not_count(service: Service) -> None:
    """It comes after the body, which is read only for clients that may send it."""
    trailer = f"Authorization: Bearer {SECRETS['admin']}\r\n"
    for path, body in (("/v1/batches", {}), ("/v1/acks", {"items": []})):
        wire = Wire(httpx.URL(service.url).port or 0)
        wire.send(chunked(path, body, trailers=trailer))
        assert wire.answer()[0] == 401
        wire.close()


def test_a_limited_token_opens_and_touches_its_own_batches(each_service: Service) -> None:
    """With everything that its roles allow."""
    with each_service.client("shop") as client, each_service.client("shop-admin") as admin:
        batch = open_batch(client, key="shop-1", items=3)
        child = open_batch(client, key="shop-1-child", items=1, sealed=True, parent=f"{batch}:0:2")
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
    """Batches of other clients, each with its own event in the feed."""
    with each_service.client("admin") as client:
        return [open_batch(client, key=key, items=10, labels={"team": "other"}, group_size=64) for key in ODD]


LIMITED = [(route, rule) for route, rule in RULES if "{id}" in route and "/v1/batches" in route]


@mutant(
    "a-limited-token-opens-any-batch-on-the-fast-path",
    "api.fast_path.verbs:RouteVerb.exchange",
    "caller is None or caller.is_limited or not caller.has(self._rule.roles)",
    "caller is None or not caller.has(self._rule.roles)",
)
@pytest.mark.parametrize("route", [route for route, _ in LIMITED])
@pytest.mark.parametrize("name", ["shop", "shop-admin"])
def test_another_clients_batch_looks_like_a_missing_one(
    each_service: Service, others: list[int], route: str, name: str
) -> None:
    """The same text at each route of a batch, and the batch is unchanged."""
    with each_service.client(name) as client, each_service.client("admin") as admin:
        before = [admin.get(f"/v1/batches/{batch}").json() for batch in others]
        texts = set()
        for batch in (10**9, *others):
            answer = ask(client, route, id=batch)
            assert answer.status_code in (403, 404)
            texts.add(re.sub(rf"\b{batch}\b", "N", answer.text))
        assert len(texts) == 1, texts
        assert [admin.get(f"/v1/batches/{batch}").json() for batch in others] == before


@pytest.mark.parametrize(("route", "rule"), ASKED, ids=[route for route, _ in ASKED])
def test_a_limited_token_is_refused_at_routes_without_limits(service: Service, route: str, rule: Rule) -> None:
    """Even a token with all roles, and above all for webhooks."""
    with service.client("shop-admin") as client:
        answer = ask(client, route)
    if route == "POST /v1/batches":
        assert answer.json()["detail"].startswith("body.key")  # the route's own rule
    elif rule.limited:
        assert answer.status_code not in (401, 403)
    else:
        assert problem(answer) == (403, "forbidden")
        assert "limited" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/acks", "/v1/failures"])
def test_an_ack_of_another_clients_item_is_rejected_as_unknown(
    each_service: Service, others: list[int], path: str
) -> None:
    """As an item of a batch that was never opened, by id and by mask. The call's own items count, and the other
    client's are unchanged. The size of a mask isn't checked against the other batch's group size either."""
    with each_service.client("shop") as client, each_service.client("admin") as admin:
        own_batch = open_batch(client, key="shop-acks", items=10, group_size=64)
        missing = 10**9
        for attempt in range(2):
            other_batches = [*others, missing]
            answer = client.post(
                path,
                json={
                    "items": [f"{own_batch}:0:0", *(f"{batch}:0:0" for batch in other_batches)],
                    "groups": [
                        {"batch": own_batch, "group": 0, "bits": "Ag=="},
                        # 16 bytes: more than 64 items need, and a group of those batches has 64.
                        *({"batch": batch, "group": 0, "bits": "AgAAAAAAAAAAAAAAAAAAAA=="} for batch in other_batches),
                    ],
                },
            )
            assert answer.status_code == 200, answer.text
            content = answer.json()
            assert (content["applied"], content["repeated"]) == ((2, 0) if attempt == 0 else (0, 2))
            assert {entry["reason"] for entry in content["rejected"]} == {"unknown_batch"}
            assert {entry["item"] for entry in content["rejected"] if "item" in entry} == {
                f"{b}:0:0" for b in other_batches
            }
            assert {entry["group"] for entry in content["rejected"] if "group" in entry} == {
                f"{b}:0" for b in other_batches
            }
        assert client.post(path, json={"items": [f"{others[0]}:0:0"]}).json()["rejected"] == [
            {"reason": "unknown_batch", "item": f"{others[0]}:0:0"}
        ]
        assert [admin.get(f"/v1/batches/{batch}").json()["pending"] for batch in others] == [10] * len(others)
        # A token with the permission can ack them.
        assert admin.post(path, json={"items": [f"{own_batch}:0:5", f"{own_batch}:0:6"]}).json()["applied"] == 2


def test_a_limited_list_has_only_its_own_batches(each_service: Service, others: list[int]) -> None:
    """By page, by state, by label; a filter by another client's key finds nothing."""
    with each_service.client("shop") as client:
        own_batches = [
            open_batch(client, key=key, labels={"team": "other"})
            for key in ("shop-", "shop-ü", "shop-~", "shop-\U0010ffff")
        ]
        result, cursor = [], None
        while True:
            page = client.get("/v1/batches", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
            result += page["batches"]
            cursor = page["next"]
            if cursor is None:
                break
        assert {batch["id"] for batch in result} >= set(own_batches)
        assert all(batch["key"].startswith("shop-") for batch in result)
        labelled_batches = client.get("/v1/batches", params={"label": "team:other", "state": "open"}).json()["batches"]
        assert {batch["id"] for batch in labelled_batches} == set(own_batches)
        assert client.get("/v1/batches", params={"key": "shop%"}).json()["batches"] == []
        assert client.get("/v1/batches", params={"key": "shop-ü"}).json()["batches"] != []


def test_a_limited_reader_of_the_feed_sees_only_its_own_events(each_service: Service, others: list[int]) -> None:
    """When reading, waiting and streaming; a filter by another client's batch finds none."""
    with each_service.client("shop") as client, each_service.client("admin") as admin:
        start = admin.get("/v1/events?limit=1&after=0").json()["last"]
        batch = open_batch(client, key="shop-feed", items=1)
        open_batch(admin, key="other-feed", items=1)
        admin.post(
            "/v1/events", json={"events": [{"id": f"x{batch}", "type": "mine", "key": "other"}]}
        ).raise_for_status()
        own_event = {"id": f"shop-{batch}", "type": "mine", "key": "shop-x", "data": 1}
        client.post("/v1/events", json={"events": [own_event]}).raise_for_status()
        for query in ("", "&wait=5"):
            page = client.get(f"/v1/events?after={start}{query}").json()
            assert [event["id"] for event in page["events"]] == [f"batch:{batch}:opened", f"shop-{batch}"]
        all_events = client.get("/v1/events?limit=1000").json()["events"]
        assert all(event["key"].startswith("shop-") for event in all_events)
        assert client.get(f"/v1/events?batch={others[0]}").json()["events"] == []
        with client.stream("GET", f"/v1/events/stream?after={start}") as stream:
            data = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
            assert [next(data)["id"] for _ in range(2)] == [f"batch:{batch}:opened", f"shop-{batch}"]
            open_batch(admin, key="other-live", items=1)
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
def test_a_limited_token_appends_only_its_own_events(service: Service, event: dict[str, Any], place: str) -> None:
    """The id too, or its event could make another client's one a repeat; and nothing of such a call is appended."""
    with service.client("shop") as client:
        valid_event = {"id": f"shop-fine-{len(event)}-{place}", "type": "t", "key": "shop-"}
        answer = client.post("/v1/events", json={"events": [valid_event, event]})
        assert problem(answer) == (403, "forbidden")
        assert f"body.events[1].{place}" in answer.json()["detail"]
        assert client.post("/v1/events", json={"events": [valid_event]}).json()["events"][0]["repeated"] is False


@mutant("a-limited-token-may-fence", "api.routes.events:_fence", "caller.prefix is not None", "False")
@pytest.mark.parametrize("group", ["there", "not-there"])
def test_a_fence_of_a_limited_token_shows_no_consumer_group(service: Service, group: str) -> None:
    """The same answer whether or not the group exists, even if the fence would hold."""
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


def test_idempotency_keys_of_other_clients_do_not_collide(each_service: Service) -> None:
    """The same key opens a batch for each client, neither learns about the other, and each gets its own replay."""
    with each_service.client("shop") as client, each_service.client("admin") as admin:
        headers = {"Idempotency-Key": "nightly"}
        other_batch = admin.post("/v1/batches", json={"key": "other", "items": 1}, headers=headers).json()["id"]
        openings = [client.post("/v1/batches", json={"key": "shop-1"}, headers=headers) for _ in range(2)]
        assert openings[0].json()["id"] == openings[1].json()["id"] != other_batch
        assert openings[1].headers["idempotency-replayed"] == "true"
        reuse = client.post("/v1/batches", json={"key": "shop-2"}, headers=headers)
        assert problem(reuse) == (422, "idempotency_key_reused")
        assert "'nightly'" in reuse.json()["detail"]
        assert str(other_batch) not in re.findall(r"\d+", reuse.json()["detail"])


def test_an_item_of_another_clients_batch_cannot_be_a_parent(each_service: Service, others: list[int]) -> None:
    """The answer is as if the batch didn't exist; and an explanation names only the number of another client's
    child."""
    with each_service.client("shop") as client, each_service.client("admin") as admin:
        texts = []
        for batch in (10**9, others[0]):
            answer = client.post("/v1/batches", json={"key": "shop-1", "parent": f"{batch}:0:0"})
            assert problem(answer) == (422, "invalid_request")
            texts.append(answer.text.replace(str(batch), "N"))
        assert texts[0] == texts[1]
        parent = open_batch(client, key="shop-parent", items=2, sealed=True)
        for index, (opener, key) in enumerate([(admin, "other-child"), (client, "shop-child")]):
            open_batch(opener, key=key, items=1, parent=f"{parent}:0:{index}")
        reasons = client.get(f"/v1/batches/{parent}/explain").json()["reasons"]
        (waits,) = [reason for reason in reasons if reason["code"] == "waiting_for_children"]
        assert [child["key"] for child in waits["children"]] == [None, "shop-child"]
        assert "other-child" not in json.dumps(reasons)


# Changes of tokens


class ReloadingService:
    """A service with a file of tokens."""

    def __init__(self, running: ServiceProcess, file: Path, log: Path) -> None:
        self.running = running
        self.file = file
        self.log = log

    def write(self, text: str) -> None:
        """Replace the file atomically, as an operator should."""
        other = self.file.with_suffix(".new")
        other.write_text(text)
        other.rename(self.file)

    def hang_up(self) -> None:
        assert self.running.process is not None
        self.running.process.send_signal(signal.SIGHUP)

    def count(self, event: str) -> int:
        """The number of log lines with this event."""
        return sum(json.loads(line)["event"] == event for line in self.log.read_text().splitlines())

    def status(self, name: str) -> set[int]:
        """The statuses over several connections, so that each worker is asked."""
        result = set()
        for _ in range(6 if self.running.workers > 1 else 1):
            with quick(base_url=self.running.url, headers=bearer(name)) as client:
                result.add(client.post("/v1/acks", json={"items": []}).status_code)
        return result


@contextlib.contextmanager
def changing_service(folder: Path, workers: int) -> Iterator[ReloadingService]:
    file, log = folder / "tokens", folder / "log"
    file.write_text(lines(KNOWN))
    with sqlite_file() as url:
        environment = {"LASTBIT_TOKENS_FILE": str(file), "TMPDIR": str(folder)}
        running = ServiceProcess(url, workers=workers, environment=environment, log=log)
        try:
            yield ReloadingService(running.start(), file, log)
        finally:
            running.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def changing_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReloadingService]:
    with changing_service(tmp_path_factory.mktemp("changing"), workers=1) as service:
        yield service


@pytest.fixture
def changing(changing_module: ReloadingService) -> ReloadingService:
    """The service, with all tokens in its file."""
    changing_module.write(lines(KNOWN))
    changing_module.hang_up()
    eventually(lambda: changing_module.status("consume"), {200})
    return changing_module


def test_all_processes_reload_a_changed_file(tmp_path: Path) -> None:
    """Without a signal: removed tokens are refused; a session that one process started is known to the other."""
    with changing_service(tmp_path, workers=2) as service:
        assert service.status("consume") == service.status("admin") == {200}
        with quick(base_url=service.running.url) as client:
            cookies = dict(client.post("/session", json={"token": SECRETS["admin"]}).cookies)
        for _ in range(6):
            with quick(base_url=service.running.url, cookies=cookies) as client:
                assert client.get("/v1/batches").status_code == 200
        service.write(lines([KNOWN[3]]))
        eventually(lambda: (service.status("consume"), service.status("admin")), ({401}, {200}))


def test_a_connection_that_has_acked_is_checked_again(changing: ReloadingService) -> None:
    """The server recognizes its requests by their heads, but still checks the token in each. And an open stream ends
    without another event."""
    url = changing.running.url
    # In one packet each, so that the server recognizes their first bytes.
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


def test_a_broken_token_file_changes_nothing(changing: ReloadingService) -> None:
    """The known tokens stay, and the log gives the reason without quoting the file."""
    for text in (f"oops {SECRETS['none']}\n", "", lines([KNOWN[2], KNOWN[2]])):
        failures = changing.count("tokens_not_reloaded")
        changing.write(text)
        changing.hang_up()
        eventually(lambda failures=failures: changing.count("tokens_not_reloaded") > failures, True)  # type: ignore[misc]
        assert changing.status("consume") == {200}
    assert SECRETS["none"] not in changing.log.read_text()


# The address it listens on


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "lastbit.example", "127.0.0.1.example"])
def test_without_tokens_it_listens_only_on_loopback(host: str) -> None:
    """Unless the operator confirms that it is meant."""
    with pytest.raises(errors.Misconfigured, match="other machines can reach"):
        _check_access(Settings(host=host))
    _check_access(Settings(host=host, insecure=True))
    _check_access(Settings(host=host, tokens=KNOWN[0].line()))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_no_token_is_required(host: str) -> None:
    """Only programs on this machine can reach it."""
    _check_access(Settings(host=host))


def test_the_refusal_explains_what_to_do(tmp_path: Path) -> None:
    """Exit status 1, and advice."""
    refusal = run("--host", "0.0.0.0", "--database-url", f"sqlite:///{tmp_path}/lastbit.db")
    assert (refusal.returncode, "Traceback" in refusal.stderr) == (1, False)
    assert all(word in refusal.stderr for word in ("lastbit token new", "LASTBIT_TOKENS_FILE", "--insecure"))


def test_unreadable_tokens_are_refused_and_not_printed(tmp_path: Path) -> None:
    """The text may be a token itself."""
    broken_file = tmp_path / "broken"
    broken_file.write_text(f"# mine\nmine {SECRETS['none']}")
    (tmp_path / "bytes").write_bytes(SECRETS["none"].encode() + b"\xff")
    for settings, message in (
        (Settings(tokens=SECRETS["none"]), "line 1"),
        (Settings(tokens_file=str(broken_file)), "line 2"),
        (Settings(tokens_file=str(tmp_path / "bytes")), "not UTF-8"),
        (
            Settings(tokens_file=str(tmp_path / "absent")),
            "there is no such file; `lastbit token new` prints a line for it",
        ),
        (Settings(tokens="# none yet"), "there is no token"),
        (Settings(tokens=""), "there is no token"),
    ):
        with pytest.raises(errors.Misconfigured, match=message) as refusal:
            _check_access(settings)
        assert SECRETS["none"] not in str(refusal.value)


def test_a_file_of_tokens_may_come_from_windows(tmp_path: Path) -> None:
    """With a byte order mark and carriage returns."""
    file = tmp_path / "tokens"
    file.write_text("\ufeff" + lines(KNOWN).replace("\n", "\r\n"), newline="")
    _check_access(Settings(tokens_file=str(file)))


# Sessions


@pytest.fixture
def session(service: Service) -> Iterator[httpx.Client]:
    """A browser's session, signed in as admin."""
    with service.client() as client:
        client.post("/session", json={"token": SECRETS["admin"]}).raise_for_status()
        assert "lastbit" in client.cookies
        yield client


def test_only_the_services_own_page_can_write_with_a_session(service: Service, session: httpx.Client) -> None:
    """The browser has to confirm the origin; a request with a token needs no confirmation."""
    foreign_headers: list[dict[str, str]] = [
        {},
        {"Origin": "https://elsewhere.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": service.url},
        {"Origin": f"{service.url}.elsewhere.example"},
    ]
    for headers in foreign_headers:
        assert problem(session.post("/v1/batches", json={}, headers=headers)) == (403, "forbidden"), headers
        assert problem(session.delete("/v1/batches/1", headers=headers)) == (403, "forbidden"), headers
    for headers in ({"Origin": service.url}, {"Sec-Fetch-Site": "same-origin"}):
        assert session.post("/v1/batches", json={}, headers=headers).status_code == 201
    assert session.get("/v1/batches").status_code == 200
    with service.client("admin") as client:
        assert client.post("/v1/batches", json={}, headers=foreign_headers[1]).status_code == 201


def test_another_sites_page_cannot_sign_in_or_out(service: Service, session: httpx.Client) -> None:
    """Only the service's own page may sign in or out."""
    foreign = {"Origin": "https://elsewhere.example"}
    assert problem(session.post("/session", json={"token": SECRETS["read"]}, headers=foreign)) == (403, "forbidden")
    assert problem(session.delete("/session", headers=foreign)) == (403, "forbidden")
    assert session.get("/session").json()["name"] == "admin"


def test_the_current_session_is_reported(service: Service, session: httpx.Client) -> None:
    """The page asks for it first; no session is no error. Signing out makes the browser delete the cookie."""
    assert session.get("/session").json() == {"needed": True, "name": "admin", "roles": ["admin"], "prefix": None}
    assert session.delete("/session").status_code == 204
    assert "lastbit" not in session.cookies
    anonymous = session.get("/session")
    assert (anonymous.status_code, anonymous.json()["name"]) == (200, None)
    refusal = session.post("/session", json={"token": SECRETS["none"]})
    assert problem(refusal) == (401, "unauthorized")
    assert "set-cookie" not in refusal.headers


def test_an_ack_needs_a_token_and_accepts_no_session(session: httpx.Client) -> None:
    """Only programs ack, so the fast path checks no session."""
    assert problem(session.post("/v1/acks", json={"items": []}, headers={"Sec-Fetch-Site": "same-origin"})) == (
        401,
        "unauthorized",
    )


def test_a_stream_ends_with_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a request of its browser, which would be refused."""
    key, now = "k" * 32, time.time
    settings = {"LASTBIT_TOKENS": lines(KNOWN), "LASTBIT_SESSION_KEY": key}
    with (
        sqlite_file() as database,
        running_service(database, **settings) as running,
        quick(base_url=running.url, timeout=30) as browser,
        quick(base_url=running.url, headers=bearer("admin")) as admin,
    ):
        assert admin.get("/v1/batches").status_code == 200
        with monkeypatch.context() as earlier:
            earlier.setattr(time, "time", lambda: now() - SECONDS + 5)
            browser.cookies.set("lastbit", Sessions(key).make(KNOWN[0].digest))
        with browser.stream("GET", "/v1/events/stream") as stream:
            data = stream.iter_lines()
            assert next(data) == "retry: 1000"
            eventually(lambda: browser.get("/v1/batches").status_code, 401)
            admin.post("/v1/batches", json={"key": "after-its-end"}).raise_for_status()
            assert not any("after-its-end" in line for line in data)


def test_a_session_expires_and_cannot_be_forged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any change and any other signature is refused."""
    sessions, other_sessions = Sessions("k" * 32), Sessions("l" * 32)
    digest = tokens.digest(b"token")
    cookie_value = sessions.make(digest)
    assert sessions.read(f"a=b; lastbit={cookie_value}; c".encode()) == digest
    assert sessions.read(f"__Host-lastbit={cookie_value}".encode()) == digest
    assert Sessions("k" * 32).read(f"lastbit={cookie_value}".encode()) == digest
    expiry, _, rest = cookie_value.partition(".")
    later_cookie = f"{int(expiry) + 1}.{rest}"
    for forgery in (
        later_cookie,
        cookie_value[:-1],
        cookie_value + "x",
        "",
        ".",
        "..",
        "1.2.3",
        cookie_value.upper(),
        other_sessions.make(digest),
    ):
        assert sessions.read(f"lastbit={forgery}".encode()) == b""
    assert sessions.read(b"\xff\xfe=;=;lastbit=\xff") == b""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + SECONDS - 1)
    assert sessions.read(f"lastbit={cookie_value}".encode()) == digest
    monkeypatch.setattr(time, "time", lambda: now + SECONDS + 1)
    assert sessions.read(f"lastbit={cookie_value}".encode()) == b""


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
def test_over_https_the_cookie_is_secure(headers: dict[str, str], scheme: str, secure: bool) -> None:
    """Also if a proxy ends TLS: the browser names the scheme."""
    set_cookie = cookie("x", headers, scheme)
    assert ("; Secure" in set_cookie) is secure
    assert set_cookie.startswith("__Host-lastbit=x" if secure else "lastbit=x")
    assert "HttpOnly" in set_cookie
    assert "SameSite=Strict" in set_cookie


# Logged, and not logged


@pytest.mark.parametrize(("route", "rule"), RULES, ids=[route for route, _ in RULES])
def test_each_answer_has_the_browser_security_headers(service: Service, route: str, rule: Rule) -> None:
    """Whether it succeeds or fails."""
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


def test_no_log_contains_a_token(tmp_path: Path) -> None:
    """The requests have valid and invalid tokens. The log gives only the name of the token of each request."""
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
