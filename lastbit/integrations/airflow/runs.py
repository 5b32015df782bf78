"""The name of a task's run, so that its next try continues where the one before was interrupted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from lastbit.integrations.airflow._airflow import get_current_context


def run_key(context: Mapping[str, Any] | None = None, *details: object) -> str:
    """An idempotency key that all tries of the running task share, and no other task: of its DAG, run, task and map
    index. `details`, values that can be encoded as JSON, distinguish several keys of one task.

    Without `context`, it is that of the task that calls this function. Raises Airflow's exception if none does.
    """
    ti = (get_current_context() if context is None else context)["ti"]
    names = [ti.dag_id, ti.run_id, ti.task_id, ti.map_index, *details]
    return "airflow-" + sha256(json.dumps(names, sort_keys=True, default=str).encode()).hexdigest()
