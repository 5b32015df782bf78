"""openapi.yaml at the root is the contract, and the app follows it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from api.openapi import examples
from api.problems import STATUS
from scripts import openapi
from tests.support.servers import running_service, sqlite_file


def test_the_committed_document_is_the_apps() -> None:
    """After a change of the contract, run `make openapi` and review the difference: operations may be added, none may
    get another name, as generated clients take method names from them."""
    assert openapi.PATH.read_text() == openapi.render()
    assert openapi.CALLS.read_text() == openapi.calls()


def test_a_running_service_serves_the_same_document(service_url: str) -> None:
    """As JSON, at /openapi.json, where its pages load it from."""
    assert httpx.get(f"{service_url}/openapi.json").json() == yaml.safe_load(openapi.PATH.read_text())


def test_the_pages_load_nothing_from_elsewhere(service_url: str) -> None:
    """Each address in /docs is on the service itself, and answers."""
    page = httpx.get(f"{service_url}/docs")
    assert page.status_code == 200
    addresses = [part.split('"')[0] for mark in ('src="', 'href="') for part in page.text.split(mark)[1:]]
    assert addresses
    for address in addresses:
        if not address.startswith("data:"):
            assert address.startswith("/"), address
            assert httpx.get(service_url + address).status_code == 200


DOCUMENT: Final[dict[str, Any]] = yaml.safe_load(openapi.PATH.read_text())
OPERATIONS: Final = {
    operation["operationId"]: (method.upper(), path, operation)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
}


def schemas(node: Any) -> Iterator[dict[str, Any]]:
    """All objects of the document that could be a schema."""
    if isinstance(node, dict):
        yield node
        for name, child in node.items():
            if name not in ("examples", "example"):
                yield from schemas(child)
    elif isinstance(node, list):
        for child in node:
            yield from schemas(child)


def test_no_schema_erases_types() -> None:
    """Generators turn `anyOf` into a type that is too wide, and an integer without a format into one of 32 bits."""
    for schema in schemas(DOCUMENT):
        assert "anyOf" not in schema
        if schema.get("type") in ("integer", ["integer", "null"]):
            assert schema["format"] in ("int32", "int64"), schema


def test_schemas_have_names_of_their_own() -> None:
    """Generators name types after schemas, or after their titles. FastAPI puts the module's name before that of two
    models with one name, and a suffix behind that of a model whose requests and responses differ."""
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert re.fullmatch("([A-Z][a-z]+)+", name), f"{name}: give each model a name that no other has"
        assert schema.get("title", name) == name


def test_no_property_is_always_null() -> None:
    """In many languages there is no type for it, and generated code doesn't compile."""
    for schema in schemas(DOCUMENT):
        for name, value in schema.get("properties", {}).items():
            assert value.get("type") != "null", name


def test_bodies_allow_no_unknown_fields() -> None:
    """The service refuses them; with this, generated clients refuse a misspelt field."""
    checked = 0
    for _, _, operation in OPERATIONS.values():
        if "requestBody" in operation:
            waiting = [operation["requestBody"]["content"]["application/json"]["schema"]]
            while waiting:
                schema = waiting.pop()
                name = schema.get("$ref", "").rpartition("/")[2]
                schema = DOCUMENT["components"]["schemas"][name] if name else schema
                if "properties" in schema:
                    assert schema["additionalProperties"] is False, name
                    checked += 1
                waiting += [*schema.get("properties", {}).values(), *schema.get("oneOf", ())]
                waiting += [schema["items"]] if "items" in schema else []
    assert checked > 20


def test_each_error_has_an_example() -> None:
    """With its code and status; and each code belongs to some operation, except those that belong to none."""
    codes = set()
    for method, path, operation in OPERATIONS.values():
        for status, response in operation["responses"].items():
            if status >= "400":
                examples = response["content"]["application/problem+json"]["examples"]
                assert examples, (method, path, status)
                for code, reference in examples.items():
                    assert reference == {"$ref": f"#/components/examples/{code}"}
                    problem = DOCUMENT["components"]["examples"][code]["value"]
                    assert (problem["code"], problem["status"]) == (code, int(status))
                    codes.add(code)
    at_no_operation = {"internal", "method_not_allowed", "not_found", "not_implemented", "http_version_not_supported"}
    assert set(STATUS) - codes == at_no_operation


def test_a_service_accepts_the_examples() -> None:
    """All of them, in order, on a new service."""
    fill = {"tally": "screws", "process": "shipping", "instance": "order-1001", "group": "render", "partition": "0"}
    asked = set()
    with (
        sqlite_file() as url,
        running_service(url, LASTBIT_WEBHOOKS_ALLOW_PRIVATE="true", LASTBIT_DISPATCHER_EVERY="0") as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        for name in examples.REQUESTS:
            method, path, operation = OPERATIONS[name]
            if name == "handle_events":
                body = {"worker": "worker-1", "session": "s"}
                assert http.post("/v1/consumer-groups/process.shipping/sync", json=body).status_code == 200
            for example in operation["requestBody"]["content"]["application/json"]["examples"].values():
                body = example["value"]
                if name == "reopen_batch":
                    http.post("/v1/batches/1/cancel")
                if name == "create_webhook":
                    body = {**body, "url": "http://127.0.0.1:9/"}  # a name would need a name server
                response = http.request(method, path.format(id=1, **fill), json=body)
                if body == {"position": 1}:
                    # The event was in the feed before the webhook.
                    assert [error["place"] for error in response.json()["errors"]] == ["body.position"]
                else:
                    assert response.is_success, (name, response.text)
                asked.add(name)
    assert asked == {name for name, (_, _, operation) in OPERATIONS.items() if "requestBody" in operation}


@pytest.mark.nightly
def test_linters_report_nothing() -> None:
    """Redocly and Spectral, with their recommended rules."""
    lint = subprocess.run([sys.executable, "-m", "scripts.openapi_lint"], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout + lint.stderr


@pytest.mark.nightly
def test_linters_report_a_missing_field(tmp_path: Path) -> None:
    """Both linters."""
    path = tmp_path / "openapi.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in DOCUMENT.items() if name != "servers"}))
    lint = subprocess.run([sys.executable, "-m", "scripts.openapi_lint", path], capture_output=True, text=True)
    assert lint.returncode == 1
    assert "redocly no-empty-servers" in lint.stdout
    assert "spectral oas3-api-servers" in lint.stdout
