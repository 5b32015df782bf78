"""The tables of docs/reference/calls.md: the parameters and body fields of each call, from the contract's schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]

LARGEST = 2**53
"""The bound of all integers, which the conventions state once."""
NUMBER = "(0|[1-9][0-9]{0,15})"
PATTERNS = {
    f"^{NUMBER}:{NUMBER}:{NUMBER}$": "an item's id",
    f"^{NUMBER}(:{NUMBER}:{NUMBER})?$": "the id of a batch or item",
}
"""In words. Other patterns are left to openapi.yaml."""
VISIBLE = re.compile(r"\^\[\\x21-\\x7e\]\{(\d+),(\d+)\}\$")


@dataclass(frozen=True)
class Row:
    name: str
    schema: Schema
    is_required: bool
    meaning: str

    def __str__(self) -> str:
        default = "required" if self.is_required else _default(self.schema)
        return f"| `{self.name}` | {_type(self.schema)} | {default} | {self.meaning} |\n"


def sections(document: Schema) -> str:
    """A section for each operation of version 1 that takes something, under the operation's name."""
    parts = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            rows = [*_parameters(operation), *_body(document, operation)]
            if path.startswith("/v1/") and rows:
                parts.append(f"\n### {operation['operationId']}\n\n`{method.upper()} {path}`{_key(operation)}\n\n")
                parts.append("| parameter or field | type | default | meaning |\n|---|---|---|---|\n")
                parts.extend(map(str, rows))
    return "".join(parts)


def _key(operation: Schema) -> str:
    names = [each["name"].lower() for each in operation.get("parameters", ())]
    return ", with an [Idempotency-Key](../http.md#idempotency-key)" if "idempotency-key" in names else ""


def _parameters(operation: Schema) -> Iterator[Row]:
    for each in operation.get("parameters", ()):
        if each["in"] != "path" and each["name"].lower() != "idempotency-key":
            meaning = each.get("description", "")
            meaning = f"a header: {meaning}" if each["in"] == "header" else meaning
            yield Row(each["name"], each["schema"], each["required"], meaning)


def _body(document: Schema, operation: Schema) -> Iterator[Row]:
    if body := operation.get("requestBody"):
        yield from _fields(document, body["content"]["application/json"]["schema"], "")


def _fields(document: Schema, schema: Schema, prefix: str) -> Iterator[Row]:
    """The fields of an object, each followed by its own: `callback.url`, `events[].id`."""
    variants = [each for each in _variants(document, schema) if "properties" in each]
    properties = {name: value for each in variants for name, value in each["properties"].items()}
    required_names = set.intersection(*(set(each.get("required", ())) for each in variants)) if variants else set()
    for name, value in properties.items():
        details = {**_described(document, value), **value}
        if "items" in value:
            entry = details["items"] = {**_described(document, value["items"]), **value["items"]}
            details.setdefault("description", entry.get("description", ""))
        yield Row(prefix + name, details, name in required_names, " ".join(details.get("description", "").split()))
        yield from _fields(document, value, f"{prefix}{name}.")
        yield from _fields(document, value.get("items", {}), f"{prefix}{name}[].")


def _variants(document: Schema, schema: Schema) -> list[Schema]:
    """The schema without references and alternatives."""
    if "$ref" in schema:
        return _variants(document, document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]])
    alternatives = schema.get("oneOf") or schema.get("anyOf")
    return [each for one in alternatives for each in _variants(document, one)] if alternatives else [schema]


def _described(document: Schema, schema: Schema) -> Schema:
    """The type and description of a field that is a reference, or one or null."""
    variants = _variants(document, schema)
    types = list(dict.fromkeys(name for each in variants for name in _types(each)))
    descriptions = [each["description"] for each in variants if "description" in each]
    return {"type": types, **({"description": descriptions[0]} if descriptions else {})}


def _default(schema: Schema) -> str:
    value = schema.get("default")
    return "" if value is None else f"`{json.dumps(value)}`"


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    names = " or ".join(_types(schema)) or "any JSON"
    if kinds := _types(schema.get("items", {})):
        names = names.replace("array", "array of " + " or ".join(f"{kind}s" for kind in kinds))
    return ", ".join([names, *_limits(schema)])


def _types(schema: Schema) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def _limits(schema: Schema) -> Iterator[str]:
    largest = schema.get("maximum")
    yield from _span(schema.get("minimum"), largest if largest is None or largest < LARGEST else None, "")
    if "multipleOf" in schema:
        yield f"a multiple of {schema['multipleOf']}"
    yield from _span(schema.get("minLength"), schema.get("maxLength"), " characters")
    yield from _span(schema.get("minItems"), schema.get("maxItems"), " entries")
    yield from _span(None, schema.get("maxProperties"), " names")
    if "format" in schema and schema["format"] == "date-time":
        yield "a time"
    pattern = schema.get("pattern", "")
    if pattern in PATTERNS:
        yield PATTERNS[pattern]
    elif visible := VISIBLE.fullmatch(pattern):
        yield f"{visible[1]} to {visible[2]} visible ASCII characters"


def _span(least: float | None, most: float | None, unit: str) -> Iterator[str]:
    if most is not None:
        yield f"{_number(least)} to {_number(most)}{unit}" if least else f"at most {_number(most)}{unit}"
    elif least and not unit:
        yield f"at least {_number(least)}{unit}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"
