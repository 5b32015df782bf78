"""DAGs that open batches and fan out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

try:
    from airflow.sdk import DAG, task
except ImportError:
    from airflow import DAG
    from airflow.decorators import task

from lastbit.integrations.airflow import (
    LastbitBatchSensor,
    LastbitCancelBatchOperator,
    LastbitHook,
    LastbitOpenBatchOperator,
    LastbitSealBatchOperator,
)
from tests.integrations.airflow import seen

OPTIONS = {"schedule": None, "start_date": datetime(2026, 1, 1, tzinfo=UTC)}

with DAG("whole", **OPTIONS):
    opened = LastbitOpenBatchOperator(task_id="open", key="{{ run_id }}", labels={"dag": "{{ dag.dag_id }}"})

    @task
    def work(batch: int) -> None:
        with LastbitHook().get_conn() as client:
            client.ack(client.batch(batch).extend(3))

    seal = LastbitSealBatchOperator(task_id="seal", batch_id=opened.output)
    work(opened.output) >> seal >> LastbitBatchSensor(task_id="done", batch_id=opened.output, deferrable=True)

with DAG("opening", **OPTIONS):
    LastbitOpenBatchOperator(task_id="open")

with DAG("given_up", **OPTIONS):
    given_up = LastbitOpenBatchOperator(task_id="open", items=2)
    LastbitCancelBatchOperator(task_id="cancel", batch_id=given_up.output) >> LastbitCancelBatchOperator(
        task_id="cancel_again", batch_id=given_up.output
    )

with DAG("interrupted", **OPTIONS):

    @task(retries=1, retry_delay=timedelta(0))
    def publish() -> int:
        def messages() -> Iterator[str]:
            for number in range(10):
                if number == 5 and len(seen.sent) == 4:
                    raise ConnectionError("the producer's database is gone")
                yield f"message {number}"

        def send(pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
            seen.sent += pairs
            return []

        return LastbitHook().fan_out(messages(), send, key="interrupted", chunk=2)

    publish()
