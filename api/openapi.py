"""The OpenAPI document: FastAPI's, with the ack routes, the tallies' bodies, roles and problems added."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import iter_route_contexts
from starlette.routing import compile_path

from api import problems
from api.access.rules import CONSUMES, Rule, rule_of
from api.acks import document as ack_document
from api.acks.routes import PATHS
from api.routes import tallies

VERSION = "1.0.0"
"""Of the contract, not of the release."""


def openapi(app: FastAPI) -> dict[str, Any]:
    """The contract as an OpenAPI document."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            routes=app.routes,
            license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        )
        _document_optional_bodies(document)
        ack_document.document(document)
        tallies.document(document)
        _document_access(app, document)
        document["components"]["schemas"]["Problem"] = problems.SCHEMA
        app.openapi_schema = document
    return app.openapi_schema


def _document_optional_bodies(document: dict[str, Any]) -> None:
    """Of the routes that take `{}`: a request without a body is one, and FastAPI doesn't know."""
    schemas = document["components"]["schemas"]
    for operations in document["paths"].values():
        for operation in operations.values():
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                # Those that msgspec decodes are not there yet; they say themselves what they need.
                body["required"] = name not in schemas or bool(schemas[name].get("required"))


def rules(app: FastAPI) -> Iterator[tuple[str, str, Rule]]:
    """Method, path and rule of each route."""
    for path in PATHS:
        yield "POST", path, CONSUMES
    for route in iter_route_contexts(app.routes):
        for method in sorted(route.methods or ()):
            yield method, str(route.path), rule_of(route.endpoint)


def _document_access(app: FastAPI, document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "A token with one of the roles that an operation names; `admin` has them all. A service "
            "that was started without tokens asks for none.",
        }
    }
    for method, path, rule in rules(app):
        # As the document has it: without `:rest`, by which a parameter takes slashes.
        operation = document["paths"].get(compile_path(path)[1], {}).get(method.lower())
        if operation is None:
            continue
        operation["security"] = [] if rule.everybody else [{"token": [str(role)]} for role in rule.roles]
        if not rule.everybody:
            operation["responses"] |= {
                str(status): response for status, response in problems.documented(401, 403, 429).items()
            }
