"""What Airflow learns about this package when it starts; pyproject.toml names the function as an entry point.

It imports nothing of Airflow, and no hook or operator.
"""

from __future__ import annotations

from typing import Any, Final

_PACKAGE: Final = "lastbit.integrations.airflow"
_INTEGRATION: Final = "Lastbit"

HIDDEN_FIELDS: Final = ("login", "extra")
RELABELING: Final = {"schema": "Scheme", "password": "Token"}
PLACEHOLDERS: Final = {
    "host": "lastbit.example.com, or a URL",
    "schema": "http or https; default http",
    "port": "8000",
    "password": "lastbit_…; empty if the service has no tokens",
}


def get_provider_info() -> dict[str, Any]:
    """In the form of Airflow's `provider_info.schema.json`. Airflow 3.2 and later take the form of the connection from
    here, earlier releases from the hook."""
    return {
        "package-name": "lastbit",
        "name": _INTEGRATION,
        "description": "Wait for a fanned-out batch of work, with one task for any number of items.",
        "integrations": [{"integration-name": _INTEGRATION, "tags": ["service"]}],
        "hooks": [_modules("hook")],
        "operators": [_modules("operators")],
        "sensors": [_modules("sensor")],
        "triggers": [_modules("trigger")],
        "connection-types": [
            {
                "connection-type": "lastbit",
                "hook-class-name": f"{_PACKAGE}.hook.LastbitHook",
                "hook-name": _INTEGRATION,
                "ui-field-behaviour": {
                    "hidden-fields": list(HIDDEN_FIELDS),
                    "relabeling": RELABELING,
                    "placeholders": PLACEHOLDERS,
                },
            }
        ],
        "extra-links": [f"{_PACKAGE}.link.LastbitBatchLink"],
    }


def _modules(name: str) -> dict[str, Any]:
    return {"integration-name": _INTEGRATION, "python-modules": [f"{_PACKAGE}.{name}"]}
