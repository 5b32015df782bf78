"""The routes of a batch, except acks: open, update, extend, seal, cancel, delete, repair, and all reads. `search` has
those that find batches."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from api import expectations
from api.access.rules import ANY, caller_of, needs, outside
from api.problems import BODY, documented
from api.routes import cursors, fields, models
from api.routes.fields import BatchId
from api.routes.long_polls import Waiting
from api.routes.reply import EMPTY, Reply
from api.routes.route import JsonRoute, PrefixedRouter
from api.routes.writes import Reads, Writes
from core import traces
from core.batches import group_counts, ranges
from core.batches.batch import Batch, Extended, Opened, Sealed
from core.batches.lifecycle import State
from core.explain import Reason
from core.service import Service
from core.service.batches import opening_of, seal_of
from lastbit.ids import INTEGER_LIMIT, item_id
from lastbit.tokens import Role, Token

router = PrefixedRouter(prefix="/v1/batches", route_class=JsonRoute, tags=["batches"])

IdempotencyKey = Annotated[
    str | None,
    Header(
        pattern=expectations.visible_ascii(255),
        description="1 to 255 visible ASCII characters; the same key again has no further effect",
    ),
]
TRACEPARENT = (
    "the W3C Trace Context in which the batch is opened: it is stored, and the batch's events and webhooks belong to "
    "its trace. A malformed one is ignored, and a replay keeps the first"
)
TRACESTATE = "belongs to `traceparent`; ignored if it is malformed or has more than 512 characters"
Limit = Annotated[int, Query(ge=1, le=1000), fields.Decimal]
REPLAYED = {
    "headers": {"Idempotency-Replayed": {"schema": {"const": "true"}, "description": "this key was answered before"}}
}


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _writes(request: Request) -> Writes:
    writes: Writes = request.app.state.writes
    return writes


def _reads(request: Request) -> Reads:
    reads: Reads = request.app.state.reads
    return reads


def _waiting(request: Request) -> Waiting:
    waiting: Waiting = request.app.state.waiting
    return waiting


@router.post(
    "",
    status_code=201,
    response_model=models.OpenedBatch,
    responses={
        201: REPLAYED,
        **documented(
            "idempotency_key_reused",
            "batch_complete",
            "batch_expired",
            "batch_cancelled",
            "upgrade_not_finished",
            *BODY,
        ),
    },
)
@needs(Role.PRODUCE, is_limited=True)
async def open_batch(
    body: models.OpenBody,
    request: Request,
    idempotency_key: IdempotencyKey = None,
    traceparent: Annotated[str | None, Header(description=TRACEPARENT)] = None,
    tracestate: Annotated[str | None, Header(description=TRACESTATE)] = None,
) -> Response:
    """Open a batch; extend it by `items` and seal it in the same transaction."""
    caller = caller_of(request)
    if not caller.covers(body.key):
        raise outside(caller, "body.key", "batches whose key begins")
    opening = body.opening()
    service_of(request).batches.check_callback(opening)
    if caller.prefix is not None and opening.parent is not None:
        await run_in_threadpool(service_of(request).batches.check_parent, opening.parent, caller.prefix)
    operation = opening_of(
        opening, idempotency_key, prefix=caller.prefix, trace=traces.in_headers(request.scope["headers"])
    )
    result: Opened = await _writes(request).run(operation)
    return opened(result).response()


@router.get("/{id:batch}", response_model=models.Batch, responses=documented("batch_not_found", "invalid_request"))
@needs(*ANY, is_limited=True)
async def get_batch(
    batch: BatchId,
    request: Request,
    wait: Annotated[fields.Wait, Query(description="seconds to wait for a terminal state")] = 0,
) -> Any:
    """One batch; with `wait`, once it is in a terminal state or the time is over."""
    if not wait:
        return read(await _reads(request).batches.get(batch)).response()
    return Response(await _waiting(request).end_of(batch, wait), media_type="application/json")


@router.patch(
    "/{id:batch}",
    response_model=models.Batch,
    responses={
        200: REPLAYED,
        **documented(
            "batch_not_found",
            "batch_complete",
            "batch_expired",
            "batch_cancelled",
            "idempotency_key_reused",
            "upgrade_not_finished",
            *BODY,
        ),
    },
)
@needs(Role.PRODUCE, is_limited=True)
def update_batch(
    batch: BatchId, body: models.PatchBody, request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    """Change the tolerance, deadline and labels of a batch that is open or sealed, by a JSON Merge Patch. If its
    failures exceed the new tolerance, `exceeded` becomes true, and `on_exceeded: cancel` cancels it."""
    updated = service_of(request).batches.update(batch, body.patch(), idempotency_key)
    headers = {"Idempotency-Replayed": "true"} if updated.replayed else EMPTY
    return Reply.of(models.shown(updated.batch), headers=headers).response()


@router.post(
    "/{id}/items",
    status_code=201,
    response_model=models.Extension,
    responses={
        201: REPLAYED,
        **documented(
            "batch_not_found",
            "batch_sealed",
            "item_resolved",
            "batch_complete",
            "batch_expired",
            "batch_cancelled",
            "idempotency_key_reused",
            *BODY,
        ),
    },
)
@needs(Role.PRODUCE, is_limited=True)
async def extend_batch(
    batch: BatchId, body: models.ExtendBody, request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    """Issue `count` more items. With `by`, the batch may be sealed, as long as that item is pending."""
    result: Extended = await _writes(request).run(body.operation(batch, idempotency_key))
    return extended(result).response()


@router.post(
    "/{id}/seal",
    response_model=models.SealedBatch,
    responses=documented("batch_not_found", "batch_expired", "batch_cancelled", *BODY),
)
@needs(Role.PRODUCE, is_limited=True)
async def seal_batch(
    batch: BatchId, body: fields.EmptyBody, request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    """Promise that no more items will come. Completes the batch if none is pending."""
    result: Sealed = await _writes(request).run(seal_of(batch, idempotency_key))
    return sealed(result).response()


@router.post(
    "/{id}/cancel",
    response_model=models.Batch,
    responses=documented("batch_not_found", "batch_complete", "batch_expired", *BODY),
)
@needs(Role.PRODUCE, is_limited=True)
def cancel_batch(
    batch: BatchId, body: models.CancelBody, request: Request, idempotency_key: IdempotencyKey = None
) -> dict[str, Any]:
    """End a batch that is open or sealed; it stays as a tombstone. With `children`, its live descendants end too, also
    if it was cancelled before."""
    batches = service_of(request).batches
    return models.shown(batches.cancel(batch, idempotency_key, reason=body.reason, children=body.children))


@router.post(
    "/{id}/reopen",
    response_model=models.Batch,
    responses={
        200: REPLAYED,
        **documented(
            "batch_not_found",
            "batch_complete",
            "batch_live",
            "idempotency_key_reused",
            "upgrade_not_finished",
            *BODY,
        ),
    },
)
@needs(Role.PRODUCE, is_limited=True)
def reopen_batch(
    batch: BatchId, body: models.ReopenBody, request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    """Bring back a batch that was cancelled or has expired: it is open or sealed again, as before, with all that was
    resolved. If its failures exceed its tolerance, `on_exceeded` becomes `continue`."""
    options = {name: getattr(body, name) for name in body.model_fields_set}
    result = service_of(request).batches.reopen(batch, idempotency_key, **options)
    headers = {"Idempotency-Replayed": "true"} if result.replayed else EMPTY
    return Reply.of(models.shown(result.batch), headers=headers).response()


@router.delete(
    "/{id:batch}", status_code=204, responses=documented("batch_not_found", "state_conflict", "invalid_request")
)
@needs(Role.ADMIN, is_limited=True)
def delete_batch(
    batch: BatchId,
    request: Request,
    state: Annotated[models.StateName | None, Query(description="only if the batch is in this state")] = None,
) -> Response:
    """Cancel the batch if it is live, then remove it altogether."""
    service_of(request).batches.delete(batch, None if state is None else State(state))
    return Response(status_code=204)


@router.get(
    "/{id}/pending", response_model=models.PendingPage, responses=documented("batch_not_found", "invalid_request")
)
@needs(Role.READ, is_limited=True)
def list_pending_items(
    batch: BatchId, request: Request, limit: Limit = 100, cursor: cursors.Cursor = None
) -> dict[str, Any]:
    """The pending items, as ranges of numbers."""
    return _ranges(request, batch, "pending", limit, cursor)


@router.get(
    "/{id}/failed", response_model=models.FailedPage, responses=documented("batch_not_found", "invalid_request")
)
@needs(Role.READ, is_limited=True)
def list_failed_items(
    batch: BatchId, request: Request, limit: Limit = 100, cursor: cursors.Cursor = None
) -> dict[str, Any]:
    """The failed items, as ranges of numbers, with the reasons that were given."""
    return _ranges(request, batch, "failed", limit, cursor)


@router.get(
    "/{id}/skipped", response_model=models.SkippedPage, responses=documented("batch_not_found", "invalid_request")
)
@needs(Role.READ, is_limited=True)
def list_skipped_items(
    batch: BatchId, request: Request, limit: Limit = 100, cursor: cursors.Cursor = None
) -> dict[str, Any]:
    """The skipped items, as ranges of numbers, with the reasons that were given."""
    return _ranges(request, batch, "skipped", limit, cursor)


def _ranges(request: Request, batch_id: int, kind: ranges.Kind, limit: int, cursor: str | None) -> dict[str, Any]:
    subject = f"{kind}:{batch_id}"
    batch, page = service_of(request).batches.ranges(batch_id, kind, cursors.decode(subject, cursor) or 0, limit)

    documents = [models.named_range(batch, range.start, range.end) for range in page.ranges]
    if kind != "pending":
        for document, range in zip(documents, page.ranges, strict=True):
            document["reasons"] = {
                item_id(batch.id, number, batch.group_size): reason for number, reason in range.reasons.items()
            }
    return {"ranges": documents, "next": None if page.next is None else cursors.encode(subject, page.next)}


@router.get("/{id}/groups", response_model=models.Picture, responses=documented("batch_not_found", "invalid_request"))
@needs(Role.READ, is_limited=True)
def count_groups(
    batch: BatchId,
    request: Request,
    start: Annotated[int, Query(ge=0, lt=INTEGER_LIMIT, description="the first group"), fields.Decimal] = 0,
    limit: Annotated[int, Query(ge=1, le=4096, description="maximum number of tiles"), fields.Decimal] = 1024,
    per: Annotated[int, Query(ge=1, le=group_counts.GROUPS, description="groups per tile"), fields.Decimal] = 1,
) -> dict[str, Any]:
    """The counts of the groups, combined into tiles of `per` groups. A response covers at most 131,072 groups."""
    batch_state, picture = service_of(request).batches.picture(batch, start, limit, per)
    return {
        "batch": batch_state.id,
        "group_size": batch_state.group_size,
        "items": batch_state.items,
        "groups": picture.groups,
        "tiles": [asdict(tile) for tile in picture.tiles],
        "next": picture.next,
    }


@router.get("/{id}/history", response_model=models.History, responses=documented("batch_not_found", "invalid_request"))
@needs(Role.READ, is_limited=True)
def get_history(batch: BatchId, request: Request) -> dict[str, Any]:
    """How the batch got on: when it was fast, slow or stuck."""
    _, line = service_of(request).batches.history(batch)
    return {"batch": batch, "points": models.points(line)}


@router.get(
    "/{id}/progress", response_model=models.Progress, responses=documented("batch_not_found", "invalid_request")
)
@needs(Role.READ, is_limited=True)
def get_progress(batch: BatchId, request: Request) -> dict[str, Any]:
    """The sums of the batch and all of its descendants."""
    return {"batch": batch, **asdict(service_of(request).batches.progress(batch))}


@router.get(
    "/{id}/groups/{group}",
    response_model=models.GroupBits,
    responses=documented("batch_not_found", "group_not_found", "invalid_request"),
)
@needs(Role.READ, is_limited=True)
def get_group_bits(batch: BatchId, group: fields.GroupNumber, request: Request) -> dict[str, Any]:
    """The bits of one group."""
    result = service_of(request).batches.bits(batch, group)
    bitfields = {"resolved": result.resolved, "failed": result.failed, "skipped": result.skipped}
    bits = {name: base64.b64encode(bitfield).decode() for name, bitfield in bitfields.items()}
    return {"batch": batch, **asdict(result.tile), "bits": bits}


@router.get(
    "/{id}/verify", response_model=models.Verification, responses=documented("batch_not_found", "invalid_request")
)
@needs(Role.READ, is_limited=True)
def verify_batch(batch: BatchId, request: Request) -> dict[str, Any]:
    """Recount the batch's bits and compare them with its counts."""
    verification = service_of(request).batches.verify(batch)
    return {
        "ok": verification.ok,
        "items": verification.items,
        "acked": verification.acked,
        "failed": verification.failed,
        "skipped": verification.skipped,
        "pending": verification.pending,
        "counted": {
            "acked": verification.counted_acked,
            "failed": verification.counted_failed,
            "skipped": verification.counted_skipped,
        },
        "faults": verification.faults,
    }


@router.post(
    "/{id}/repair", response_model=models.Repair, responses=documented("batch_not_found", "upgrade_not_finished", *BODY)
)
@needs(Role.ADMIN, is_limited=True)
def repair_batch(
    batch: BatchId, body: models.RepairBody, request: Request, idempotency_key: IdempotencyKey = None
) -> dict[str, Any]:
    """Restore the counts and the state of a batch from its bits, where verify finds that they disagree."""
    result = service_of(request).batches.repair(batch, idempotency_key, dry_run=body.dry_run)
    return {
        "dry_run": body.dry_run,
        "needed": bool(result.faults),
        "faults": result.faults,
        "groups": result.groups,
        "before": _counts(result.before),
        "after": _counts(result.after),
        "newly": result.newly,
        "newly_succeeded": result.newly_succeeded,
    }


def _counts(batch: Batch) -> dict[str, Any]:
    return {
        "state": batch.state,
        "acked": batch.acked,
        "failed": batch.failed,
        "skipped": batch.skipped,
        "pending": batch.pending,
    }


@router.get(
    "/{id}/watermark", response_model=models.Watermark, responses=documented("batch_not_found", "invalid_request")
)
@needs(Role.READ, is_limited=True)
async def get_watermark(batch: BatchId, request: Request) -> Response:
    """The smallest pending number."""
    return watermark(await _reads(request).watermarks.get(batch)).response()


@router.get(
    "/{id}/explain", response_model=models.Explanation, responses=documented("batch_not_found", "invalid_request")
)
@needs(Role.READ, is_limited=True)
def explain_batch(batch: BatchId, request: Request) -> dict[str, Any]:
    """Why the batch is not done, in words and as facts."""
    explanation = service_of(request).batches.explain(batch)
    reasons = _shown_to(caller_of(request), explanation.reasons)
    return {
        "batch": explanation.batch.id,
        "state": explanation.batch.state,
        "done": explanation.batch.complete,
        "reasons": [{"code": reason.code, "text": reason.text, **reason.facts} for reason in reasons],
    }


def _shown_to(caller: Token, reasons: list[Reason]) -> Iterator[Reason]:
    """The reasons that the caller may see. A limited caller sees neither the addresses and responses of webhooks, nor
    whether processes have workers, nor the keys of batches outside its prefix."""
    for reason in reasons:
        if caller.prefix is not None and reason.code in ("webhook_not_delivered", "ending_without_worker"):
            continue
        for child in reason.facts.get("children", ()):
            if not caller.covers(child["key"]):
                child["key"] = None
        yield reason


def read(batch: Batch) -> Reply:
    """The response to a read of the batch."""
    return Reply.of(models.shown(batch))


def watermark(result: tuple[Batch, int]) -> Reply:
    """The response to a read of the batch's watermark."""
    batch, number = result
    item = item_id(batch.id, number, batch.group_size) if number < batch.items else None
    return Reply.of({"watermark": number, "item": item})


def opened(result: Opened) -> Reply:
    facts = {**models.shown(result.batch), "start": result.start, "count": result.count, "newly": result.newly}
    facts["callback"] = result.callback
    headers = _replay(result.replayed) | {"Location": f"/v1/batches/{result.batch.id}"}
    if result.callback is not None:
        headers["Cache-Control"] = "no-store"
    return Reply.of(facts, 201, headers)


def extended(result: Extended) -> Reply:
    batch = result.batch
    facts = {
        "batch": batch.id,
        "group_size": batch.group_size,
        "start": result.start,
        "count": result.count,
        "items": batch.items,
    }
    return Reply.of(facts, 201, _replay(result.replayed))


def sealed(result: Sealed) -> Reply:
    facts = {**models.shown(result.batch), "newly": result.newly, "newly_succeeded": result.newly_succeeded}
    return Reply.of(facts)


def _replay(is_replay: bool) -> dict[str, str]:
    """The header that marks a replay, if it is one."""
    return {"Idempotency-Replayed": "true"} if is_replay else {}
