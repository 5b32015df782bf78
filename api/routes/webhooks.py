"""The routes of webhooks: subscriptions, their deliveries, redelivery, and test events."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self

from fastapi import Path, Query, Request, Response
from pydantic import AfterValidator, BaseModel, Field, model_validator

from api import patterns
from api.access.rules import needs
from api.problems import BODY, documented
from api.routes import cursors, fields
from api.routes.batches import REPLAYED, IdempotencyKey
from api.routes.events import Name
from api.routes.fields import BatchId, Body, Key
from api.routes.route import JsonRoute, PrefixedRouter
from core.service import Service
from core.webhooks import addresses, delivery_log, rotation, subscriptions
from core.webhooks.delivery_log import Progress
from lastbit.ids import INTEGER_LIMIT
from lastbit.tokens import Role

router = PrefixedRouter(prefix="/v1/webhooks", route_class=JsonRoute, tags=["webhooks"])
of_batches = PrefixedRouter(prefix="/v1/batches", route_class=JsonRoute, tags=["batches"])

WebhookId = Annotated[int, Path(alias="id", ge=0, lt=INTEGER_LIMIT), fields.Decimal]
Limit = Annotated[int, Query(ge=1, le=1000), fields.Decimal]
ProgressName = Literal["pending", "delivered", "dead"]


class NewWebhook(Body):
    url: str = Field(
        max_length=addresses.LONGEST_URL,
        description="http or https, without a user name; every address of its host must be public",
        json_schema_extra={"pattern": patterns.URL},
    )
    types: Annotated[list[Name], AfterValidator(fields.of_events)] | None = Field(
        None, min_length=1, max_length=100, description="event types; null means all"
    )
    label: Key | None = Field(None, description="your name for the webhook")


class Redelivery(Body):
    """One event, by its position or by its id; or, with neither, all dead deliveries."""

    position: int | None = Field(None, ge=1, lt=INTEGER_LIMIT, description="the event's position in the feed")
    event: Name | None = Field(None, description="the event's id")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.position is not None and self.event is not None:
            raise ValueError("expected a position, an event, or neither (all dead deliveries)")
        return self


class Rotation(Body):
    overlap_seconds: int = Field(
        int(rotation.OVERLAP.total_seconds()),
        ge=0,
        le=int(rotation.LONGEST_OVERLAP.total_seconds()),
        description="how long the earlier secrets sign too; 0 ends them at once",
    )


class Webhook(BaseModel):
    id: int
    url: str
    types: list[str] | None
    label: str | None
    state: Literal["active", "disabled"] = Field(description="disabled: its receiver responded with 410 Gone")
    position: int = Field(description="the position in the feed up to which its deliveries were planned")
    batch: int | None = Field(description="the batch whose callback it is; null for other webhooks")
    overlap_until: datetime | None = Field(
        description="until then, earlier secrets sign too; null: only the newest one signs"
    )
    created_at: datetime


class CreatedWebhook(Webhook):
    secret: str = Field(description="receivers verify signatures with it; it is never shown again")


class RotatedWebhook(Webhook):
    secret: str = Field(description="the new secret; only this response and its replays contain it")


class WebhookPage(BaseModel):
    webhooks: list[Webhook]
    next: str | None


class Attempt(BaseModel):
    at: datetime
    status: int | None = Field(
        json_schema_extra={"format": "int32"}, description="the response's status; null if there was no response"
    )
    error: str | None = Field(description="the reason, in words, if there was no complete response")
    milliseconds: int


class Delivery(BaseModel):
    webhook: int
    position: int = Field(description="the event's position in the feed")
    event: str = Field(description="the event's id, which is the `webhook-id` of every attempt")
    type: str
    batch: int | None
    state: ProgressName = Field(description="dead: all attempts failed, and no other will follow")
    attempts: int = Field(description="the number of attempts since it was planned or redelivered")
    next_attempt_at: datetime | None
    log: list[Attempt] = Field(description="all attempts, oldest first")


class DeliveryPage(BaseModel):
    deliveries: list[Delivery]
    next: str | None


class BatchCallback(BaseModel):
    callback: Webhook | None = Field(description="null if the batch has none")


class BatchDeliveries(BaseModel):
    deliveries: list[Delivery] = Field(description="the newest 100 deliveries of the batch's events, in any state")


class Redelivered(BaseModel):
    redelivered: int = Field(description="the number of deliveries that are due again")


class Tested(BaseModel):
    event: str = Field(description="the `webhook-id` that was sent")
    delivered: bool
    status: int | None = Field(json_schema_extra={"format": "int32"})
    error: str | None
    milliseconds: int


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _delivery(delivery: delivery_log.Delivery) -> dict[str, Any]:
    document = {name: getattr(delivery, name) for name in Delivery.model_fields}
    return {
        **document,
        "log": [{name: getattr(attempt, name) for name in Attempt.model_fields} for attempt in delivery.log],
    }


def _webhook(webhook: subscriptions.Webhook) -> dict[str, Any]:
    return {name: getattr(webhook, name) for name in Webhook.model_fields}


@router.post("", status_code=201, response_model=CreatedWebhook, responses=documented(*BODY))
@needs(Role.ADMIN)
def create_webhook(body: NewWebhook, request: Request, response: Response) -> dict[str, Any]:
    """Subscribe a URL to later events, of all types or of some. Only this response contains the secret."""
    result = _service(request).webhooks.create(body.url, body.types, body.label)
    response.headers["Location"] = f"/v1/webhooks/{result.webhook.id}"
    response.headers["Cache-Control"] = "no-store"
    return {**_webhook(result.webhook), "secret": result.secret}


@router.get("", response_model=WebhookPage, responses=documented("invalid_request"))
@needs(Role.ADMIN)
def list_webhooks(request: Request, limit: Limit = 100, cursor: cursors.Cursor = None) -> dict[str, Any]:
    """The webhooks, newest first, without the callbacks of batches."""
    page, before = _service(request).webhooks.page(cursors.decode("webhooks", cursor), limit)
    following = None if before is None else cursors.encode("webhooks", before)
    return {"webhooks": [_webhook(webhook) for webhook in page], "next": following}


@router.get("/{id}", response_model=Webhook, responses=documented("webhook_not_found", "invalid_request"))
@needs(Role.ADMIN)
def get_webhook(webhook: WebhookId, request: Request) -> dict[str, Any]:
    """One webhook."""
    return _webhook(_service(request).webhooks.get(webhook))


@router.delete("/{id}", status_code=204, responses=documented("webhook_not_found", "invalid_request"))
@needs(Role.ADMIN)
def delete_webhook(webhook: WebhookId, request: Request) -> Response:
    """Delete a webhook with its deliveries. Nothing more is sent to it, except what a dispatcher has claimed."""
    _service(request).webhooks.delete(webhook)
    return Response(status_code=204)


@router.get(
    "/{id}/deliveries", response_model=DeliveryPage, responses=documented("webhook_not_found", "invalid_request")
)
@needs(Role.ADMIN)
def list_deliveries(
    webhook: WebhookId,
    request: Request,
    state: ProgressName | None = None,
    limit: Limit = 100,
    cursor: cursors.Cursor = None,
) -> dict[str, Any]:
    """The webhook's deliveries, newest event first, with all attempts."""
    subject = f"deliveries:{webhook}"
    progress = None if state is None else Progress(state)
    page, before = _service(request).webhooks.deliveries(webhook, progress, cursors.decode(subject, cursor), limit)
    following = None if before is None else cursors.encode(subject, before)
    return {"deliveries": [_delivery(delivery) for delivery in page], "next": following}


@router.post(
    "/{id}/rotate-secret",
    response_model=RotatedWebhook,
    responses={
        200: REPLAYED,
        **documented("webhook_not_found", "upgrade_not_finished", "idempotency_key_reused", *BODY),
    },
)
@needs(Role.ADMIN)
def rotate_webhook_secret(
    webhook: WebhookId,
    body: Rotation,
    request: Request,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> dict[str, Any]:
    """Give a webhook a new secret. Until the overlap ends, each message has a signature by each valid secret. A repeat
    of the last rotation, under its Idempotency-Key, returns the same secret."""
    overlap = timedelta(seconds=body.overlap_seconds)
    result = _service(request).webhooks.rotate_secret(webhook, overlap, idempotency_key)
    response.headers["Cache-Control"] = "no-store"
    if result.replayed:
        response.headers["Idempotency-Replayed"] = "true"
    return {**_webhook(result.webhook), "secret": result.secret}


@router.post(
    "/{id}/redeliver",
    response_model=Redelivered,
    responses=documented("webhook_not_found", "webhook_disabled", "position_trimmed", *BODY),
)
@needs(Role.ADMIN)
def redeliver_webhook(webhook: WebhookId, body: Redelivery, request: Request) -> dict[str, Any]:
    """Send one event again, in any state, or all dead deliveries. Attempts are counted from zero."""
    count = _service(request).webhooks.redeliver(webhook, position=body.position, event=body.event)
    return {"redelivered": count}


@router.post("/{id}/test", response_model=Tested, responses=documented("webhook_not_found", *BODY))
@needs(Role.ADMIN)
def send_test_event(webhook: WebhookId, body: fields.EmptyBody, request: Request) -> dict[str, Any]:
    """Send one `webhook.test` event at once, and return the receiver's response. The event is not in the feed."""
    event, answer = _service(request).webhooks.test(webhook)
    return {
        "event": event,
        "delivered": answer.delivered,
        "status": answer.status,
        "error": answer.error,
        "milliseconds": answer.milliseconds,
    }


@of_batches.get(
    "/{id}/callback", response_model=BatchCallback, responses=documented("batch_not_found", "invalid_request")
)
@needs(Role.READ, Role.PRODUCE, is_limited=True)
def get_batch_callback(batch: BatchId, request: Request) -> dict[str, Any]:
    """The batch's callback, without its secret."""
    callback = _service(request).webhooks.of_batch(batch)
    return {"callback": None if callback is None else _webhook(callback)}


@of_batches.get(
    "/{id}/deliveries", response_model=BatchDeliveries, responses=documented("batch_not_found", "invalid_request")
)
@needs(Role.READ)
def list_batch_deliveries(batch: BatchId, request: Request) -> dict[str, Any]:
    """The deliveries of the batch's events to all webhooks, with their results."""
    return {"deliveries": [_delivery(delivery) for delivery in _service(request).webhooks.deliveries_of_batch(batch)]}
