"""The button of a task that opens its batch on the service's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lastbit.integrations.airflow._airflow import BaseOperatorLink, XCom

PAGE: Final = "lastbit_page"
"""The XCom with the address."""


def remember(context: Mapping[str, Any], url: str, batch: int) -> None:
    """Make the link of the running task point to the batch."""
    context["ti"].xcom_push(key=PAGE, value=f"{url}/#/batches/{batch}")


class LastbitBatchLink(BaseOperatorLink):
    """Opens the batch of a task. It is empty while the task knows no batch."""

    name = "Lastbit"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return XCom.get_value(key=PAGE, ti_key=ti_key) or ""
