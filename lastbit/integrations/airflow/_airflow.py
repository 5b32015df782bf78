"""The names of Airflow that this package uses: Airflow 3 has them in `airflow.sdk`, Airflow 2 elsewhere."""

from __future__ import annotations

from lastbit.errors import MissingExtra

try:
    import airflow  # noqa: F401
except ImportError as cause:
    raise MissingExtra("airflow", "lastbit.integrations.airflow") from cause

try:
    from airflow.sdk import BaseOperator, BaseOperatorLink, BaseSensorOperator, PokeReturnValue, get_current_context
    from airflow.sdk.execution_time.xcom import XCom
except ImportError:  # Airflow 2
    from airflow.models.baseoperator import BaseOperator
    from airflow.models.baseoperatorlink import BaseOperatorLink
    from airflow.models.xcom import XCom
    from airflow.operators.python import get_current_context
    from airflow.sensors.base import BaseSensorOperator, PokeReturnValue

try:
    from airflow.sdk.bases.hook import BaseHook
    from airflow.sdk.exceptions import AirflowException, AirflowFailException
except ImportError:  # Airflow 2 and 3.0
    from airflow.exceptions import AirflowException, AirflowFailException
    from airflow.hooks.base import BaseHook

from airflow.configuration import conf
from airflow.triggers.base import BaseTrigger, TriggerEvent

__all__ = [
    "AirflowException",
    "AirflowFailException",
    "BaseHook",
    "BaseOperator",
    "BaseOperatorLink",
    "BaseSensorOperator",
    "BaseTrigger",
    "PokeReturnValue",
    "TriggerEvent",
    "XCom",
    "conf",
    "get_current_context",
]
