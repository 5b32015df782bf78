"""The two ack routes, as a small ASGI callable in front of FastAPI's stack: they are called once an item, all others
once a batch. Bodies are decoded by msgspec; problems look the same, and the OpenAPI document has their models.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
import structlog
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send

from api import patterns, problems
from api.access.rules import Access, first_headers
from api.acks import refusals
from api.acks.parse_budget import Turns
from api.acks.refusals import Pause
from api.metrics import ACK_REQUESTS, ACKS, REFUSED, RESULTS
from api.problems import Place, Problem
from api.server import bodies
from api.server.middleware import HEADER, USUAL, Requests, given_id, request_id
from core import errors
from core.acks.call import AckResult, Call, Rejected
from core.acks.combiner import TOO_MANY
from core.acks.lanes import Pending
from core.batches.lifecycle import Verb
from core.service import Service
from core.service.acks import MaskPlaces
from lastbit.ids import INTEGER_LIMIT, MAX_GROUP_SIZE, InvalidItemId, ItemId
from lastbit.tokens import Token

MAX_IDS: Final = 10_000
MAX_GROUPS: Final = 4_096
MAX_REASON: Final = 4_000
PATHS: Final = {"/v1/acks": Verb.ACK, "/v1/failures": Verb.FAIL}

log = structlog.get_logger(__name__)

Integer = Annotated[int, msgspec.Meta(ge=0, lt=INTEGER_LIMIT)]
ItemIdText = Annotated[
    str,
    msgspec.Meta(
        description="an item id, batch:group:index, of integers below 2^53",
        examples=["7:0:42"],
        extra_json_schema={"pattern": patterns.ITEM_ID},
    ),
]
# More is a 413, which the decoder doesn't know.
Ids = Annotated[list[ItemIdText], msgspec.Meta(extra_json_schema={"maxItems": MAX_IDS})]


class GroupMask(msgspec.Struct, forbid_unknown_fields=True):
    batch: Integer
    group: Integer
    bits: Annotated[
        str,
        msgspec.Meta(
            description="base64, little-endian bit order: bit i of the group is bytes[i//8] >> (i%8) & 1; "
            "at most group_size/8 bytes",
            extra_json_schema={
                "contentEncoding": "base64",
                "pattern": patterns.BASE64,
                "maxLength": (MAX_GROUP_SIZE // 8 + 2) // 3 * 4,
            },
        ),
    ]


Masks = Annotated[list[GroupMask], msgspec.Meta(extra_json_schema={"maxItems": MAX_GROUPS})]


class Acks(msgspec.Struct, forbid_unknown_fields=True):
    """Items to ack: by id, by mask, or both."""

    items: Ids | msgspec.UnsetType = msgspec.UNSET
    groups: Masks | msgspec.UnsetType = msgspec.UNSET


class Failures(msgspec.Struct, forbid_unknown_fields=True):
    """Items to give up: by id, by mask, or both."""

    items: Ids | msgspec.UnsetType = msgspec.UNSET
    groups: Masks | msgspec.UnsetType = msgspec.UNSET
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] | None = None


class CompletedBatch(msgspec.Struct):
    batch: int
    key: str | None
    newly: Annotated[bool, msgspec.Meta(description="this call completed the batch")]
    succeeded: bool
    newly_succeeded: Annotated[bool, msgspec.Meta(description="this call made succeeded true")]


class RejectedItem(msgspec.Struct, omit_defaults=True):
    """An item by its id, or bits of a mask by their group, with their count."""

    reason: Annotated[
        str, msgspec.Meta(extra_json_schema={"enum": ["unknown_batch", "unknown_item", "expired", "cancelled"]})
    ]
    item: str | msgspec.UnsetType = msgspec.UNSET
    group: str | msgspec.UnsetType = msgspec.UNSET
    count: int | msgspec.UnsetType = msgspec.UNSET


class AckAnswer(msgspec.Struct):
    applied: Annotated[int, msgspec.Meta(description="items whose state changed")]
    repeated: int
    completed: Annotated[
        list[CompletedBatch],
        msgspec.Meta(description="every complete batch of which the call brought an issued item"),
    ]
    rejected: list[RejectedItem]


_DECODERS: Final[dict[Verb, msgspec.json.Decoder[Any]]] = {
    Verb.ACK: msgspec.json.Decoder(Acks),
    Verb.FAIL: msgspec.json.Decoder(Failures),
}
_encoder = msgspec.json.Encoder()
_PLAIN: Final = b'{"applied":%d,"repeated":%d,"completed":[],"rejected":[]}'
"""The encoded form of nearly every answer."""
_KEY = re.compile(rb"[\x21-\x7e]{1,255}")


class AckRoutes:
    """Takes the ack routes and passes everything else on."""

    def __init__(self, app: FastAPI, *, most_waiting: int) -> None:
        self.app: ASGIApp = Requests(app, most_waiting=most_waiting)
        self.fastapi = app
        self.state = app.state
        self.access: Access = app.state.access
        self._receive = self._deliver  # one object, by which the combiner knows us
        self.over: deque[Sequence[Pending]] = deque()
        """Calls that are over, and whose callers are to be told."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        verb = PATHS.get(scope["path"]) if scope["type"] == "http" else None
        if verb is None:
            await self.app(scope, receive, send)
            return
        try:
            status, content, headers = 200, await self._answer(verb, scope, receive), {}
        except Exception as error:  # noqa: BLE001  # the outermost place there is: all becomes a problem
            problem = refusal(verb, error, given_id(scope["headers"]))
            status, content, headers = problem.status, problem.body(), problem.headers
        media_type = b"application/json" if status == 200 else problems.MEDIA_TYPE.encode()
        start = {
            "type": "http.response.start",
            "status": status,
            "headers": [
                *USUAL.items(),
                (b"content-type", media_type),
                (b"content-length", str(len(content)).encode()),
                *((name.lower().encode(), value.encode()) for name, value in headers.items()),
            ],
        }
        await send(start)
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, verb: Verb, scope: Scope, receive: Receive) -> bytes:
        if scope["method"] != "POST":
            raise Problem("method_not_allowed", "this path takes POST", headers={"Allow": "POST"})
        headers = first_headers(scope)
        key = headers.get(b"idempotency-key")
        caller = self.access.enter_consumer(headers)
        if self.is_full():
            await asyncio.sleep(refusals.SECONDS)
            raise errors.Overloaded(TOO_MANY)
        async with bodies.reading(scope, receive, self.state.room) as content:
            call, check = self.parse(verb, key, content, caller)
            if check is not None:
                await run_in_threadpool(check)
        loop: asyncio.AbstractEventLoop = self.state.loop
        future: asyncio.Future[Pending] = loop.create_future()

        def tell(result: Pending) -> None:
            if not future.done():  # it is, when the client has left
                future.set_result(result)

        self.submit(call, tell)
        result = await future
        if result.error is not None:
            raise result.error
        return self.encoded(result.answer)

    def parse(
        self, verb: Verb, idempotency_key: bytes | None, content: bytes, caller: Token
    ) -> tuple[Call, Check | None]:
        """The call that a body is, and what has to be asked of the database, in a thread, before it is submitted.
        Raises `Problem` and `errors.InvalidRequest`."""
        turns: Turns = self.state.turns
        if self.over and turns.is_of_large_calls():
            self.tell()
        start = turns.begin()
        try:
            call, check = parse(verb, idempotency_key, content, caller, self.state.service)
        finally:
            turns.end(start)
        if caller.items is not None:
            self.access.rates.bring(caller, call.items)
        return call, check

    def is_full(self) -> bool:
        """Whether the next call is to be refused, as more acks come than can be committed, or than can be parsed."""
        service: Service = self.state.service
        turns: Turns = self.state.turns
        return service.acks.is_full() or turns.is_full()

    def submit(self, call: Call, recipient: Callable[[Pending], object]) -> None:
        """Queue the call; `recipient` is told in the event loop when it is over. Raises `errors.Overloaded`."""
        self.state.service.acks.submit(call, self._receive, recipient)

    def send_away(self, tell: Callable[[], object]) -> None:
        """`tell` somebody to come back, after a pause. Answers that are there don't wait until all who have sent
        something were heard."""
        waiting: Pause = self.state.pause
        waiting.before(tell)
        if self.over:
            self.tell()

    def encoded(self, answer: AckResult) -> bytes:
        """The answer as it travels."""
        if not answer.completed and not answer.rejected:
            return _PLAIN % (answer.applied, answer.repeated)
        return _encoder.encode(_shown(answer))

    def _deliver(self, results: Sequence[Pending]) -> None:
        """From the combiner's thread: one call into the loop for all that a commit ended, as each of them wakes it."""
        self.over.append(results)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who could be answered
            self.state.loop.call_soon_threadsafe(self.tell)

    def tell(self) -> None:
        """Answer the calls that are over. In the event loop."""
        while self.over:
            _tell(self.over.popleft())


Check = Callable[[], None]
"""Raises `errors.InvalidRequest`, `errors.Unavailable`."""


def parse(
    verb: Verb, idempotency_key: bytes | None, content: bytes, caller: Token, service: Service
) -> tuple[Call, Check | None]:
    """See `AckRoutes.parse`."""
    if idempotency_key is not None and not _KEY.fullmatch(idempotency_key):
        raise problems.invalid([Place("header Idempotency-Key", "expected 1 to 255 visible ASCII characters")])
    key = None if idempotency_key is None else str(idempotency_key, "ascii")
    body = bodies.decoded(_DECODERS[verb], content)
    if body.items is msgspec.UNSET and body.groups is msgspec.UNSET:
        raise problems.invalid([Place("body", "expected items or groups, or both")])
    texts = body.items or ()
    groups = body.groups or ()
    if len(texts) > MAX_IDS:
        raise Problem("too_large", f"body.items: expected at most {MAX_IDS:,} ids, got {len(texts):,}")
    if len(groups) > MAX_GROUPS:
        raise Problem("too_large", f"body.groups: expected at most {MAX_GROUPS:,} groups, got {len(groups):,}")
    ids = _ids(texts)
    masks = [
        (mask.batch, mask.group, bodies.from_base64(f"body.groups[{position}].bits", mask.bits))
        for position, mask in enumerate(groups)
    ]
    places: MaskPlaces = [(f"body.groups[{i}].bits", batch, bits) for i, (batch, _, bits) in enumerate(masks)]
    call = Call.of(verb, ids, masks, reason=getattr(body, "reason", None), idempotency_key=key)
    if not places and caller.prefix is None:
        return call, None
    check = functools.partial(service.acks.check, call, places, caller.prefix)
    if service.acks.checks_without_database(
        call.units if caller.prefix is not None else [batch for _, batch, _ in places]
    ):
        check()
        return call, None
    return call, check


def _ids(texts: Sequence[str]) -> list[tuple[int, int, int]]:
    if len(texts) > 1:
        ids = ItemId.parse_all(texts)
        if ids is not None:
            return ids
    try:
        position = 0
        numbers: list[tuple[int, int, int]] = []
        for position, text in enumerate(texts):  # noqa: B007  # it is named below
            numbers.append(ItemId.parse(text))
    except InvalidItemId as error:
        raise problems.invalid([Place(f"body.items[{position}]", str(error))]) from None
    return numbers


def refusal(verb: Verb, error: Exception, own_id: bytes | None) -> Problem:
    """The answer to a failed call, under its request id: the caller's `own_id` if there is one. It is counted, and
    logged if the caller did not cause it; the ack routes log nothing else. Refusals under overload aren't logged: there
    are thousands a second, and the combiner logs once when they begin."""
    name = request_id(own_id)
    if isinstance(error, Problem):
        problem = error
    elif isinstance(error, errors.CoreError):
        problem = problems.from_core(error)
    else:
        problem = problems.internal()
    if problem.status == 500:
        trace = None if isinstance(error, errors.CoreError) else error
        log.error("ack_failed", request_id=name, verb=verb.value, error=str(error), exc_info=trace)
    elif isinstance(error, errors.Overloaded):
        REFUSED.labels("acks").inc()
    elif problem.status > 500:
        log.warning("ack_unavailable", request_id=name, verb=verb.value, error=problem.detail)
    ACK_REQUESTS.labels(verb.value, str(problem.status)).inc()
    problem.headers[HEADER] = name
    return problem


def _shown(answer: AckResult) -> AckAnswer:
    completed = [
        CompletedBatch(
            completion.batch, completion.key, completion.newly, completion.succeeded, completion.newly_succeeded
        )
        for completion in answer.completed.values()
    ]
    return AckAnswer(
        answer.applied, answer.repeated, completed, [_rejected(rejection) for rejection in answer.rejected]
    )


def _rejected(rejection: Rejected) -> RejectedItem:
    if rejection.item is not None:
        return RejectedItem(rejection.reason, item=str(rejection.item))
    assert rejection.group is not None
    return RejectedItem(rejection.reason, group=f"{rejection.group[0]}:{rejection.group[1]}", count=rejection.count)


def _tell(results: Sequence[Pending]) -> None:
    counts: dict[tuple[Verb, str], int] = {}
    acks = failures = 0
    for pending in results:
        if pending.error is None:
            answer, verb = pending.answer, pending.verb
            if verb is Verb.ACK:
                acks += 1
            else:
                failures += 1
            rejected = sum(rejection.count for rejection in answer.rejected) if answer.rejected else 0
            for result, count in zip(RESULTS, (answer.applied, answer.repeated, rejected), strict=True):
                if count:
                    counts[verb, result] = counts.get((verb, result), 0) + count
        pending.to(pending)
    for verb, count in ((Verb.ACK, acks), (Verb.FAIL, failures)):
        ACK_REQUESTS.labels(verb.value, "200").inc(count)
    for (verb, result), count in counts.items():
        ACKS.labels(verb.value, result).inc(count)


def document(openapi: dict[str, Any]) -> None:
    """Add the two routes to an OpenAPI document."""
    answers = {Verb.ACK: (Acks, "Ack items"), Verb.FAIL: (Failures, "Give items up")}
    _, components = msgspec.json.schema_components(
        [Acks, Failures, AckAnswer], ref_template="#/components/schemas/{name}"
    )
    for body_of in ("Acks", "Failures"):
        components[body_of]["anyOf"] = [{"required": ["items"]}, {"required": ["groups"]}]
    openapi["components"]["schemas"].update(components)
    for path, verb in PATHS.items():
        model, summary = answers[verb]
        openapi["paths"][path] = {
            "post": {
                "tags": ["acks"],
                "summary": summary,
                "description": "Idempotent, in any order, of any batches. Answered after the commit.",
                "operationId": "ack_items" if verb is Verb.ACK else "fail_items",
                "parameters": [
                    {
                        "name": "Idempotency-Key",
                        "in": "header",
                        "required": False,
                        "schema": {"type": "string", "pattern": r"^[\x21-\x7e]{1,255}$"},
                        "description": "kept with what the call completes, so that its retry sees `newly` again",
                    }
                ],
                "requestBody": {
                    "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}},
                    "required": True,
                },
                "responses": {
                    "200": {
                        "description": "applied + repeated + rejected = the distinct items sent",
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/AckAnswer"}}},
                    },
                    **{str(status): response for status, response in problems.documented(413, 415, 422).items()},
                },
            }
        }
