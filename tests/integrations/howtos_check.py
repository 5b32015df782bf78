"""The README and each how-to page of an adapter, followed word for word in an empty environment.

For each page there is a new folder, and a new virtual environment with nothing but pip. The commands of the page run in
their order, beginning with its `pip install`. Each program is saved under the name that the page gives it, and each
output must be as printed. `lastbit` is the built wheel, and the service runs from the wheel `lastbit-server`, installed
as the README says. Only the addresses of servers differ. `make test-howtos` runs this; pytest doesn't find it
by itself.

Packages have the versions in constraints/. With LASTBIT_LATEST=1 they have their newest ones, as for a reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import confluent_kafka
import httpx
import pytest

from lastbit import Client
from lastbit.integrations import kafka, rabbitmq, sqs
from scripts import dist
from tests.conftest import need
from tests.integrations.workers import wait_until
from tests.support.aws import CREDENTIALS, Moto, moto_server
from tests.support.brokers import RabbitMQ, redis_server
from tests.support.servers import ROOT, free_port

pytestmark = pytest.mark.timeout(1800)

FENCE = re.compile(r"((?:[^\n]+\n)*)\n```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A paragraph if there is one, and the language and body of the block after it."""


BUILD = "make -C ~/lastbit dist"


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    file: str | None
    """The name in the paragraph before a program."""


def blocks(page: str) -> list[Block]:
    """The blocks to follow. Those of the language `py` are excerpts, not programs."""
    found = []
    for paragraph, language, body in FENCE.findall((ROOT / page).read_text()):
        names = re.findall(r"`(\w+\.py)`", paragraph)
        found.append(Block(language, body, names[0] if names else None))
    return [block for block in found if block.language in ("sh", "python", "text")]


def commands(body: str) -> list[str]:
    lines = body.replace("\\\n", "").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


@dataclass
class Reader:
    """Somebody who follows a page, in a folder and an environment of their own."""

    folder: Path
    venv: Path
    variables: dict[str, str]
    addresses: dict[str, str] = field(default_factory=dict)
    """Those of the page, and what stands here in their place."""
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LASTBIT_", "PYTHON", "VIRTUAL_ENV", "PYTEST", "AWS_", "AIRFLOW"))
        }
        path = f"{self.venv}/bin:{os.environ['PATH']}"
        return {**inherited, "PATH": path, "PYTHONUNBUFFERED": "1", **self.variables}

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Run a command until the end of the page."""
        with (self.folder / f"output-{len(self.running)}").open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-euc", f"exec {command}"],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def run(self, command: str) -> str:
        shell = ["bash", "-euc", command]
        process = subprocess.run(
            shell, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600
        )
        output = process.stdout[-2000:] + process.stderr[-4000:]
        assert process.returncode == 0, f"{command}\n{output}\n{self.outputs()}"
        return process.stdout

    def follow(self, steps: Sequence[Block], stays: Sequence[str] = ()) -> None:
        """`stays`: the commands that don't end by themselves."""
        pending, last = set(stays), None
        for block in steps:
            body = block.body
            for printed, local in self.addresses.items():
                body = body.replace(printed, local)
            if block.language == "python":
                assert block.file, f"the page names no file for this program:\n{block.body}"
                (self.folder / block.file).write_text(body)
            elif block.language == "text" and last is None:
                wait_until(partial(self.has_printed, body.strip()), f"a process prints {body!r}")
            elif block.language == "text":
                assert last == body
                last = None  # a second block shows what other processes print
            else:
                for command in commands(body):
                    if command == BUILD:
                        continue  # the fixture `wheels` has done so
                    if command in stays:
                        self.start(command)
                        pending.discard(command)
                    else:
                        last = self.run(command)
        assert not pending, "commands that the page no longer has"

    def has_printed(self, text: str) -> bool:
        return text in self.outputs()

    def outputs(self) -> str:
        return "".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.folder.glob("output-*")))

    def stop(self) -> None:
        """End all that runs as Ctrl-C does. Every command must end by itself then."""
        try:
            for process in reversed(self.running):
                assert process.poll() is None, self.outputs()
                process.send_signal(signal.SIGINT)
                process.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two wheels."""
    folder = tmp_path_factory.mktemp("dist")
    dist.main(folder)
    return folder


def registry(wheels: Path, constraints: str = "dev.txt") -> dict[str, str]:
    """Variables with which pip finds the wheels in addition to what it finds anyway. `constraints`: the file with the
    versions of all other packages."""
    lines = ["{}=={}".format(*wheel.name.split("-")) for wheel in wheels.glob("*.whl")]
    if not os.environ.get("LASTBIT_LATEST"):
        lines += re.findall(r"^[\w.-]+==[^\\\n]+", (ROOT / "constraints" / constraints).read_text(), re.MULTILINE)
    (wheels / constraints).write_text("\n".join(lines) + "\n")
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} {wheels}"
    return {"PIP_CONSTRAINT": str(wheels / constraints), "PIP_FIND_LINKS": links.strip(), "PIP_NO_COMPILE": "1"}


def empty_environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    return folder / "venv"


@pytest.fixture
def reader(tmp_path: Path, wheels: Path) -> Iterator[Reader]:
    """With nothing installed."""
    folder = tmp_path / "reader"
    folder.mkdir()
    reader = Reader(folder, empty_environment(tmp_path), registry(wheels), {"~/lastbit/dist": str(wheels)})
    try:
        yield reader
    finally:
        reader.kill()


@pytest.fixture(scope="module")
def server(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the service."""
    folder = tmp_path_factory.mktemp("server")
    venv = empty_environment(folder)
    Reader(folder, venv, registry(wheels)).run("pip install lastbit-server")
    return venv


@pytest.fixture
def lastbit(server: Path, tmp_path: Path) -> Iterator[Client]:
    """A client of a new service."""
    folder = tmp_path / "service"
    folder.mkdir()
    operator = Reader(folder, server, {})
    try:
        with serve(operator) as client:
            yield client
        operator.stop()
    finally:
        operator.kill()


def serve(reader: Reader) -> Client:
    """Start the service with the README's command, and return a client for it."""
    port = free_port()
    reader.variables |= {"LASTBIT_PORT": str(port), "LASTBIT_URL": f"http://127.0.0.1:{port}"}
    process = reader.start("lastbit-server")

    def is_ready() -> bool:
        assert process.poll() is None, reader.outputs()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/readyz").is_success
        return False

    wait_until(is_ready, "the service is ready")
    return Client(reader.variables["LASTBIT_URL"])


@pytest.fixture
def redis() -> Iterator[str]:
    with redis_server() as server:
        yield server.url()


@pytest.fixture(scope="module")
def rabbitmq_url() -> Iterator[str]:
    server = RabbitMQ()
    need("rabbitmq-server", server.available)
    try:
        server.start()
        yield server.url
    finally:
        server.remove()


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with moto_server() as server:
        yield server


def ended(client: Client, key: str) -> tuple[int, int]:
    """The counts of a batch, once it is complete."""
    (batch,) = client.batches(key=key)
    info = client.batch(batch.id).wait(120)
    return info.acked, info.failed


def test_the_readme(reader: Reader) -> None:
    """And the program of the tour; tests/test_shell_examples.py runs the commands that follow it."""
    _, install, program, output, _ = blocks("README.md")
    assert program.file == "first.py"
    assert commands(install.body) == [
        "make dist",
        "python3 -m venv first && . first/bin/activate",
        "pip install --find-links dist lastbit-server",
        "lastbit-server",
    ]
    reader.run("pip install lastbit-server")
    with serve(reader):
        (reader.folder / program.file).write_text(program.body)
        assert reader.run(f"python {program.file}") == output.body
        reader.follow(blocks("docs/tour.md")[:3])
        assert "tour" in reader.run("lastbit list --state complete")
    reader.stop()


WORKERS = {
    "celery": "celery -A tasks worker --loglevel INFO",
    "dramatiq": "dramatiq tasks",
    "taskiq": "taskiq worker tasks:broker",
    "rq": "rq worker --worker-class tasks.Worker",
}


@pytest.mark.parametrize("name", WORKERS)
def test_a_queue_of_tasks(name: str, reader: Reader, lastbit: Client, redis: str) -> None:
    """The producer prints what the page shows. It starts before the worker is ready, as in two terminals."""
    reader.addresses["redis://127.0.0.1:6379"] = redis
    reader.variables |= {"LASTBIT_URL": lastbit.url, "RQ_REDIS_URL": redis}
    reader.follow(blocks(f"docs/{name}.md"), [WORKERS[name]])
    reader.stop()


CONSUMERS = ("python consume.py", "python bury.py")


def complete(client: Client, key: str) -> tuple[int, int]:
    """How many items of a batch were acked, and failed, once it is complete."""
    (batch,) = client.batches(key=key)
    result = client.batch(batch.id).wait(120)
    return result.acked, result.failed


def test_sqs(reader: Reader, lastbit: Client, moto: Moto) -> None:
    reader.variables |= {**CREDENTIALS, "AWS_ENDPOINT_URL": moto.url, "LASTBIT_URL": lastbit.url}
    reader.follow(blocks("docs/sqs.md"), CONSUMERS)
    client = moto.client()
    letters_url = client.get_queue_url(QueueName="pictures-dead")["QueueUrl"]
    sqs.fan_out(client, letters_url, ["picture 99"], lastbit=lastbit, key="dead")
    assert complete(lastbit, "dead") == (0, 1)
    reader.stop()
    assert "gave up picture 99\n" in reader.outputs()


def test_rabbitmq(reader: Reader, lastbit: Client, rabbitmq_url: str) -> None:
    reader.addresses["amqp://guest:guest@127.0.0.1:5672/%2F"] = rabbitmq_url
    reader.variables["LASTBIT_URL"] = lastbit.url
    reader.follow(blocks("docs/rabbitmq.md"), CONSUMERS)
    rabbitmq.fan_out(rabbitmq_url, "pictures.dead", ["picture 99"], lastbit=lastbit, key="dead")
    assert complete(lastbit, "dead") == (0, 1)
    reader.stop()
    assert "gave up b'picture 99'\n" in reader.outputs()


def test_kafka(reader: Reader, lastbit: Client) -> None:
    """On the mock cluster of the client, in this process."""
    cluster = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = cluster.list_topics(timeout=30).brokers.values()
    kafka.fan_out(cluster, "pictures.dead", ["picture 99"], lastbit=lastbit, key="dead")
    reader.addresses["127.0.0.1:9092"] = f"{broker.host}:{broker.port}"
    reader.variables["LASTBIT_URL"] = lastbit.url
    reader.follow(blocks("docs/kafka.md"), CONSUMERS)
    assert complete(lastbit, "dead") == (0, 1)
    reader.stop()


def test_aws_lambda(reader: Reader, lastbit: Client, moto: Moto) -> None:
    """The function is called with an event, as Lambda does."""
    moto.client().create_queue(QueueName="pictures")
    reader.variables |= {**CREDENTIALS, "AWS_ENDPOINT_URL": moto.url, "LASTBIT_URL": lastbit.url}
    reader.follow(blocks("docs/aws-lambda.md"))
    batch = lastbit.open(key="called", items=2, sealed=True)
    records = [
        {
            "messageId": item,
            "body": body,
            "attributes": {"ApproximateReceiveCount": "1"},
            "messageAttributes": {"lastbit-item": {"stringValue": item, "dataType": "String"}},
            "eventSource": "aws:sqs",
        }
        for item, body in zip(batch.ids, ("picture 12", "picture 13"), strict=True)
    ]
    (reader.folder / "event.json").write_text(json.dumps({"Records": records}))
    call = "import json, function; print(function.lambda_handler(json.load(open('event.json')), None))"
    assert reader.run(f'python -c "{call}"') == "called is complete\n{'batchItemFailures': []}\n"
    assert complete(lastbit, "called") == (1, 1)


def test_spark(reader: Reader, lastbit: Client) -> None:
    """The job that is run again."""
    need("default-jre-headless", shutil.which("java") is not None)
    reader.variables["LASTBIT_URL"] = lastbit.url
    reader.follow(blocks("docs/spark.md")[:6])
    assert complete(lastbit, "pictures-spark") == (999, 1)


def test_airflow(reader: Reader, lastbit: Client, wheels: Path) -> None:
    """Airflow's own processes run the DAG of the page. Its sensor waits in the triggerer for a batch that is opened
    later, and that its key finds."""
    port = free_port()
    home = reader.folder / "airflow"
    reader.variables |= {
        **registry(wheels, "airflow.txt"),
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{port}",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(reader.folder),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
        "AIRFLOW_CONN_LASTBIT_DEFAULT": lastbit.url.replace("http://", "lastbit://"),
    }
    reader.follow(blocks("docs/airflow.md"))
    process = reader.start("airflow standalone")

    def found(query: str) -> list[tuple[str]]:
        """Rows of Airflow's database, once it has any."""
        assert process.poll() is None, reader.outputs()
        with (
            contextlib.suppress(sqlite3.OperationalError),  # the table is yet to come
            contextlib.closing(sqlite3.connect(f"file:{home}/airflow.db?mode=ro", uri=True)) as database,
        ):
            return database.execute(query).fetchall()
        return []

    deferred = (
        "SELECT logical_date FROM dag_run JOIN task_instance USING (run_id) WHERE task_instance.state = 'deferred'"
    )
    wait_until(lambda: found(deferred), "the sensor waits", 600)
    ((moment,),) = found(deferred)
    batch = lastbit.open(key=f"catalog-{moment[:10]}", items=1, sealed=True)
    lastbit.ack(batch.ids)
    wait_until(lambda: found("SELECT run_id FROM dag_run WHERE state = 'success'"), "the run succeeds", 300)
