"""Bodies of the ack routes: requests decoded into calls, and responses."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec

from api import patterns, problems
from api.problems import Place, Problem
from api.server import bodies
from core.acks.call import MAX_REASON, AckResult, Call, Rejected
from core.batches.lifecycle import Verb
from core.service import Service
from core.service.acks import MaskPlaces
from lastbit.ids import INTEGER_LIMIT, MAX_GROUP_SIZE, InvalidItemId, ItemId
from lastbit.tokens import Token

MAX_IDS: Final = 10_000
MAX_GROUPS: Final = 4_096

Integer = Annotated[int, msgspec.Meta(ge=0, lt=INTEGER_LIMIT)]
ItemIdText = Annotated[
    str,
    msgspec.Meta(
        description="an item id, batch:group:index, of integers below 2^53",
        examples=["7:0:42"],
        extra_json_schema={"pattern": patterns.ITEM_ID},
    ),
]
# `parse` checks the maximum itself, as more is a 413 and not a 422.
Ids = Annotated[list[ItemIdText], msgspec.Meta(extra_json_schema={"maxItems": MAX_IDS})]


class GroupMask(msgspec.Struct, forbid_unknown_fields=True):
    batch: Integer
    group: Integer
    bits: Annotated[
        bytes,
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


class Skips(msgspec.Struct, forbid_unknown_fields=True):
    """Items that are not needed: by id, by mask, or both."""

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
        str, msgspec.Meta(extra_json_schema={"enum": ["unknown_batch", "unknown_item", "expired", "cancelled", "held"]})
    ]
    item: str | msgspec.UnsetType = msgspec.UNSET
    group: str | msgspec.UnsetType = msgspec.UNSET
    count: int | msgspec.UnsetType = msgspec.UNSET


class AckAnswer(msgspec.Struct):
    applied: Annotated[int, msgspec.Meta(description="items whose state changed")]
    repeated: int
    completed: Annotated[
        list[CompletedBatch],
        msgspec.Meta(description="every complete batch for which the call contained an issued item"),
    ]
    rejected: list[RejectedItem]


_DECODERS: Final[dict[Verb, msgspec.json.Decoder[Any]]] = {
    Verb.ACK: msgspec.json.Decoder(Acks),
    Verb.FAIL: msgspec.json.Decoder(Failures),
    Verb.SKIP: msgspec.json.Decoder(Skips),
}
_encoder = msgspec.json.Encoder()
_PLAIN: Final = b'{"applied":%d,"repeated":%d,"completed":[],"rejected":[]}'
"""The format of nearly every response body."""
_KEY = re.compile(rb"[\x21-\x7e]{1,255}")


Check = Callable[[], None]
"""A check of a call that queries the database. Raises `errors.InvalidRequest`, `errors.Unavailable`."""


def parse(
    verb: Verb, idempotency_key: bytes | None, content: bytes, caller: Token, service: Service
) -> tuple[Call, Check | None]:
    """The call in a body, and the check, if any, that must run before the call is submitted. The check queries the
    database, so it must run in a thread. Raises `Problem`, `errors.InvalidRequest`."""
    if idempotency_key is not None and not _KEY.fullmatch(idempotency_key):
        raise problems.invalid(
            [Place("header Idempotency-Key", "expected 1 to 255 visible ASCII characters without blanks")]
        )
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
    masks = [(mask.batch, mask.group, mask.bits) for mask in groups]
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
        for position, text in enumerate(texts):  # noqa: B007  # the error names it
            numbers.append(ItemId.parse(text))
    except InvalidItemId as error:
        raise problems.invalid([Place(f"body.items[{position}]", str(error))]) from None
    return numbers


def encode(answer: AckResult) -> bytes:
    """The response's body."""
    if not answer.completed and not answer.rejected:
        return _PLAIN % (answer.applied, answer.repeated)
    return _encoder.encode(_response(answer))


def _response(answer: AckResult) -> AckAnswer:
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
