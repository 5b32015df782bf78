"""The OpenAPI document: FastAPI's own, with the ack routes, the bodies of tallies, roles and problems added."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import iter_route_contexts

from api.access.rules import CONSUMES, Rule, rule_of
from api.acks import document as ack_document
from api.acks.routes import PATHS
from api.openapi import examples, schemas
from api.patterns import name_of
from api.problems import SCHEMAS, documented
from api.routes import tallies

VERSION = "1.0.0"
"""The version of the contract, not of the release."""

DESCRIPTION = """\
Lastbit records which items of a batch are done, one bit per item, and identifies the one call that completes the batch.

- Requests and responses are JSON. Integers stay below 2^53. An unknown field of a request is refused; clients must
  ignore unknown fields of a response.
- An error is `application/problem+json` (RFC 9457) with a stable `code`.
- With an `Idempotency-Key`, a retry of a POST has no further effect.
- Version 1 only grows. Operation ids are part of it.
"""
TAGS = {
    "batches": "Open a batch, extend it with items, seal it, and look at its progress.",
    "acks": "Resolve items: as done, as failed, or as not needed.",
    "events": "The feed: each transition of a batch once, in commit order, and events of your own.",
    "webhooks": "Send events of the feed to URLs.",
    "consumer groups": "Assign partitions to workers, and store each partition's position.",
    "tallies": "Sums that count each message once, however often it is replayed.",
    "processes": "Process managers: store each event's effect on an instance, and the commands that follow from it.",
    "operations": "Health, readiness and metrics of the service.",
}
SERVERS = [
    {"url": "/", "description": "the service that serves this document"},
    {"url": "http://127.0.0.1:8000", "description": "a service with its default settings, on this machine"},
]


def openapi(app: FastAPI) -> dict[str, Any]:
    """The contract as an OpenAPI document."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            description=DESCRIPTION,
            routes=app.routes,
            tags=[{"name": name, "description": description} for name, description in TAGS.items()],
            servers=SERVERS,
            contact={"name": "Lastbit"},
            license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        )
        _document_optional_bodies(document)
        ack_document.document(document)
        tallies.document(document)
        _document_access(app, document)
        document["components"]["schemas"].update(SCHEMAS)
        document["components"]["examples"] = examples.of_problems()
        _document_operations(document)
        schemas.tidy(document)
        app.openapi_schema = document
    return app.openapi_schema


def _document_optional_bodies(document: dict[str, Any]) -> None:
    """Mark bodies that may be `{}` as optional. The service treats a missing body as `{}`, but FastAPI documents it as
    required."""
    models = document["components"]["schemas"]
    for operations in document["paths"].values():
        for operation in operations.values():
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                # msgspec's schemas are added later. All their bodies have required fields.
                model = models.get(name)
                body["required"] = model is None or "required" in model or "minProperties" in model


def _document_operations(document: dict[str, Any]) -> None:
    for operations in document["paths"].values():
        for operation in operations.values():
            name = operation["operationId"]
            operation["summary"] = name.replace("_", " ").capitalize()
            operation["responses"] = dict(sorted(operation["responses"].items()))
            for parameter in operation.get("parameters", ()):
                example = examples.of_parameter(parameter)
                if example is not None:
                    parameter["example"] = example
            if "requestBody" in operation:
                operation["requestBody"]["content"]["application/json"]["examples"] = examples.of_requests(name)


def rules(app: FastAPI) -> Iterator[tuple[str, str, Rule]]:
    """Method, path and rule of each route."""
    for path in PATHS:
        yield "POST", path, CONSUMES
    for route in iter_route_contexts(app.routes):
        for method in sorted(route.methods or ()):
            yield method, name_of(str(route.path)), rule_of(route.endpoint)


def _document_access(app: FastAPI, document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "A token with one of the roles in an operation's `x-roles`; `admin` includes all roles. A "
            "service that was started without tokens requires none.",
        }
    }
    for method, path, rule in rules(app):
        operation = document["paths"].get(path, {}).get(method.lower())
        if operation is None:
            continue
        # Roles aren't written as the requirement's scopes: generators would treat the scheme as OAuth.
        operation["security"] = [] if rule.everybody else [{"token": []}]
        if not rule.everybody:
            operation["x-roles"] = [str(role) for role in rule.roles]
            responses = documented("unauthorized", "forbidden", "rate_limited")
            operation["responses"] |= {str(status): response for status, response in responses.items()}
