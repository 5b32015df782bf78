"""openapi.yaml at the root is the contract, and the app is what it says."""

from __future__ import annotations

import httpx
import yaml

from scripts import openapi


def test_the_committed_document_is_the_apps() -> None:
    """After a change of the contract: `make openapi`, and look at what changed."""
    assert openapi.PATH.read_text() == openapi.render()


def test_a_running_service_serves_the_same_document(service_url: str) -> None:
    """As JSON, at /openapi.json, where its pages look for it."""
    assert httpx.get(f"{service_url}/openapi.json").json() == yaml.safe_load(openapi.PATH.read_text())


def test_the_pages_load_nothing_from_elsewhere(service_url: str) -> None:
    """Each address in /docs is the service's own, and it answers."""
    page = httpx.get(f"{service_url}/docs")
    assert page.status_code == 200
    addresses = [part.split('"')[0] for mark in ('src="', 'href="') for part in page.text.split(mark)[1:]]
    assert addresses
    for address in addresses:
        if not address.startswith("data:"):
            assert address.startswith("/"), address
            assert httpx.get(service_url + address).status_code == 200
