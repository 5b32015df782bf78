"""Bodies of the ack routes, good, bad and in between, compared with a decoder that is defined here: slow and simple,
using `json` and string splitting. The decoder returns 200, 413, 415 or 422, and the meaning of a valid body. The model
of the guarantees gives the answer and the resulting bits. A refusal changes no bit.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import jsonschema_rs
import pytest
import yaml
from hypothesis import event, example, given
from hypothesis import strategies as st

from api.acks.bodies import MAX_GROUPS, MAX_IDS
from api.fast_path.protocol import FastProtocol
from core.batches.lifecycle import State
from tests.fuzz.sizes import examples
from tests.fuzz.wire import Answer, Served, answers, served
from tests.guarantees.models.service import Model, perform
from tests.support.servers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fuzz-bodies"), pytest.mark.timeout(3600)]

SIZES: Final = [(64, 150, False), (64, 64, True), (8192, 9000, False), (72, 100, False), (64, 10, False)]
"""Group size, items, sealed; the last batch is cancelled."""
UNKNOWN: Final = 10**6
LIMIT: Final = 2**53


# The reference


class Refused(Exception):
    """The status of a refused body."""


class Object(list[tuple[str, Any]]):
    """All fields of an object, including repeated ones."""


def parsed(body: bytes) -> Any:
    def no_constant(name: str) -> Any:
        raise Refused(422)

    try:
        text = body.decode()
        if text.startswith("\ufeff"):
            raise Refused(422)
        value = json.loads(text, object_pairs_hook=Object, parse_constant=no_constant)
    except (ValueError, RecursionError):
        raise Refused(422) from None
    return value


def fields(value: Any, names: set[str]) -> Object:
    """Check every occurrence of every field; the last one counts."""
    if not isinstance(value, Object) or not {name for name, _ in value} <= names:
        raise Refused(422)
    return value


def text_of(value: Any) -> str:
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Refused(422)
    return value


def integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LIMIT:
        raise Refused(422)
    return value


def item_of(text: str) -> tuple[int, int, int]:
    parts = text.split(":")
    if len(parts) != 3:
        raise Refused(422)
    for part in parts:
        if not part or set(part) - set("0123456789") or (part[0] == "0" and part != "0") or len(part) > 16:
            raise Refused(422)
    batch, group, index = map(int, parts)
    if max(batch, group, index) >= LIMIT:
        raise Refused(422)
    return batch, group, index


def bits_of(text: str) -> bytes:
    if not re.fullmatch("([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?", text):
        raise Refused(422)
    return base64.b64decode(text)


def array(value: Any) -> list[Any]:
    if not isinstance(value, list) or isinstance(value, Object):
        raise Refused(422)
    return value


def mask_of(value: Any) -> tuple[int, int, str]:
    members: dict[str, Any] = {}
    for name, member in fields(value, {"batch", "group", "bits"}):
        members[name] = text_of(member) if name == "bits" else integer(member)
    if len(members) < 3:
        raise Refused(422)
    return members["batch"], members["group"], members["bits"]


def meaning(verb: str, body: bytes, group_sizes: dict[int, int]) -> dict[str, Any]:
    """The request that the body means. Raises `Refused`."""
    members: dict[str, Any] = {}
    for name, value in fields(parsed(body or b"{}"), {"items", "groups"} | ({"reason"} if verb == "fail" else set())):
        if name == "items":
            members[name] = [text_of(element) for element in array(value)]
        elif name == "groups":
            members[name] = [mask_of(element) for element in array(value)]
        else:
            members[name] = None if value is None else text_of(value)
            if len(members[name] or "") > 4000:
                raise Refused(422)
    if not members.keys() & {"items", "groups"}:
        raise Refused(422)
    items, groups = members.get("items", []), members.get("groups", [])
    if len(items) > MAX_IDS or len(groups) > MAX_GROUPS:
        raise Refused(413)
    request = {
        "verb": verb,
        "items": [list(item_of(item)) for item in items],
        "masks": [[batch, group, bits_of(bits).hex()] for batch, group, bits in groups],
        "reason": members.get("reason"),
    }
    for batch, _, bits in request["masks"]:
        if len(bits) // 2 > group_sizes.get(batch, 32768) // 8:
            raise Refused(422)
    return request


# The service


class Bench(NamedTuple):
    server: Served
    model: Model
    batches: list[int]
    schemas: dict[str, Any]

    @property
    def group_sizes(self) -> dict[int, int]:
        return {batch: self.model.batches[batch].group_size for batch in self.batches}

    def bits(self) -> dict[int, tuple[set[int], set[int]]]:
        """The acked and failed numbers in the database."""
        field_by_batch = {}
        for batch in self.batches:
            size, issued = self.model.batches[batch].group_size, self.model.batches[batch].items
            resolved, failed = set(), set()
            for group in range((issued + size - 1) // size):
                bits = self.server.service.batches.bits(batch, group)
                for numbers, field in ((resolved, bits.resolved), (failed, bits.failed)):
                    value = int.from_bytes(field, "little")
                    while value:
                        lowest = value & -value
                        numbers.add(group * size + lowest.bit_length() - 1)
                        value ^= lowest
            field_by_batch[batch] = (resolved - failed, failed)
        return field_by_batch

    def expected_bits(self) -> dict[int, tuple[set[int], set[int]]]:
        return {batch: (self.model.batches[batch].acked, self.model.batches[batch].failed) for batch in self.batches}


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    document = yaml.safe_load((ROOT / "openapi.yaml").read_text())
    components = {"components": document["components"]}
    schemas = {
        verb: jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", **components})
        for verb, name in (("ack", "Acks"), ("fail", "Failures"))
    }
    with served() as server:
        model = Model()
        batches = []
        for size, items, sealed in SIZES:
            request = {"verb": "open", "opening": {"group_size": size, "items": items, "sealed": sealed, "key": "k"}}
            batch = perform(server.service, request)["batch"]
            model.perform(request, batch)
            batches.append(batch)
        request = {"verb": "cancel", "batch": batches[-1]}
        perform(server.service, request)
        model.perform(request)
        assert model.batches[batches[-1]].state is State.CANCELLED
        assert batches == list(range(1, len(SIZES) + 1)), "the bodies have these ids"
        yield Bench(server, model, batches, schemas)


WAYS: Final = ("plain", "cut", "chunked", "close")


def send_request(bench: Bench, verb: str, way: str, body: bytes, content_type: bytes | None, cuts: list[int]) -> Answer:
    """Send the request on its own connection and return the answer."""
    head = b"POST /v1/%b HTTP/1.1\r\nHost: x\r\n" % (b"acks" if verb == "ack" else b"failures")
    if content_type is not None:
        head += b"Content-Type: %b\r\n" % content_type
    if way == "close":
        head += b"Connection: close\r\n"
    edges = sorted({0, *(place % (len(body) + 1) for place in cuts), len(body)})
    parts = [body[start:end] for start, end in itertools.pairwise(edges)]
    if way == "chunked":
        stream = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        message = [head + b"Transfer-Encoding: chunked\r\n\r\n" + stream + b"0\r\n\r\n"]
    else:
        message = [head + b"Content-Length: %d\r\n\r\n" % len(body)]
        message = [message[0], *parts] if way == "cut" else [message[0] + body]
    connection = bench.server.connect(FastProtocol)
    connection.feed(*message)
    replies = connection.until_answered() or answers(connection.transport.written)
    connection.lose()
    assert len(replies) == 1
    return replies[0]


def check_body(bench: Bench, verb: str, way: str, body: bytes, content_type: bytes | None, cuts: list[int]) -> int:
    """Send the body, compare the answer and the bits with the reference, and return the status."""
    is_json = content_type is not None and content_type.split(b";")[0].strip().lower() == b"application/json"
    answer = send_request(bench, verb, way, body, content_type, cuts)
    request: dict[str, Any] = {}
    expected_status = 200
    try:
        if body and not is_json:
            raise Refused(415)
        request = meaning(verb, body, bench.group_sizes)
    except Refused as refusal:
        expected_status = refusal.args[0]
    assert answer.status == expected_status, answer.content
    if expected_status != 200:
        problem = answer.json()
        assert answer.headers["content-type"] == "application/problem+json"
        assert problem["status"] == expected_status
        if answer.status == 422:
            assert problem["errors"][0]["place"].startswith("body")
    else:
        bench.schemas[verb].validate(json.loads(body or b"{}"))
        assert to_model(answer.json()) == bench.model.perform(request)
    assert bench.bits() == bench.expected_bits()
    return answer.status


def to_model(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer in the model's form."""
    rejected = []
    for rejection in answer["rejected"]:
        name = rejection["item"] if "item" in rejection else rejection["group"]
        assert ("group" in rejection) == ("count" in rejection)
        rejected.append([rejection["reason"], [int(part) for part in name.split(":")], rejection.get("count", 1)])
    completed = {entry.pop("batch"): entry for entry in answer["completed"]}
    return answer | {"rejected": sorted(rejected), "completed": completed}


# Bodies

EDGES: Final = [0, 1, 7, 8, 63, 64, 65, 71, 72, 99, 100, 149, 150, 8191, 8192, LIMIT - 1, LIMIT, 2**63, 2**64, 10**30]
INTEGERS = st.sampled_from(EDGES)
BATCHES = st.sampled_from([1, 1, 2, 3, 4, 5, UNKNOWN, 0])
GOOD_IDS = st.builds(
    lambda batch, group, index: f"{batch}:{group}:{index}",
    BATCHES,
    st.sampled_from([0, 0, 0, 1, 2, LIMIT - 1]),
    st.one_of(st.integers(0, 80), st.sampled_from([8191, 8192, LIMIT - 1])),
)
ODD_IDS = st.one_of(
    st.sampled_from(
        [
            *("1:0:01", "01:0:0", "1:0:+1", "1:0:-1", "1:0: 1", " 1:0:1", "1:0:1 ", "1:0:1\n", "\n1:0:1", "1:0:1\t"),
            *("1:0", "1:0:", "::", "", "1:0:1:2", "1;0;1", "1:0:1.0", "1:0:1e1", "0x1:0:1", "1:0:1_0", "\u0661:0:1"),
            *("1:0:\uff11", "1:0:\u00b2", "1:0:1\x00", "\ufeff1:0:1", "1:0:1\n1:0:2", f"{LIMIT}:0:0", f"1:{LIMIT}:0"),
            *(f"1:0:{LIMIT}", f"1:0:{LIMIT - 1}", "1:0:9007199254740993", f"1:0:{'9' * 17}", f"1:0:{'9' * 5000}"),
            *("00:0:0", "0:0:0", "-0:0:0", "1:0:\ud800", "1:0:null", "1\uff1a0\uff1a1", "1:0:1\u2028"),
        ]
    ),
    st.text(alphabet="0123456789:+- \n", max_size=12),
    st.text(max_size=8),
)
IDS = st.one_of(GOOD_IDS, GOOD_IDS, GOOD_IDS, ODD_IDS)
LENGTHS: Final = [0, 1, 7, 8, 9, 1023, 1024, 1025, 4095, 4096, 4097]
BYTES = st.one_of(
    st.binary(max_size=9),
    st.binary(max_size=9),
    st.sampled_from([bytes(size) for size in LENGTHS] + [b"\xff" * size for size in LENGTHS]),
)


@st.composite
def bits(draw: st.DrawFn) -> str:
    """base64, and texts that some decoders accept as base64."""
    text = base64.b64encode(draw(BYTES)).decode()
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return text.rstrip("=")
    if kind == 1:
        return text + "="
    if kind == 2:
        return text.replace("+", "-").replace("/", "_")
    if kind == 3:
        place = draw(st.integers(0, len(text)))
        odd = draw(st.sampled_from([" ", "\n", "\r\n", "=", "==", "\x00", "\u00e9", "\uff21", "-", "_", "A", "%3D"]))
        return text[:place] + odd + text[place:]
    return text


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), st.text(max_size=4), GOOD_IDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)


def mostly(usual: Any) -> Any:
    return st.one_of(*[usual] * 12, ANYTHING)


MASKS = st.one_of(
    *[
        st.fixed_dictionaries(
            {
                "batch": mostly(BATCHES),
                "group": mostly(st.sampled_from([0, 0, 1, 2, LIMIT - 1])),
                "bits": mostly(bits()),
            },
            optional=extra,
        )
        for extra in ({}, {}, {}, {}, {"size": st.just(1)})
    ],
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "items": mostly(st.lists(mostly(IDS), max_size=5)),
        "groups": mostly(st.lists(mostly(MASKS), max_size=3)),
        "reason": mostly(st.sampled_from(["why", "", "x" * 4000, "x" * 4001, "\U0001f600" * 4000, "\ud800", None])),
    },
)
GOOD_MASKS = st.fixed_dictionaries(
    {
        "batch": BATCHES,
        "group": st.sampled_from([0, 0, 1, 2, LIMIT - 1]),
        "bits": st.binary(max_size=8).map(lambda mask: base64.b64encode(mask).decode()),
    }
)
GOOD = st.fixed_dictionaries(
    {"items": st.lists(GOOD_IDS, max_size=6)},
    optional={"groups": st.lists(GOOD_MASKS, max_size=4)},
)
TOKENS: Final = [
    *(b"NaN", b"Infinity", b"-Infinity", b"-0", b"1.0", b"1e0", b"0.1e1", b"01", b"+1", b"0x1", b"1_0", b"true"),
    *(b"null", b'"\\ud800"', b'"\\ud800\\udc00"', b'"\\u0031:0:0"', b'"\\x31"', b"'1:0:0'", b"/**/", b"//x\n", b","),
    *(b"\xef\xbb\xbf", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x00", b"\x0b", b"\x0c", b"\xa0"),
    *(b"\xe2\x80\xa8", b"[" * 2000, b'{"a":' * 2000, b"9" * 400, b"9" * 5000, b"1e999", b'"items":["1:0:9"],'),
    *(b'"items":[7],', b'"items":null,', b'"Items":[],', b'"reason":"x",', b'"\\u0069tems":["1:0:8"],', b"\t", b"\r\n"),
]


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """JSON in the style of some writer, sometimes with a few bytes changed."""
    value = draw(st.one_of(GOOD, GOOD, BODIES))
    text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, None, 1])))
    body = text.encode(errors="surrogatepass")
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 2]))):
        place = draw(st.integers(0, len(body)))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            token = draw(st.sampled_from(TOKENS))
            marks = [mark.end() for mark in re.finditer(rb"[\[{,:]", body)]
            place = draw(st.sampled_from(marks)) if marks else place
            body = body[:place] + token + body[place:]
        elif kind == 1:
            body = body[:place]
        elif kind == 2:
            body = body[:place] + bytes([draw(st.integers(0, 255))]) + body[place + 1 :]
        elif kind == 3:
            body = body[:place] + body[place + draw(st.integers(1, 5)) :]
        else:
            body = body[:place] + draw(st.sampled_from(TOKENS)) + body[place + draw(st.integers(0, 3)) :]
    return body


TYPES = st.sampled_from(
    [
        *[b"application/json"] * 40,
        *(None, b"", b"text/plain", b"application/json; charset=utf-8", b"Application/JSON;x", b"application/jsonx"),
        *(b"application/problem+json", b"application/json,text/plain", b" application/json ", b"\xff", b"json"),
    ]
)


@given(
    verb=st.sampled_from(["ack", "fail"]),
    way=st.sampled_from(WAYS),
    body=texts(),
    content_type=TYPES,
    cuts=st.lists(st.integers(0, 500), max_size=3),
)
@example("ack", "plain", b'{"items":["1:0:0"],"items":["1:0:1"]}', b"application/json", [])
@example("ack", "plain", b'{"items":[7],"items":["1:0:1"]}', b"application/json", [])
@example("fail", "plain", b'{"items":[],"reason":"\\ud800"}', b"application/json", [])
@example("ack", "plain", b"\xef\xbb\xbf" + b'{"items":["1:0:0"]}', b"application/json", [])
@example("ack", "plain", '{"items":["1:0:0"]}'.encode("utf-16"), b"application/json", [])
@example("ack", "plain", b'{"groups":[{"batch":1,"group":-0,"bits":"AR=="}]}', b"application/json", [])
@example("ack", "plain", b'{"groups":[{"batch":1,"group":0,"bits":"AQAA="}]}', b"application/json", [])
@example("ack", "plain", b"", None, [])
@example("ack", "chunked", b"", None, [])
@examples(700, 30_000)
def test_bodies_are_decoded_as_by_the_reference(
    bench: Bench, verb: str, way: str, body: bytes, content_type: bytes | None, cuts: list[int]
) -> None:
    """Refused if the reference refuses it, with nothing applied; otherwise the answer and the bits are the model's."""
    event(f"status {check_body(bench, verb, way, body, content_type, cuts)}")


def test_a_body_is_accepted_up_to_its_limits(bench: Bench) -> None:
    """10,000 ids and 4,096 groups are accepted; with one more, nothing is applied."""
    ids = [f"3:0:{number % 8192}" for number in range(MAX_IDS + 1)]
    masks = [{"batch": 1, "group": number % 3, "bits": "gA=="} for number in range(MAX_GROUPS + 1)]
    for verb in ("fail", "ack"):
        for value in ({"items": ids}, {"groups": masks}, {"items": ["x"], "groups": masks}):
            assert check_body(bench, verb, "plain", json.dumps(value).encode(), b"application/json", []) == 413
        for way in WAYS:
            value = {"items": ids[1:], "groups": masks[1:]}
            assert check_body(bench, verb, way, json.dumps(value).encode(), b"application/json", [5, 70_000]) == 200


def test_every_prefix_of_a_body_is_refused(bench: Bench) -> None:
    """An incomplete object is invalid, even with a correct length."""
    body = b'{"items":["2:0:5"],"groups":[{"batch":2,"group":0,"bits":"/w=="}]}'
    for length in range(1, len(body)):
        assert check_body(bench, "ack", WAYS[length % 4], body[:length], b"application/json", [length // 2]) == 422
    assert check_body(bench, "ack", "plain", body, b"application/json", []) == 200
