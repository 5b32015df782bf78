"""The ack routes in the OpenAPI document. FastAPI can't describe them, as they are served in front of it."""

from __future__ import annotations

from typing import Any

import msgspec

from api import problems
from api.acks.bodies import AckAnswer, Acks, Failures, Skips
from api.acks.routes import PATHS
from core.batches.lifecycle import Verb


def document(openapi: dict[str, Any]) -> None:
    """Add the routes to an OpenAPI document."""
    answers = {
        Verb.ACK: (Acks, "Ack items", []),
        Verb.FAIL: (Failures, "Give items up", []),
        Verb.SKIP: (Skips, "Skip items that are not needed", ["upgrade_not_finished"]),
    }
    _, components = msgspec.json.schema_components(
        [Acks, Failures, Skips, AckAnswer], ref_template="#/components/schemas/{name}"
    )
    for name in ("Acks", "Failures", "Skips"):
        _split(name, components)
    openapi["components"]["schemas"].update(components)
    for path, verb in PATHS.items():
        model, summary, more_problems = answers[verb]
        # A GET of failures is FastAPI's; the path keeps its place between those of acks and skips.
        openapi["paths"][path] = openapi["paths"].pop(path, {})
        openapi["paths"][path]["post"] = {
            "tags": ["acks"],
            "summary": summary,
            "description": "Idempotent. Items may be of any batches and in any order. The response is sent after "
            "the commit.",
            "operationId": f"{verb}_items",
            "parameters": [
                {
                    "name": "Idempotency-Key",
                    "in": "header",
                    "required": False,
                    "schema": {"type": "string", "pattern": r"^[\x21-\x7e]{1,255}$"},
                    "description": "1 to 255 visible ASCII characters; kept with the batches that the call "
                    "completes, so that its retry sees `newly` again",
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
                **{
                    str(status): response
                    for status, response in problems.documented(*more_problems, *problems.BODY).items()
                },
            },
        }


def _split(name: str, components: dict[str, Any]) -> None:
    """Describe a body that has items or groups or both as two closed schemas, exactly one of which it matches. So
    generated clients have a type that refuses any other body."""
    body = components[name]
    with_groups = {key: value for key, value in body["properties"].items() if key != "items"}
    closed = {"type": "object", "additionalProperties": False}
    components[f"{name}ByItem"] = {
        "description": "By id, and also by mask.",
        **closed,
        "properties": body["properties"],
        "required": ["items"],
    }
    components[f"{name}ByGroup"] = {
        "description": "By mask alone.",
        **closed,
        "properties": with_groups,
        "required": ["groups"],
    }
    components[name] = {
        "title": name,
        "description": body["description"],
        "oneOf": [{"$ref": f"#/components/schemas/{name}{suffix}"} for suffix in ("ByItem", "ByGroup")],
    }
