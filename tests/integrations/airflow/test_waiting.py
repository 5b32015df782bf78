"""The sensor in real runs of DAGs: each outcome of a batch."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lastbit import Client
from tests.integrations.airflow import seen
from tests.integrations.airflow.conftest import ROOT, SERVICE_PYTHON, Service

LIST = "/v1/batches"


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


def run(dag: Any, **configuration: Any) -> tuple[str, Any]:
    """The state of the task `done` after a run of the DAG, and its XCom."""
    dag_run = dag.test(run_conf=configuration)
    task = dag_run.get_task_instance("done")
    return str(task.state), task.xcom_pull(task_ids="done")


def reason() -> str:
    """The message of the exception that ended the task."""
    (failure,) = seen.failures
    return str(failure)


@contextmanager
def when_waiting(service: Service, path: str, action: Callable[[], object]) -> Iterator[None]:
    """Do something in another thread as soon as the service has answered two requests to `path`. The sensor sends the
    first one in a worker, and its trigger the second one before it waits."""
    service.forget_answers()
    errors: list[BaseException] = []

    def watch() -> None:
        try:
            service.wait_for_answers(path, 2)
            action()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join(60)
    assert not errors, errors


def test_a_batch_that_is_complete_already_needs_no_trigger(dags: Any, client: Client) -> None:
    """The XCom has the counts."""
    batch = client.open(key="over", items=3, sealed=True)
    client.ack(batch.ids)
    state, result = run(dags["by_id"], batch=batch.id)
    assert state == "success"
    assert result == {
        "id": batch.id,
        "key": "over",
        "state": "complete",
        "items": 3,
        "acked": 3,
        "failed": 0,
        "pending": 0,
        "succeeded": True,
    }


@pytest.mark.parametrize("dag", ["by_id", "in_a_worker"])
def test_the_last_ack_ends_the_wait(dags: Any, client: Client, service: Service, dag: str) -> None:
    """In the triggerer, and in a worker."""
    batch = client.open(items=1000, sealed=True)
    client.ack(batch.ids[:-1])
    with when_waiting(service, f"{LIST}/{batch.id}", lambda: client.ack(batch.ids[-1])):
        state, result = run(dags[dag], batch=batch.id)
    assert (state, result["acked"]) == ("success", 1000)


def test_a_batch_may_be_opened_while_the_sensor_waits_for_its_key(dags: Any, client: Client, service: Service) -> None:
    """The trigger looks for it again and again, and then waits for its end."""

    def work() -> None:
        batch = client.open(key="not yet", items=2, sealed=True)
        service.forget_answers()
        service.wait_for_answers(f"{LIST}", 1)
        client.ack(batch.ids)

    with when_waiting(service, LIST, work):
        state, result = run(dags["by_key"], key="not yet")
    assert (state, result["acked"]) == ("success", 2)


def test_a_batch_of_an_earlier_run_does_not_count(dags: Any, client: Client, service: Service) -> None:
    """With the same key, but opened before `opened_since`."""
    earlier = client.open(key="daily", sealed=True)
    assert earlier.complete
    assert run(dags["since"], key="daily", since=earlier.info.created_at.isoformat())[1]["id"] == earlier.id
    since = (earlier.info.created_at + timedelta(microseconds=1)).isoformat()
    with when_waiting(service, LIST, lambda: client.open(key="daily", sealed=True)):
        state, result = run(dags["since"], key="daily", since=since)
    assert state == "success"
    assert result["id"] > earlier.id


def test_a_run_waits_for_a_batch_that_was_opened_after_it_was_due(dags: Any, client: Client, service: Service) -> None:
    """As the page shows it."""
    earlier = client.open(key="hourly", sealed=True)
    with when_waiting(service, LIST, lambda: client.open(key="hourly", sealed=True)):
        state, result = run(dags["since_due"], key="hourly")
    assert state == "success"
    assert result["id"] > earlier.id


def test_failed_items_fail_the_task_only_if_asked(dags: Any, client: Client) -> None:
    """The message has the counts; a redrive makes the next try succeed."""
    batch = client.open(key="halves", items=2, sealed=True)
    client.ack(batch.ids[0])
    client.fail(batch.ids[1], "no such page")
    state, result = run(dags["by_id"], batch=batch.id)
    assert (state, result["failed"], result["succeeded"]) == ("success", 1, False)
    state, result = run(dags["strict"], batch=batch.id)
    assert (state, result) == ("failed", None)
    assert reason() == f"batch {batch.id} (key 'halves') is complete, but 1 of 2 items failed"
    client.ack(batch.ids[1])
    assert run(dags["strict"], batch=batch.id)[0] == "success"


@pytest.mark.parametrize("dag", ["by_id", "by_key", "in_a_worker"])
def test_a_cancelled_batch_fails_the_task(dags: Any, client: Client, service: Service, dag: str) -> None:
    """With a message that tells so, and what was pending."""
    batch = client.open(key=f"cancelled {dag}", items=4)
    client.ack(batch.ids[0])
    path = LIST if dag == "by_key" else f"{LIST}/{batch.id}"
    with when_waiting(service, path, batch.cancel):
        state, _ = run(dags[dag], batch=batch.id, key=batch.key)
    assert state == "failed"
    assert reason() == f"batch {batch.id} (key 'cancelled {dag}') was cancelled: 3 of 4 items were pending"
    # Another try can find another batch only by key.
    assert (type(seen.failures[0]).__name__ == "AirflowFailException") == (dag != "by_key")


def test_an_expired_batch_fails_the_task(dags: Any, client: Client, service: Service) -> None:
    """The janitor expires it while the task waits."""
    batch = client.open(items=4)

    def expire() -> None:
        command = [SERVICE_PYTHON, "-m", "jobs.janitor", "--open-idle", "0s"]
        database = ["--database-url", f"sqlite:///{service.folder}/lastbit.db"]
        subprocess.run(
            [*command, *database], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60
        )

    with when_waiting(service, f"{LIST}/{batch.id}", expire):
        state, _ = run(dags["by_id"], batch=batch.id)
    assert state == "failed"
    assert reason().startswith(f"batch {batch.id} has expired")


def test_soft_fail_skips_the_task(dags: Any, client: Client, service: Service) -> None:
    """In both places: if the batch is cancelled already, and if it is cancelled later."""
    batch = client.open(items=1)
    with when_waiting(service, f"{LIST}/{batch.id}", batch.cancel):
        assert run(dags["soft"], batch=batch.id)[0] == "skipped"
    assert run(dags["soft"], batch=batch.id)[0] == "skipped"


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (10**9, "404 batch_not_found"),
        (None, "does the task that it comes from return one?"),
        ("", "batch_id is the id of a batch, a whole number, not ''"),
    ],
)
def test_a_wrong_id_fails_the_task_at_once(dags: Any, service: Service, batch: object, message: str) -> None:
    """One that doesn't exist, and templates without a value."""
    assert run(dags["by_id"], batch=batch)[0] == "failed"
    assert message in reason()


def test_the_wait_outlasts_an_outage_of_the_service(dags: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service is killed while the task waits, and is started again after the client has given up its 8 attempts at
    least once."""
    service = Service(tmp_path).start()
    monkeypatch.setenv("AIRFLOW_CONN_LASTBIT_DEFAULT", f"lastbit://127.0.0.1:{service.port}")
    with Client(service.url) as client:
        batch = client.open(items=1, sealed=True)

        def fail_for_a_while() -> None:
            service.kill()
            with socket.create_server(("127.0.0.1", service.port)) as refuser:
                for _ in range(10):
                    refuser.accept()[0].close()
            service.start()
            client.ack(batch.ids)

        try:
            with when_waiting(service, f"{LIST}/{batch.id}", fail_for_a_while):
                state, result = run(dags["by_id"], batch=batch.id)
        finally:
            service.kill()
    assert (state, result["acked"]) == ("success", 1)


def test_the_token_is_the_connections_password(dags: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token reaches the worker and the triggerer. Without it, the task fails at once."""
    command = [SERVICE_PYTHON, "-m", "lastbit", "token", "new", "--role", "produce", "--role", "consume", "--name", "a"]
    output = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    ).stdout
    token, line = (row.split(maxsplit=1)[1] for row in output.splitlines()[:2])
    service = Service(tmp_path, LASTBIT_TOKENS=line).start()
    try:
        with Client(service.url, token=token) as client:
            batch = client.open(items=1, sealed=True)
            monkeypatch.setenv("AIRFLOW_CONN_LASTBIT_OTHER", f"lastbit://127.0.0.1:{service.port}")
            assert run(dags["other_connection"], batch=batch.id)[0] == "failed"
            assert "401 unauthorized" in reason()
            monkeypatch.setenv("AIRFLOW_CONN_LASTBIT_OTHER", f"lastbit://:{token}@127.0.0.1:{service.port}")
            with when_waiting(service, f"{LIST}/{batch.id}", lambda: client.ack(batch.ids)):
                assert run(dags["other_connection"], batch=batch.id)[0] == "success"
    finally:
        service.kill()


def test_the_link_opens_the_batch_on_the_services_page(dags: Any, client: Client, service: Service) -> None:
    """The button of the task's page."""
    from lastbit.integrations.airflow import LastbitBatchLink

    batch = client.open(sealed=True)
    task = dags["by_id"].test(run_conf={"batch": batch.id}).get_task_instance("done")
    link = task.xcom_pull(task_ids="done", key="_link_LastbitBatchLink")  # Airflow 3 stores it
    assert (link or LastbitBatchLink().get_link(None, ti_key=task.key)) == f"{service.url}/#/batches/{batch.id}"


def test_a_sensor_names_one_batch() -> None:
    """Neither none nor two, and a time only with a key."""
    from lastbit import InvalidArgument
    from lastbit.integrations.airflow.target import Target

    for arguments, message in (
        ((None, None, None), "neither has a value"),
        ((7, "key", None), "both have one"),
        ((7, None, datetime.now(UTC)), "opened_since is for batch_key"),
        (("7.5", None, None), "a whole number, not '7.5'"),
        ((True, None, None), "a whole number, not True"),
        ((None, "", None), "batch_key is a text that is not empty"),
        ((None, "key", "yesterday"), "a time in ISO 8601"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Target.of(*arguments)
    assert Target.of(" 7 ", None, None) == Target(7)
    assert Target.of(None, "key", "2026-11-25").opened_since == datetime(2026, 11, 25, tzinfo=UTC)
