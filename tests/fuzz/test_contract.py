"""Tests of openapi.yaml: Schemathesis generates requests of each operation, good and bad ones, and compares the answers
with the document. There is no 5xx, and no undocumented status, type, header or body; requests that the schema refuses
are refused, those it allows are accepted; and requests without a token are refused as such.

Cases that only ever got a 404 would test little, so most ids and names in them are replaced with those of existing
things (`_aim`).
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

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fuzz-contract"), pytest.mark.timeout(3600)]
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
                # Too many ids and a too large body have their own errors.
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


# Through fixtures, so that the cases are generated when the test runs: during collection, each test process would
# generate all of them. Each operation is a subtest.
WHOLE: Final = schemathesis.pytest.from_fixture("whole_document")
PLAIN: Final = schemathesis.pytest.from_fixture("plain_document")

EXCUSED: Final = {
    # JSON Schema counts 7.0 as an integer; the contract is strict: neither `1.5` nor `1.0` is an integer.
    r".*": r"expected an integer",
    # If an integer or an object is allowed, such a number is refused as neither.
    r"body\.drained\[\d+\]": r"expected an object",
    # A schema can't express which cursors, hosts, snapshots and positions are valid.
    r"query\.cursor": r"expected the `next` of an earlier page",
    r"body\.(callback\.)?url": r"expected a URL|expected a host name|expected a port|expected an address",
    r"body(\.positions\[\d+\])?\.snapshot": r"snapshot|base64",
    r"query\.after|body\.after|header Last-Event-ID": r"the feed's last position|expected a position",
    r"body\.parent": r".",
    # Nor that a digest needs a header,
    r"body\.digest": r"expected an Idempotency-Key with it",
    # that a policy needs another one, that a time is in the future, or that an item is one of this batch.
    r"body\.on_exceeded": r"it needs tolerated_failures",
    r"body\.deadline": r"in the future",
    r"body\.labels": r"expected at most 64 labels",
    r"body\.(items\[\d+\]|by)": r"expected an item of batch",
    # Nor that a batch seals itself or is sealed, and has no more items then; or that pending items have no reason.
    r"body\.seal_at": r"expected either sealed or seal_at|expected at least the \d+ items",
    # Or that a count fits between two positions, or that a redelivery is for one event.
    r"body": r"pending items|one event for each position|expected a position, an event, or neither",
    # Ranges of one source in a call follow one another, and positions are counted in bytes.
    r"body\.ranges\[\d+\](\.after|\.upto|\.totals)?": r"of the same source|the ranges before it|bytes|2\^53|keys other",
    r"body(\.position|\.event)?": r"feed|planned for webhook",
    # Near 2^63 the generator uses doubles, and then exceeds the maximum.
    r"body(\.positions\[\d+\])?\.head": r"9,223,372,036,854,775,807",
    # 16 digits are a little more than 2^53.
    r"body\.items\[\d+\]|body\.parent": r"below 2\^53",
    # The number of a group's partitions is not in the schema.
    r"path\.partition|body\.fence\.partition|body\.drained\[\d+\]": r"expected at most [\d,]+",
    # A mask is as long as its batch's groups, which the schema doesn't know.
    r"body\.groups\[\d+\]\.bits": r"at most",
    # The descriptions name the reserved names.
    r"path\.group|body\.fence\.group": r"expected a group of yours",
    r"body\.events\[\d+\]\.(id|type)": r"expected (an id|a type) of yours",
    # The list of the service's types grows.
    r"body\.(callback\.)?types|query\.type": r"no event has the type",
    # Filters that contradict each other.
    r"query\.(key_prefix|opened_before|outcome)": r"or no key|later than opened_after|no state but complete",
    r"query\.unchanged_for": r"no state but open or sealed",
    r"query\.parent": r"expected a batch's id or an item's id|2\^53",
    # Two labels of one name, which `label=` can't require at once.
    r"query\.label": r"two values at once",
    r"header Idempotency-Key": r"was used before with another body",
}
"""Inputs that the document allows and the service refuses: the location, the error there, and the reason in a
comment."""


@schemathesis.check
def valid_data_is_accepted(ctx: Any, response: Any, case: Any) -> None:
    """A request that the document allows is refused only for a known reason."""
    try:
        positive_data_acceptance(ctx, response, case)
    except Failure:
        if "\ufffd" in unquote(response.request.url):
            return  # a literal per cent sign formed an escape of an invalid character with the characters after it
        places = response.json().get("errors", [])
        for value in places:
            if not any(
                re.fullmatch(place, value["place"]) and re.search(message_pattern, value["expected"])
                for place, message_pattern in EXCUSED.items()
            ):
                raise
        if not places:
            raise


@schemathesis.check
def problems_are_documented(ctx: Any, response: Any, case: Any) -> None:
    """A problem's body has the status of its response, and its operation has an example of it; a 503 has a Retry-After;
    all have an id."""
    if response.status_code >= 400 and case.method != "HEAD":
        problem = response.json()
        assert (problem["status"], STATUS[problem["code"]]) == (response.status_code,) * 2
        assert response.headers["x-request-id"]
        assert (response.status_code == 503) == ("retry-after" in response.headers)
        documented_response = case.operation.definition.raw["responses"].get(str(response.status_code))
        # A 405 belongs to another method of the path, not to this operation.
        if documented_response is not None:
            assert problem["code"] in documented_response["content"]["application/problem+json"]["examples"]
        placed = ("invalid_request", "out_of_order", "source_conflict")
        assert bool(problem.get("errors")) == (problem["code"] in placed) or (
            problem["code"] in ("idempotency_key_reused", "step_reused")
        )


@schemathesis.check
def all_methods_are_allowed(ctx: Any, response: Any, case: Any) -> None:
    """`Allow` names the methods of the path; some paths also match an instance or key, whose name may have slashes, and
    then it names those methods as well."""
    try:
        allow_header_conformance(ctx, response, case)
    except Failure:
        prefixes = (
            "/v1/processes/{process}/{instance}",
            "/v1/processes/{process}/handle",
            "/v1/processes/{process}/unnamed",
            "/v1/tallies/{tally}/apply",
            "/v1/tallies/{tally}/ranges",
        )
        methods = set(response.headers["allow"][0].split(", "))
        if not case.path.startswith(prefixes) or methods != {"GET", "POST"}:
            raise


class Service:
    """A service with a token for each role and an object of each kind."""

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
            "batches": self._send("POST", "/v1/batches", {"items": 5})["id"],
            "webhooks": self._send("POST", "/v1/webhooks", {"url": "http://127.0.0.1:9/"})["id"],
        }

    def headers(self, caller: str | None) -> dict[str, str]:
        return {} if caller is None or not self.guarded else {"Authorization": f"Bearer {SECRETS[caller]}"}

    def _furnish(self, number: int) -> None:
        batch = self._send("POST", "/v1/batches", {"key": "k", "items": 200, "group_size": 64, "labels": {"a": "b"}})
        self.batches.append(batch["id"])
        self._send("POST", "/v1/failures", {"items": [f"{batch['id']}:0:1"], "reason": "why"})
        if number:
            self._send("POST", "/v1/acks", {"groups": [{"batch": batch["id"], "group": 0, "bits": "/w=="}]})
            self._send("POST", f"/v1/batches/{batch['id']}/seal", {})
        if number == 2:
            self._send("POST", f"/v1/batches/{batch['id']}/cancel", {})
        self.webhook = self._send("POST", "/v1/webhooks", {"url": "http://127.0.0.1:9/"})["id"]
        self._send("PUT", "/v1/consumer-groups/g", {"partitions": 4})
        group_sync = self._send("POST", "/v1/consumer-groups/g/sync", {"worker": "w", "session": "s"})
        snapshot = {"worker": "w", "epoch": group_sync["assigned"][0]["epoch"], "snapshot": SNAPSHOT}
        self._send(
            "PUT", f"/v1/consumer-groups/g/partitions/{group_sync['assigned'][0]['partition']}/position", snapshot
        )
        self._send("PUT", "/v1/processes/p", {"partitions": 1})
        self._send("POST", "/v1/events", {"events": [{"id": f"e{number}", "type": "t", "key": "i", "data": {"a": 1}}]})
        process_sync = self._send("POST", "/v1/consumer-groups/process.p/sync", {"worker": "w", "session": "s"})
        fence = {"worker": "w", "epoch": process_sync["assigned"][0]["epoch"]}
        event = {"id": f"e{number}", "position": self._send("GET", "/v1/events", None)["last"]}
        handling = {"event": event, "fence": fence, "version": number, "state": {"n": number}}
        changes = {"commands": [{"type": "c", "step": f"s{number}"}], "timers": [{"timer": "t", "after": 1000}]}
        self._send("POST", "/v1/processes/p/i/handle", {**handling, **changes})
        source = {"topic": "t", "partition": 0, "offset": number}
        self._send("POST", "/v1/tallies/t/apply", {"entries": [{"key": "k", "delta": 1, "source": source}]})

    def _send(self, method: str, path: str, body: Any) -> Any:
        answer = self.admin.request(method, path, json=body)
        assert answer.is_success, (path, answer.text)
        return answer.json()

    def close(self) -> None:
        self.admin.close()
        self.session.close()


SNAPSHOT: Final = base64.b64encode(Snapshot().encode()).decode()


QUIET: Final = {
    # Requests go to a port of this machine without a listener (`_aim`).
    "LASTBIT_DISPATCHER_EVERY": "0",
    "LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true",
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    yield from _services(with_tokens=True)


@pytest.fixture(scope="module")
def open_service() -> Iterator[Service]:
    """A service without tokens."""
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
    """Limit requests that would take long or leave the machine, and make most valid cases refer to existing things."""
    wait = str((case.query or {}).get("wait"))
    if re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[0-9])?", wait) and 0 < float(wait) <= 60:
        case.query["wait"] = 0.01
    body = case.body
    if isinstance(body, dict) and re.match("https?://", str(body.get("url")), re.IGNORECASE):
        body["url"] = "http://127.0.0.1:9/"
    callback = body.get("callback") if isinstance(body, dict) else None
    if isinstance(callback, dict) and re.match("https?://", str(callback.get("url")), re.IGNORECASE):
        callback["url"] = "http://127.0.0.1:9/"
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    for name, value in (case.path_parameters or {}).items():
        number = zlib.crc32(repr(value).encode())
        if number % 4 == 0:
            continue
        if name == "id" and case.method == "DELETE":
            # The others would be missing for all later operations.
            case.path_parameters[name] = service.to_delete[case.path.split("/")[2]]
        elif name == "id" and "webhooks" in case.path:
            case.path_parameters[name] = service.webhook
        elif name == "id":
            case.path_parameters[name] = service.batches[number % len(service.batches)]
        elif name in NAMES and "batches" not in case.path and case.method != "DELETE":
            case.path_parameters[name] = NAMES[name]
    if isinstance(body, dict) and case.path == "/v1/consumer-groups/{group}/positions":
        # Else one entry with an invalid snapshot would make nearly all of these calls a 422.
        for position in body["positions"]:
            number = zlib.crc32(position["snapshot"].encode())
            position |= {"snapshot": SNAPSHOT, "partition": number % 4, "epoch": 1} if number % 8 else {}
    if isinstance(body, dict) and case.path in ("/v1/acks", "/v1/failures"):
        for place, item in enumerate(body.get("items", ())):
            number = zlib.crc32(item.encode())
            if number % 4:
                body["items"][place] = f"{service.batches[number % 3]}:{number % 5}:{number % 70}"
        for mask in body.get("groups", ()):
            mask["batch"] = service.batches[zlib.crc32(mask["bits"].encode()) % 4]
            mask["group"] %= 5


def _ask(case: Any, service: Service, caller: str | None) -> Any:
    """The answer; an endless one is not read."""
    service.asked += 1
    if case.path == STREAM and case.method == "GET":
        request = case.as_transport_kwargs(base_url=service.url, headers=service.headers(caller))
        request.pop("session", None)
        with service.session.request(**request, stream=True, timeout=30) as answer:
            if answer.status_code != 200:
                answer.content  # noqa: B018  # reads it
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
        # It requires no token, which a document for all services can't express; and Schemathesis sends a wrong token or
        # none as bad data.
        excluded_checks |= {"ignored_auth", "missing_required_header", "negative_data_rejection"}
    parameters = case.operation.definition.raw.get("parameters", ())
    types = {
        parameter["name"]: parameter["schema"].get("type") for parameter in parameters if parameter["in"] == "query"
    }
    query = case.query or {}
    # A single value and a list of it are encoded alike, and so are an empty list and nothing.
    bad_values = [
        query[name] for name in query if name in types and (types[name] == "array") != isinstance(query[name], list)
    ]
    looks_valid = bad_values and not any(isinstance(value, list) and len(value) > 1 for value in bad_values)
    if set(query) - set(types) or looks_valid:
        # An unknown parameter is ignored; and any other error in such a request may be its token, which `_ask`
        # corrects.
        excluded_checks |= {"negative_data_rejection"}
    if case.path == "/v1/processes/{process}/handle" and isinstance(case.body, dict) and case.body.get("handlings"):
        # An entry that the schema refuses has a problem in its result, and the others are applied.
        excluded_checks |= {"negative_data_rejection"}
    return {"excluded_checks": [check for check in CHECKS.get_all() if check.__name__ in excluded_checks]}


@WHOLE.parametrize()
@examples(6, 400)
def test_every_operation_answers_as_documented(case: Any, service: Service) -> None:
    """Valid and invalid requests with every permission."""
    _aim(case, service)
    _ask(case, service, "admin")


@PLAIN.given(caller=st.sampled_from([None, "read", "produce", "consume"]))
@PLAIN.parametrize()
@examples(3, 100)
def test_calls_without_permission_are_refused(case: Any, service: Service, caller: str | None) -> None:
    """401 without a token; with one, the documented answer for its role: never an answer that isn't documented."""
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
def test_a_service_without_tokens_answers_as_documented(case: Any, open_service: Service) -> None:
    """Every client may do everything there."""
    _aim(case, open_service)
    assert _ask(case, open_service, None).status_code not in (401, 403)
