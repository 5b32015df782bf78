"""What one tenant may take: of connections, of memory for bodies and of memory for responses. The others get the
rest."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.limits.connections import MOST_PROBES
from api.limits.open_requests import OPEN, OpenRequests
from api.limits.room import Room
from api.limits.shares import NOBODY, OF_ALL, Shares
from api.limits.unsent import Unsent
from api.problems import Problem
from lastbit import tokens
from lastbit.tokens import Role, Token
from tests.http.test_limits import connect, everything, head, refused
from tests.mutants import mutant
from tests.support.exposition import eventually
from tests.support.servers import ServiceProcess, free_port, running_service, sqlite_file

ALL = (Role.READ, Role.PRODUCE, Role.CONSUME)
CONNECTIONS = 40
SHARE = CONNECTIONS // OF_ALL
SECRETS = {name: tokens.new() for name in ("tenant", "neighbour", "admin")}
KNOWN = [
    tokens.known(SECRETS["tenant"], "tenant", ALL, "a-"),
    tokens.known(SECRETS["neighbour"], "neighbour", ALL, "b-"),
    tokens.known(SECRETS["admin"], "admin", [Role.ADMIN]),
]


@pytest.fixture(scope="module")
def running() -> Iterator[ServiceProcess]:
    with (
        sqlite_file() as url,
        running_service(
            url,
            LASTBIT_TOKENS=";".join(token.line() for token in KNOWN),
            LASTBIT_MAX_CONNECTIONS=str(CONNECTIONS),
            LASTBIT_PROBE_PORT=str(free_port()),
        ) as service,
    ):
        yield service


def bearer(name: str) -> str:
    return f"Authorization: Bearer {SECRETS[name]}\r\n"


def get(path: str, name: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n{bearer(name)}\r\n".encode()


def client(running: ServiceProcess, name: str) -> httpx.Client:
    return httpx.Client(base_url=running.url, headers={"Authorization": f"Bearer {SECRETS[name]}"}, timeout=30)


def slow_ack(extra: str) -> bytes:
    return head("/v1/acks", 100, bearer("tenant") + extra) + b"{"


HOLDING = {
    "streams": get("/v1/events/stream", "tenant"),
    "long polls": get("/v1/events?wait=3", "tenant"),
    "slow bodies": head("/v1/events", 100, bearer("tenant")) + b"{",
    "slow acks": slow_ack(""),
    "slow acks on the ordinary path": slow_ack("Origin: http://x\r\n"),
}


@mutant(
    "a-tenant-may-have-any-number-of-open-requests",
    "api.limits.open_requests:OpenRequests.begin",
    "self._shares.has_room(caller, 1)",
    "True",
)
@mutant(
    "slow-acks-are-no-open-requests",
    "api.fast_path.acks:AckVerb.exchange",
    "caller.is_limited",
    "False",
    case="slow acks",
)
@pytest.mark.parametrize("request_of_tenant", HOLDING.values(), ids=HOLDING)
def test_a_tenant_holds_a_share_of_the_connections(running: ServiceProcess, request_of_tenant: bytes) -> None:
    """Whatever it sends. What it has held is free again when it leaves."""
    for _ in range(2):
        with contextlib.ExitStack() as held, client(running, "neighbour") as neighbour:
            for _ in range(SHARE):
                held.enter_context(connect(running, request_of_tenant))
            # The service has read them all once it answers this.
            assert neighbour.post("/v1/batches", json={"key": "b-1"}).status_code == 201
            for _ in range(CONNECTIONS):
                with connect(running, request_of_tenant) as connection:
                    assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")
            assert neighbour.post("/v1/batches", json={"key": "b-2"}).status_code == 201
        with client(running, "tenant") as tenant:
            eventually(lambda: tenant.get("/v1/batches").status_code, 200)


@mutant(
    "probes-count-as-connections",
    "api.limits.connections:Connections.add",
    "self._probe_port is not None and address[1] == self._probe_port",
    "False",
)
def test_probes_are_answered_when_strangers_have_taken_every_connection(running: ServiceProcess) -> None:
    """On a port of their own, with a limit of its own."""
    port = int(running.environment["LASTBIT_PROBE_PORT"])
    with contextlib.ExitStack() as taken:
        for _ in range(CONNECTIONS):
            taken.enter_context(connect(running))
        eventually(lambda: refused_at_once(running), True)
        for path in ("/healthz", "/readyz", "/metrics"):
            answer = httpx.get(
                f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {SECRETS['admin']}"}
            )
            assert answer.status_code == 200
        for _ in range(MOST_PROBES):
            taken.enter_context(socket.create_connection(("127.0.0.1", port)))
        with socket.create_connection(("127.0.0.1", port), timeout=10) as one_more:
            assert refused(everything(one_more)) == (503, "unavailable")


def refused_at_once(running: ServiceProcess) -> bool:
    with connect(running, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as connection:
        return everything(connection).startswith(b"HTTP/1.1 503")


@mutant(
    "a-tenant-may-fill-the-room-of-all",
    "api.limits.room:Room.take",
    "not self._shares.has_room(caller, size)",
    "False",
)
def test_a_tenant_fills_its_share_of_the_room() -> None:
    """Others, and tokens without a prefix, have room until all is taken."""
    room = Room(400)
    tenant, neighbour, every = (Token(name, frozenset(ALL), name.encode(), prefix) for name, prefix in PREFIXES.items())
    room.take(tenant, 100)
    with pytest.raises(Problem):
        room.take(tenant, 1)
    room.take(neighbour, 90)
    room.take(every, 210)
    with pytest.raises(Problem):
        room.take(every, 1)
    room.give(tenant, 100)
    room.take(tenant, 90)
    assert room.used == 390


PREFIXES = {"tenant": "a-", "neighbour": "b-", "every": None}


@given(st.lists(st.tuples(st.sampled_from([*PREFIXES, "stranger"]), st.integers(1, 60)), max_size=40))
def test_shares_are_what_was_taken_and_not_given(steps: list[tuple[str, int]]) -> None:
    """In any order. The least that is allowed is one of any size."""
    callers = {name: Token(name, frozenset(ALL), name.encode(), prefix) for name, prefix in PREFIXES.items()}
    callers["stranger"] = NOBODY
    shares = Shares(400)
    taken: dict[str, list[int]] = {name: [] for name in callers}
    for name, amount in steps:
        fits = name == "every" or not taken[name] or sum(taken[name]) + amount <= 100
        assert shares.has_room(callers[name], amount) == fits
        if fits:
            shares.take(callers[name], amount)
            taken[name].append(amount)
        else:
            shares.give(callers[name], taken[name].pop(0))


class Reader:
    """A connection whose client doesn't read."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def call(react: Callable[[], None]) -> None:
    react()


@mutant(
    "unread-responses-fill-the-memory",
    "api.limits.unsent:Unsent.add",
    "self._total > self._limit",
    "False",
)
@mutant(
    "a-tenant-may-leave-unread-what-all-may",
    "api.limits.unsent:Unsent.add",
    "has_share(caller) and self._of(caller) > self._limit // OF_ALL",
    "False",
)
def test_the_oldest_unread_responses_of_the_heaviest_token_are_ended() -> None:
    """A tenant's at its share, the others' at the limit; never those of a neighbour."""
    unsent = Unsent(call, limit=400)
    tenant, neighbour, every = (Token(name, frozenset(ALL), name.encode(), prefix) for name, prefix in PREFIXES.items())
    readers = {token: [Reader() for _ in range(6)] for token in (tenant, neighbour, every)}

    def aborted(token: Token) -> list[bool]:
        return [reader.aborted for reader in readers[token]]

    for reader in readers[tenant][:3]:
        unsent.add(reader, tenant, 40)
    assert aborted(tenant) == [True, False, False, False, False, False]
    unsent.add(readers[neighbour][0], neighbour, 90)
    for reader in readers[every]:
        unsent.add(reader, every, 60)
    assert aborted(every) == [True, True, True, False, False, False]
    assert not any(aborted(neighbour))
    unsent.remove(readers[every][3], every)
    unsent.remove(readers[every][3], every)  # as when it leaves after it has read
    unsent.add(Reader(), every, 60)
    assert aborted(every) == [True, True, True, False, False, False]


def test_pages_that_nobody_reads_are_ended_at_their_share() -> None:
    """What a client requests and doesn't read stays in the service's memory, beyond what the kernel takes."""
    lines = ";".join(token.line() for token in KNOWN)
    with (
        sqlite_file() as url,
        running_service(url, LASTBIT_TOKENS=lines) as running,
        client(running, "tenant") as tenant,
        client(running, "admin") as admin,
        contextlib.ExitStack() as unread,
    ):
        event = {"key": "a-", "type": "paid", "data": "x" * 60_000}
        events = [{**event, "id": f"a-{index}"} for index in range(20)]
        assert tenant.post("/v1/events", json={"events": events}).status_code == 200
        pages = get("/v1/events?limit=1000", "tenant") * 10
        for _ in range(45):
            unread.enter_context(connect(running, pages, receive=4096))
        eventually(lambda: sample(admin, 'lastbit_refused_total{cause="unread"}') > 0, True)
        assert sample(admin, "process_resident_memory_bytes") < 400 * 2**20
        assert tenant.get("/v1/events?limit=1").status_code == 200


def sample(admin: httpx.Client, name: str) -> float:
    lines = admin.get("/metrics").text.splitlines()
    return float(next(line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")))


def test_a_request_ends_once_whether_it_is_answered_or_its_connection_is_lost() -> None:
    requests = OpenRequests(OF_ALL)
    tenant = Token("tenant", frozenset(ALL), b"tenant", "a-")
    scope: dict[str, Any] = {}
    with requests.one_of(tenant, scope):
        with pytest.raises(Problem) as refusal, requests.one_of(tenant, {}):
            pass
        assert refusal.value.status == 429
        scope[OPEN].end()
        other = requests.begin(tenant)
        assert other is not None
    assert requests.begin(tenant) is None
    other.end()
    with pytest.raises(ZeroDivisionError), requests.one_of(tenant, scope):
        raise ZeroDivisionError
    assert requests.begin(tenant) is not None
