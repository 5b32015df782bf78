"""The operators and the hook's fan-out, in real runs of DAGs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import airflow

from lastbit import Client
from tests.integrations.airflow import seen

DAY = datetime(2026, 11, 25, tzinfo=UTC)
# The date that identifies a run: with the same one, a run replaces the earlier one, as clearing all its tasks does.
SAME_RUN = {"execution_date": DAY} if airflow.__version__.startswith("2.") else {"logical_date": DAY, "run_after": DAY}


def returned(dag_run: Any, task_id: str) -> Any:
    return dag_run.get_task_instance(task_id).xcom_pull(task_ids=task_id)


def test_a_dag_opens_fans_out_seals_and_waits(dags: Any, client: Client) -> None:
    """Ids travel as XComs."""
    dag_run = dags["whole"].test()
    assert dag_run.state == "success"
    result = returned(dag_run, "done")
    assert (result["id"], result["acked"]) == (returned(dag_run, "open"), 3)
    batch = client.batch(result["id"]).refresh()
    assert (batch.key, batch.labels) == (dag_run.run_id, {"dag": "whole"})
    assert returned(dag_run, "seal")["state"] == "complete"


def test_each_run_opens_a_batch_of_its_own_and_each_try_the_same(dags: Any) -> None:
    """The run is repeated under its name: its batch is open still."""
    first = returned(dags["opening"].test(**SAME_RUN), "open")
    assert returned(dags["opening"].test(**SAME_RUN), "open") == first
    assert returned(dags["opening"].test(), "open") != first


def test_a_cleared_task_opens_another_batch_after_the_end_of_the_first(dags: Any) -> None:
    """The work is meant to be done again."""
    first = returned(dags["whole"].test(**SAME_RUN), "done")
    second = returned(dags["whole"].test(**SAME_RUN), "done")
    assert second["id"] > first["id"]
    assert second["acked"] == 3


def test_cancelling_may_be_repeated(dags: Any) -> None:
    """As a teardown task that doesn't know whether the batch has ended."""
    dag_run = dags["given_up"].test()
    assert dag_run.state == "success"
    assert returned(dag_run, "cancel")["state"] == returned(dag_run, "cancel_again")["state"] == "cancelled"


def test_a_fan_out_continues_in_the_next_try(dags: Any, client: Client) -> None:
    """The first try fails after two of five chunks. The second one gets the same batch and repeats one chunk."""
    seen.clear()
    dag_run = dags["interrupted"].test()
    assert dag_run.state == "success"
    batch = client.batch(returned(dag_run, "publish")).refresh()
    assert (batch.key, batch.state, batch.items) == ("interrupted", "sealed", 10)
    messages = [message for _, message in seen.sent]
    assert messages[:4] == [f"message {number}" for number in range(4)]
    assert messages[4:] == [f"message {number}" for number in range(2, 10)]
    assert len({item for item, _ in seen.sent}) == 10
