"""openapi.yaml, tried: Schemathesis makes requests of each operation, good and bad ones, and holds the answers to the
document. No 5xx, no status, type, header or body that is not documented; what the schema refuses is refused, what it
takes is taken; who has no token is told so.

Cases that only ever met a 404 would try little, so most ids and names in them are exchanged for those of things that
are there (`_aim`).
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

import httpx
import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import Failure
from schemathesis.specs.openapi.checks import allow_header_conformance, positive_data_acceptance

from api.problems import STATUS
from lastbit import tokens
from lastbit.streams.snapshot import Snapshot
from lastbit.tokens import Role
from tests.fuzz.sizes import LONG, SEED, examples
from tests.support.servers import ROOT, running_service, sqlite_file

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fuzz-contract"), pytest.mark.timeout(3600 if LONG else 300)]
load_all_checks()

SECRETS: Final = {str(role): tokens.new() for role in Role}
KNOWN: Final = [tokens.known(SECRETS[role], role, [role]) for role in Role]
STREAM: Final = "/v1/events/stream"


def document(*phases: str, tokens: bool = True) -> Any:
    config = schemathesis.Config.from_dict(
        {
            "seed": SEED,
            "phases": {name: {"enabled": name in phases} for name in ("examples", "coverage", "fuzzing", "stateful")},
            "generation": {"deterministic": not LONG, "database": "none", "with-security-parameters": tokens},
            "checks": {
                # Too many ids and too large a body are told apart from other wrongs.
                "negative_data_rejection": {
                    "expected-statuses": [401, 403, 404, 405, 409, 410, 413, 415, 422],
                },
                "positive_data_acceptance": {"expected-statuses": ["2xx", 401, 403, 404, 409, 410]},
            },
        }
    )
    return schemathesis.openapi.from_path(ROOT / "openapi.yaml", config=config)


@pytest.fixture(scope="module")
def whole_document() -> Any:
    return document("examples", "coverage", "fuzzing")


@pytest.fixture(scope="module")
def plain_document() -> Any:
    return document("fuzzing", tokens=False)


# From fixtures, so that the cases are made when the test runs: made while they are collected, each process of several
# would make them all. An operation is a subtest.
WHOLE: Final = schemathesis.pytest.from_fixture("whole_document")
PLAIN: Final = schemathesis.pytest.from_fixture("plain_document")

EXCUSED: Final = {
    # JSON Schema counts 7.0 among the integers; the contract is strict: `1.5` and `1.0` are none.
    r".*": r"it should be a valid integer|Expected `int`, got `float`",
    # Where an integer or an object may stand, such a number is refused as neither.
    r"body\.drained\[\d+\]": r"it should be a valid dictionary",
    # Which cursors, hosts, snapshots and positions there are, no schema can say.
    r"query\.cursor": r"expected the `next` of an earlier page",
    r"body\.url": r"expected a URL|expected a host name|expected a port|expected an address",
    r"body\.snapshot": r"snapshot|base64",
    r"query\.after|body\.after|header Last-Event-ID": r"the feed's last position|expected a position",
    r"body\.parent": r".",
    r"body(\.position|\.event)?": r"feed|planned for webhook",
    # So near to 2^63 numbers are doubles to the generator, which then oversteps the maximum.
    r"body\.head": r"9223372036854775807",
    # 16 digits are a little more than 2^53.
    r"body\.items\[\d+\]|body\.parent": r"below 2\^53",
    # How many partitions a group has, it says itself.
    r"path\.partition|body\.fence\.partition|body\.drained\[\d+\]": r"expected at most \d+",
    # A mask is as long as its batch's groups, which only the batch knows.
    r"body\.groups\[\d+\]\.bits": r"at most",
    # The descriptions say which names the service keeps for itself.
    r"path\.group|body\.fence\.group": r"expected a group of yours",
    r"body\.events\[\d+\]\.(id|type)": r"expected (an id|a type) of yours",
    # Two labels of one name, which `label=` can't mean at once.
    r"query\.label": r"two values at once",
    r"header Idempotency-Key": r"came before with another body",
}
"""Of what the document takes and the service refuses: the place, what is said there, and above each its reason."""


@schemathesis.check
def valid_data_is_taken(ctx: Any, response: Any, case: Any) -> None:
    """A request that the document allows is refused for a known reason only."""
    try:
        positive_data_acceptance(ctx, response, case)
    except Failure:
        if "\ufffd" in unquote(response.request.url):
            return  # a per cent sign was sent as it is, and made an escape of what follows it, of no character
        places = response.json().get("errors", [])
        for value in places:
            if not any(
                re.fullmatch(place, value["place"]) and re.search(said, value["expected"])
                for place, said in EXCUSED.items()
            ):
                raise
        if not places:
            raise


@schemathesis.check
def problems_are_as_the_table_says(ctx: Any, response: Any, case: Any) -> None:
    """A problem's body says the status that it came with, and its operation has an example of it; with 503 comes when
    to try again; all bear an id."""
    if response.status_code >= 400 and case.method != "HEAD":
        problem = response.json()
        assert (problem["status"], STATUS[problem["code"]]) == (response.status_code,) * 2
        assert response.headers["x-request-id"]
        assert (response.status_code == 503) == ("retry-after" in response.headers)
        documented = case.operation.definition.raw["responses"].get(str(response.status_code))
        # Another method of the path has a 405, which is no answer of this operation.
        if documented is not None:
            assert problem["code"] in documented["content"]["application/problem+json"]["examples"]
        assert bool(problem.get("errors")) == (problem["code"] in ("invalid_request", "out_of_order")) or (
            problem["code"] == "idempotency_key_reused"
        )


@schemathesis.check
def all_methods_are_allowed(ctx: Any, response: Any, case: Any) -> None:
    """`Allow` names the methods of the path; some paths are also those of an instance or key, whose name may have
    slashes, and then it names these methods as well."""
    try:
        allow_header_conformance(ctx, response, case)
    except Failure:
        shares_path = case.path.startswith(("/v1/processes/{process}/{instance}", "/v1/tallies/{tally}/apply"))
        if not shares_path or set(response.headers["allow"][0].split(", ")) != {"GET", "POST"}:
            raise


class Service:
    """One that knows a token of each role, with a thing of each kind in it."""

    def __init__(self, url: str, *, with_tokens: bool = True) -> None:
        self.url = url
        self.guarded = with_tokens
        self.session = requests.Session()
        self.admin = httpx.Client(base_url=url, timeout=30, headers=self.headers("admin"))
        self.asked = 0
        self.batches: list[int] = []
        self.webhook = 0
        for number in range(4):
            self._furnish(number)
        self.to_delete = {
            "batches": self._done("POST", "/v1/batches", {"items": 5})["id"],
            "webhooks": self._done("POST", "/v1/webhooks", {"url": "http://127.0.0.1:9/"})["id"],
        }

    def headers(self, caller: str | None) -> dict[str, str]:
        return {} if caller is None or not self.guarded else {"Authorization": f"Bearer {SECRETS[caller]}"}

    def _furnish(self, number: int) -> None:
        batch = self._done("POST", "/v1/batches", {"key": "k", "items": 200, "group_size": 64, "labels": {"a": "b"}})
        self.batches.append(batch["id"])
        self._done("POST", "/v1/failures", {"items": [f"{batch['id']}:0:1"], "reason": "why"})
        if number:
            self._done("POST", "/v1/acks", {"groups": [{"batch": batch["id"], "group": 0, "bits": "/w=="}]})
            self._done("POST", f"/v1/batches/{batch['id']}/seal", {})
        if number == 2:
            self._done("POST", f"/v1/batches/{batch['id']}/cancel", {})
        self.webhook = self._done("POST", "/v1/webhooks", {"url": "http://127.0.0.1:9/"})["id"]
        self._done("PUT", "/v1/consumer-groups/g", {"partitions": 4})
        lease = self._done("POST", "/v1/consumer-groups/g/sync", {"worker": "w", "session": "s"})
        snapshot = {"worker": "w", "epoch": lease["assigned"][0]["epoch"], "snapshot": SNAPSHOT}
        self._done("PUT", f"/v1/consumer-groups/g/partitions/{lease['assigned'][0]['partition']}/position", snapshot)
        self._done("PUT", "/v1/processes/p", {"partitions": 1})
        self._done("POST", "/v1/events", {"events": [{"id": f"e{number}", "type": "t", "key": "i", "data": {"a": 1}}]})
        process_lease = self._done("POST", "/v1/consumer-groups/process.p/sync", {"worker": "w", "session": "s"})
        fence = {"worker": "w", "epoch": process_lease["assigned"][0]["epoch"]}
        event = {"id": f"e{number}", "position": self._done("GET", "/v1/events", None)["last"]}
        handled = {"event": event, "fence": fence, "version": number, "state": {"n": number}}
        changes = {"commands": [{"type": "c", "step": f"s{number}"}], "timers": [{"timer": "t", "after": 1000}]}
        self._done("POST", "/v1/processes/p/i/handle", {**handled, **changes})
        source = {"topic": "t", "partition": 0, "offset": number}
        self._done("POST", "/v1/tallies/t/apply", {"entries": [{"key": "k", "delta": 1, "source": source}]})

    def _done(self, method: str, path: str, body: Any) -> Any:
        answer = self.admin.request(method, path, json=body)
        assert answer.is_success, (path, answer.text)
        return answer.json()

    def close(self) -> None:
        self.admin.close()
        self.session.close()


SNAPSHOT: Final = base64.b64encode(Snapshot().encode()).decode()


QUIET: Final = {
    # Requests go to a port of this machine where nobody listens (`_aim`).
    "LASTBIT_DISPATCHER_EVERY": "0",
    "LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true",
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    yield from _services(with_tokens=True)


@pytest.fixture(scope="module")
def open_service() -> Iterator[Service]:
    """Without tokens."""
    yield from _services(with_tokens=False)


def _services(*, with_tokens: bool) -> Iterator[Service]:
    environment = {"LASTBIT_TOKENS": "\n".join(token.line() for token in KNOWN)} if with_tokens else {}
    with sqlite_file() as url, running_service(url, **QUIET, **environment) as running:
        service = Service(running.url, with_tokens=with_tokens)
        print(f"LASTBIT_FUZZ_SEED={SEED}")
        yield service
        print(f"{service.asked:,} requests were judged")
        service.close()


NAMES: Final = {"group": "g", "process": "p", "instance": "i", "worker": "w", "tally": "t", "key": "k"}


def _aim(case: Any, service: Service) -> None:
    """Bound what would take long or leave the machine, and have most cases that are good meet things that are there."""
    wait = str((case.query or {}).get("wait"))
    if re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[0-9])?", wait) and 0 < float(wait) <= 60:
        case.query["wait"] = 0.01
    body = case.body
    if isinstance(body, dict) and re.match("https?://", str(body.get("url")), re.IGNORECASE):
        body["url"] = "http://127.0.0.1:9/"
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    for name, value in (case.path_parameters or {}).items():
        number = zlib.crc32(repr(value).encode())
        if number % 4 == 0:
            continue
        if name == "id" and case.method == "DELETE":
            # The others would be gone for all operations after this one.
            case.path_parameters[name] = service.to_delete[case.path.split("/")[2]]
        elif name == "id" and "webhooks" in case.path:
            case.path_parameters[name] = service.webhook
        elif name == "id":
            case.path_parameters[name] = service.batches[number % len(service.batches)]
        elif name in NAMES and "batches" not in case.path and case.method != "DELETE":
            case.path_parameters[name] = NAMES[name]
    if isinstance(body, dict) and case.path in ("/v1/acks", "/v1/failures"):
        for place, item in enumerate(body.get("items", ())):
            number = zlib.crc32(item.encode())
            if number % 4:
                body["items"][place] = f"{service.batches[number % 3]}:{number % 5}:{number % 70}"
        for mask in body.get("groups", ()):
            mask["batch"] = service.batches[zlib.crc32(mask["bits"].encode()) % 4]
            mask["group"] %= 5


def _ask(case: Any, service: Service, caller: str | None) -> Any:
    """The answer, of which an endless one is not read."""
    service.asked += 1
    if case.path == STREAM and case.method == "GET":
        request = case.as_transport_kwargs(base_url=service.url, headers=service.headers(caller))
        request.pop("session", None)
        with service.session.request(**request, stream=True, timeout=30) as answer:
            if answer.status_code != 200:
                answer.content  # noqa: B018  # it is read
                case.validate_response(answer, headers=service.headers(caller), **_checks(service, case))
            else:
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert next(answer.iter_lines()) == b"retry: 1000"
                # So that its connection is not used again.
                answer.headers["connection"] = "close"
            return answer
    return case.call_and_validate(
        base_url=service.url,
        session=service.session,
        headers=service.headers(caller),
        timeout=30,
        **_checks(service, case),
    )


def _checks(service: Service, case: Any) -> dict[str, Any]:
    from schemathesis.checks import CHECKS

    excluded_checks = {positive_data_acceptance.__name__, allow_header_conformance.__name__}
    if not service.guarded:
        # It asks for no token, which a document for all services can't say; and Schemathesis sends a wrong one or none
        # as bad data.
        excluded_checks |= {"ignored_auth", "missing_required_header", "negative_data_rejection"}
    parameters = case.operation.definition.raw.get("parameters", ())
    types = {
        parameter["name"]: parameter["schema"].get("type") for parameter in parameters if parameter["in"] == "query"
    }
    query = case.query or {}
    # A value and a list of it alone are written alike, and so are an empty list and nothing.
    wrong = [
        query[name] for name in query if name in types and (types[name] == "array") != isinstance(query[name], list)
    ]
    alike = wrong and not any(isinstance(value, list) and len(value) > 1 for value in wrong)
    if set(query) - set(types) or alike:
        # One that nobody knows is ignored; and what else is bad of such a request may be its token, which `_ask` mends.
        excluded_checks |= {"negative_data_rejection"}
    return {"excluded_checks": [check for check in CHECKS.get_all() if check.__name__ in excluded_checks]}


@WHOLE.parametrize()
@examples(6, 400)
def test_every_operation_answers_as_its_document_says(case: Any, service: Service) -> None:
    """Good requests and bad ones of somebody who may do everything."""
    _aim(case, service)
    _ask(case, service, "admin")


@PLAIN.given(caller=st.sampled_from([None, "read", "produce", "consume"]))
@PLAIN.parametrize()
@examples(3, 100)
def test_callers_who_may_not_are_told_so(case: Any, service: Service, caller: str | None) -> None:
    """401 without a token; with one, what the operation says of its role: never an answer that it doesn't name."""
    _aim(case, service)
    answer = _ask(case, service, caller)
    roles = case.operation.definition.raw.get("x-roles", ())
    if caller is None and roles:
        assert answer.status_code == 401
    elif caller is not None and roles and caller not in roles:
        assert answer.status_code == 403
    else:
        assert answer.status_code not in (401, 403)


@PLAIN.parametrize()
@examples(3, 100)
def test_a_service_without_tokens_answers_as_the_document_says(case: Any, open_service: Service) -> None:
    """Everybody may do everything there."""
    _aim(case, open_service)
    assert _ask(case, open_service, None).status_code not in (401, 403)
