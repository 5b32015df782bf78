"""The connection: how Airflow finds its type, and what its fields mean."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lastbit import InvalidArgument
from lastbit.integrations.airflow import LastbitHook
from lastbit.integrations.airflow.address import Address
from tests.integrations.airflow.conftest import Service


@pytest.mark.parametrize(
    ("host", "scheme", "port", "url"),
    [
        ("lastbit", None, 8000, "http://lastbit:8000"),
        ("lastbit", "https", None, "https://lastbit"),
        ("https://lastbit.example.com/", None, None, "https://lastbit.example.com"),
        ("https://lastbit.example.com/inner", "", 8443, "https://lastbit.example.com:8443/inner"),
        ("http://lastbit:8000", "https", 9000, "http://lastbit:8000"),
        ("[::1]", None, 8000, "http://[::1]:8000"),
    ],
)
def test_the_host_is_a_name_or_a_url(host: str, scheme: str | None, port: int | None, url: str) -> None:
    """A URL's own scheme and port win."""
    connection = SimpleNamespace(conn_id="lastbit_default", host=host, schema=scheme, port=port, password=" secret ")
    assert Address.of(connection) == Address(url, "secret")
    assert "secret" not in repr(Address.of(connection))


def test_a_connection_without_a_host_is_an_error() -> None:
    """It would otherwise lead to the worker's own machine."""
    connection = SimpleNamespace(conn_id="mine", host=None, schema=None, port=None, password=None)
    with pytest.raises(InvalidArgument, match="connection 'mine' has no host"):
        Address.of(connection)


def test_airflow_finds_the_connection_type_the_form_and_the_link(dags: object) -> None:
    """By the entry point of the installed package."""
    from airflow.providers_manager import ProvidersManager

    manager = ProvidersManager()
    assert manager.providers["lastbit"].data["name"] == "Lastbit"
    hook = manager.hooks["lastbit"]
    assert hook is not None
    assert (hook.hook_name, hook.connection_testable, hook.package_name) == ("Lastbit", True, "lastbit")
    form = manager.field_behaviours["lastbit"]
    assert form["relabeling"] == {"schema": "Scheme", "password": "Token"}
    assert set(form["hidden_fields"]) == {"login", "extra"}
    assert "lastbit.integrations.airflow.link.LastbitBatchLink" in manager.extra_links_class_names


@pytest.mark.parametrize(
    ("uri", "works", "message"),
    [
        ("lastbit://127.0.0.1:{port}", True, "responds and accepts the token"),
        ("lastbit://127.0.0.1:1", False, "no response from http://127.0.0.1:1"),
        ("lastbit://", False, "has no host"),
        ("lastbit://ftp%3A%2F%2F127.0.0.1", False, "not the address of a service"),
    ],
)
def test_the_forms_test_button_tells_what_is_wrong(
    service: Service, monkeypatch: pytest.MonkeyPatch, uri: str, works: bool, message: str
) -> None:
    """Never an exception."""
    monkeypatch.setenv("AIRFLOW_CONN_LASTBIT_TESTED", uri.format(port=service.port))
    result, text = LastbitHook("lastbit_tested").test_connection()
    assert (result, message in text) == (works, True), text
