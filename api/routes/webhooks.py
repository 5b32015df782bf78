"""The routes of webhooks: subscriptions, what became of their deliveries, redelivery, a test."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from api import patterns
from api.access.rules import needs
from api.problems import BODY, documented
from api.routes import cursors, models
from api.routes.events import Name
from api.routes.models import BatchId, Body, Key
from api.routes.route import JsonRoute
from core.service import Service
from core.webhooks import addresses, subscriptions
from core.webhooks.subscriptions import Progress
from lastbit.ids import INTEGER_LIMIT
from lastbit.tokens import Role

router = APIRouter(prefix="/v1/webhooks", route_class=JsonRoute, tags=["webhooks"])
of_batches = APIRouter(prefix="/v1/batches", route_class=JsonRoute, tags=["batches"])

WebhookId = Annotated[int, Path(alias="id", ge=0, lt=INTEGER_LIMIT), models.Decimal]
Limit = Annotated[int, Query(ge=1, le=1000), models.Decimal]
ProgressName = Literal["pending", "delivered", "dead"]


class NewWebhook(Body):
    url: str = Field(
        max_length=addresses.LONGEST_URL,
        description="http or https, without a user name; its host must resolve to public addresses only",
        json_schema_extra={"pattern": patterns.URL},
    )
    types: list[Name] | None = Field(None, min_length=1, max_length=100, description="of events; null means all")
    label: Key | None = Field(None, description="a name of yours")


def _by_position_or_event(schema: dict[str, Any]) -> None:
    """Two closed schemas: an event by its id; or one by its position, or else all that are dead."""
    properties = schema.pop("properties")
    closed = {"type": schema.pop("type"), "additionalProperties": schema.pop("additionalProperties")}
    event = {**properties["event"]["anyOf"][0], "description": properties["event"]["description"]}
    schema["oneOf"] = [
        {**closed, "properties": {"position": properties["position"], "event": {"type": "null"}}},
        {**closed, "properties": {"position": {"type": "null"}, "event": event}, "required": ["event"]},
    ]


class Redelivery(Body):
    model_config = ConfigDict(json_schema_extra=_by_position_or_event)

    position: int | None = Field(None, ge=1, lt=INTEGER_LIMIT, description="of the event in the feed")
    event: Name | None = Field(None, description="its id")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.position is not None and self.event is not None:
            raise ValueError("expected a position, an event, or neither (all that are dead)")
        return self


class Webhook(BaseModel):
    id: int
    url: str
    types: list[str] | None
    label: str | None
    state: Literal["active", "disabled"] = Field(description="disabled: its receiver answered 410 Gone")
    position: int = Field(description="up to which event of the feed its deliveries were planned")
    created_at: datetime


class CreatedWebhook(Webhook):
    secret: str = Field(description="what receivers verify signatures with; shown this once")


class WebhookPage(BaseModel):
    webhooks: list[Webhook]
    next: str | None


class Attempt(BaseModel):
    at: datetime
    status: int | None = Field(
        json_schema_extra={"format": "int32"}, description="of the receiver's answer, null where there was none"
    )
    error: str | None = Field(description="why there was no whole answer, in words")
    milliseconds: int


class Delivery(BaseModel):
    webhook: int
    position: int = Field(description="of the event in the feed")
    event: str = Field(description="its id, which is the webhook-id of every try")
    type: str
    batch: int | None
    state: ProgressName = Field(description="dead: the last try has failed")
    attempts: int = Field(description="since it was planned or redelivered")
    next_attempt_at: datetime | None
    log: list[Attempt] = Field(description="every attempt, the oldest first")


class DeliveryPage(BaseModel):
    deliveries: list[Delivery]
    next: str | None


class BatchDeliveries(BaseModel):
    deliveries: list[Delivery] = Field(description="the newest 100 of the batch's events, in any state")


class Redelivered(BaseModel):
    redelivered: int = Field(description="deliveries that are due again")


class Tested(BaseModel):
    event: str = Field(description="the webhook-id that was sent")
    delivered: bool
    status: int | None = Field(json_schema_extra={"format": "int32"})
    error: str | None
    milliseconds: int


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _delivery(delivery: subscriptions.Delivery) -> dict[str, Any]:
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
    """Subscribe a URL to the events from now on. The answer has the secret, and no later one has it again."""
    result = _service(request).webhooks.create(body.url, body.types, body.label)
    response.headers["Location"] = f"/v1/webhooks/{result.webhook.id}"
    response.headers["Cache-Control"] = "no-store"
    return {**_webhook(result.webhook), "secret": result.secret}


@router.get("", response_model=WebhookPage, responses=documented("invalid_request"))
@needs(Role.ADMIN)
def list_webhooks(request: Request, limit: Limit = 100, cursor: cursors.Cursor = None) -> dict[str, Any]:
    """The webhooks, newest first."""
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
    """Send it nothing more, and remove it with its deliveries."""
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
    """Deliveries sent and due, newest event first, with every attempt."""
    subject = f"deliveries:{webhook}"
    progress = None if state is None else Progress(state)
    page, before = _service(request).webhooks.deliveries(webhook, progress, cursors.decode(subject, cursor), limit)
    following = None if before is None else cursors.encode(subject, before)
    return {"deliveries": [_delivery(delivery) for delivery in page], "next": following}


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
def send_test_event(webhook: WebhookId, body: models.EmptyBody, request: Request) -> dict[str, Any]:
    """Send one `webhook.test` event right away, and answer what came back. It is not in the feed."""
    event, answer = _service(request).webhooks.test(webhook)
    return {
        "event": event,
        "delivered": answer.delivered,
        "status": answer.status,
        "error": answer.error,
        "milliseconds": answer.milliseconds,
    }


@of_batches.get(
    "/{id}/deliveries", response_model=BatchDeliveries, responses=documented("batch_not_found", "invalid_request")
)
@needs(Role.READ)
def list_batch_deliveries(batch: BatchId, request: Request) -> dict[str, Any]:
    """The deliveries of the batch's events to all webhooks, with their results."""
    return {"deliveries": [_delivery(delivery) for delivery in _service(request).webhooks.deliveries_of_batch(batch)]}
