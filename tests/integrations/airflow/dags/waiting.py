"""DAGs of one sensor each; the batch is named in the run's configuration."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

try:
    from airflow.sdk import DAG

    DUE = "{{ dag_run.run_after }}"
except ImportError:
    from airflow import DAG

    DUE = "{{ data_interval_end }}"

from lastbit.integrations.airflow import LastbitBatchSensor
from tests.integrations.airflow import seen

BATCH = "{{ dag_run.conf['batch'] }}"
KEY = "{{ dag_run.conf['key'] }}"

SENSORS: dict[str, dict[str, Any]] = {
    "by_id": {"batch_id": BATCH},
    "by_key": {"batch_key": KEY},
    "since": {"batch_key": KEY, "opened_since": "{{ dag_run.conf['since'] }}"},
    "since_due": {"batch_key": KEY, "opened_since": DUE},
    "strict": {"batch_id": BATCH, "fail_on_failed_items": True},
    "soft": {"batch_id": BATCH, "soft_fail": True},
    "in_a_worker": {"batch_id": BATCH, "deferrable": False, "poke_interval": 0.1},
    "other_connection": {"batch_id": BATCH, "lastbit_conn_id": "lastbit_other"},
}

for dag_id, options in SENSORS.items():
    with DAG(dag_id, schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)):
        LastbitBatchSensor(
            task_id="done",
            on_failure_callback=seen.remember_failure,
            **{"deferrable": True, "trigger_interval": 0.1, **options},
        )
