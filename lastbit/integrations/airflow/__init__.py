"""A provider for Airflow 2.10 and later, and 3: one deferred task waits for any number of items.

`LastbitBatchSensor` waits for a batch, in the triggerer or in a worker. The operators open, seal and cancel batches.
`LastbitHook` makes clients from an Airflow connection, and fans out. Each name is imported when it is first used,
because Airflow reads `provider` at each of its starts.
"""

from __future__ import annotations

from typing import Final

from lastbit._lazy import lazy

_HOMES: Final = {
    "lastbit.integrations.airflow.hook": ("LastbitHook",),
    "lastbit.integrations.airflow.link": ("LastbitBatchLink",),
    "lastbit.integrations.airflow.operators": (
        "LastbitCancelBatchOperator",
        "LastbitOpenBatchOperator",
        "LastbitSealBatchOperator",
    ),
    "lastbit.integrations.airflow.runs": ("run_key",),
    "lastbit.integrations.airflow.sensor": ("LastbitBatchSensor",),
    "lastbit.integrations.airflow.trigger": ("LastbitBatchTrigger",),
}

__all__, __getattr__, __dir__ = lazy(__name__, _HOMES)
