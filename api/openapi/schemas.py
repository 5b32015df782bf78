"""The schemas of the OpenAPI document, in a form that client generators support.

pydantic and msgspec write an optional value as `anyOf` with null. Generators make it a type that has lost its limits or
accepts anything. This module rewrites it as a nullable type, or as `oneOf` with two schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
_NULL = {"type": "null"}


def tidy(document: dict[str, Any]) -> None:
    """Tidy all schemas of a document in place. Raises `ValueError` for an `anyOf` that stays one."""
    for name, schema in document["components"]["schemas"].items():
        _tidy(schema, f"#/components/schemas/{name}")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                # A parameter is absent or has a value. It is never null.
                schema = parameter["schema"]
                variants = [variant for variant in schema.pop("anyOf", ()) if variant != _NULL]
                for variant in variants:
                    schema.update({**variant, **schema})
                schema.pop("title", None)
                if "description" in parameter:
                    schema.pop("description", None)
            for place, schema in _schemas(operation):
                _tidy(schema, f"{method} {path} {place}")
                schema.pop("title", None)


def _schemas(operation: dict[str, Any]) -> Iterator[tuple[str, Schema]]:
    for parameter in operation.get("parameters", ()):
        yield parameter["name"], parameter["schema"]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield "body", content["schema"]
    for status, response in operation["responses"].items():
        for part in (*response.get("content", {}).values(), *response.get("headers", {}).values()):
            yield status, part["schema"]


def _tidy(schema: Schema, place: str) -> None:
    for name, child in _children(schema):
        _tidy(child, f"{place}/{name}")
    variants = schema.pop("anyOf", None)
    if variants is not None:
        _resolve(schema, variants, place)
    types = schema.get("type")
    if "integer" in (types if isinstance(types, list) else [types]):
        schema.setdefault("format", "int64")
        for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if bound in schema:
                schema[bound] = int(schema[bound])
    elif "number" in (types if isinstance(types, list) else [types]):
        schema.setdefault("format", "double")


def _children(schema: Schema) -> Iterator[tuple[str, Schema]]:
    for name, child in schema.get("properties", {}).items():
        # pydantic derives the title from the field's name, and generators would name a type after it.
        child.pop("title", None)
        yield name, child
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            yield keyword, schema[keyword]
    for keyword in ("anyOf", "oneOf"):
        for position, child in enumerate(schema.get(keyword, ())):
            yield f"{keyword}/{position}", child


def _resolve(schema: Schema, variants: list[Schema], place: str) -> None:
    """Write `variants`, one of which is null, as one schema."""
    others = [variant for variant in variants if variant != _NULL]
    if len(others) != 1 or len(variants) != 2:
        raise ValueError(f"{place}: expected oneOf with distinct schemas, or one schema and null")
    other = others[0]
    if "$ref" in other:
        schema["oneOf"] = variants
    else:
        schema.update({**other, **schema})
        schema["type"] = [other["type"], "null"]
        if "enum" in other:
            schema["enum"] = [*other["enum"], None]
