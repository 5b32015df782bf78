"""Everything that the documentation names exists: targets, commands, modules, settings, links; and its snippets run."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import sqlalchemy
import yaml
from standardwebhooks import WebhookVerificationError

from core import feed
from core.settings import Settings
from core.webhooks import message, subscriptions
from examples.demo import __main__ as demo
from lastbit.cli import cli
from tests.spark.conftest import LOOPBACK
from tests.support.postgresql import PostgreSQL
from tests.support.servers import ROOT, MariaDB, run_module, running_service

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
README = ROOT / "README.md"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def code(page: Path) -> Iterator[str]:
    """All code of a page: each line of its fenced blocks, and the text between backticks."""
    text = page.read_text()
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def commands_of(page: Path, program: str) -> Iterator[list[str]]:
    """The words after `program`, wherever code starts with it."""
    for line in code(page):
        command = line.split("  #")[0].split(" | ")[-1].strip()
        if command.startswith(program + " "):
            yield shlex.split(command.removeprefix(program))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_make_targets_exist(page: Path) -> None:
    """Every `make target` in code."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands_of(page, "make"):
        words = words[2:] if words[0] == "-C" else words
        target_names = [word for word in words if "=" not in word and not word.startswith("#")]
        assert target_names[0] in targets, words


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_modules_exist(page: Path) -> None:
    """Every `python -m module` in code, with its flags."""
    for line in code(page):
        for module, rest in re.findall(r"python -m ([\w.]+)([^|#;&>]*)", line):
            assert importlib.util.find_spec(module) is not None, line
            flags = re.findall(r"--[a-z-]+", rest)
            if module in ("api", "jobs.janitor", "jobs.dispatcher", "examples.demo") and flags:
                assert set(flags) <= set(re.findall(r"--[a-z-]+", help_of(module))), line
        for job, rest in re.findall(r"lastbit-server(?: (janitor|dispatcher))?\b([^|#;&>`]*)", line):
            flags = set(re.findall(r"--[a-z-]+", rest))
            assert not flags or flags <= set(re.findall(r"--[a-z-]+", help_of(f"jobs.{job}" if job else "api"))), line


@functools.cache
def help_of(module: str) -> str:
    return run_module(module, "--help").stdout


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist_with_their_options(page: Path) -> None:
    """Every `lastbit command --option` in code."""
    for words in commands_of(page, "lastbit"):
        if words[0] in ("--help", "--version", "="):  # or an assignment in Python
            continue
        while words[0].startswith("--"):  # --url URL before the command's name
            words = words[1 if words[0] == "--json" else 2 :]
        command = cli.commands.get(words[0])
        if isinstance(command, click.Group) and len(words) > 1:
            words = words[1:]
            command = command.commands.get(words[0])
        assert command is not None, words
        valid_options = {name for option in command.params if isinstance(option, click.Option) for name in option.opts}
        used_options = {word.split("=")[0] for word in words[1:] if word.startswith("--")}
        assert used_options <= valid_options, words


def test_the_demos_suggestions_exist() -> None:
    """Its commands and the files that it names."""
    text = demo.NEXT
    assert re.findall(r"\.venv/bin/lastbit (\w+)", text) == ["open", "ack"]
    for name in re.findall(r"lastbit (\w+)|· (\w+) 1", text):
        assert "".join(name) in cli.commands
    for path in ("README.md", "examples/demo/"):
        assert path in text
        assert (ROOT / path).exists()


def test_every_command_is_documented() -> None:
    """The options are in its help, of which docs/reference/commands.md is made."""
    page = (ROOT / "docs/cli.md").read_text()
    for name, command in cli.commands.items():
        assert f"lastbit {name}" in page, name
        subcommands = command.commands if isinstance(command, click.Group) else {}
        for option in [option for subcommand in (command, *subcommands.values()) for option in subcommand.params]:
            assert not isinstance(option, click.Option) or option.help, f"{name} {option.name}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_have_targets(page: Path) -> None:
    """Linked files and headings exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_of_the_project_exist(page: Path) -> None:
    """Every path with a slash in backticks, from the root or next to the page."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"dist"}
    for line in re.findall(r"`([\w./-]+)`", page.read_text()):
        if line.split("/")[0] in tops and "/" in line:
            assert (ROOT / line).exists(), line


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_named_tests_exist(page: Path) -> None:
    """Tests that a page names for its promises exist."""
    defined = {name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert set(re.findall(r"`(test_\w+)`", page.read_text())) <= defined


def test_every_decision_and_page_is_linked_from_the_index() -> None:
    """Every page must be reachable."""
    index = (ROOT / "docs/index.md").read_text() + (ROOT / "docs/decisions.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "index.md" or f"]({name})" in index, name


def test_every_setting_is_documented_with_its_default() -> None:
    """And no others."""
    page = (ROOT / "docs/settings.md").read_text()
    rows = dict(re.findall(r"^\| `LASTBIT_(\w+)` \| `([^`]+)`", page, re.MULTILINE))
    assert rows == {name.upper(): str(field.default) for name, field in Settings.model_fields.items()}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_variables_are_settings(page: Path) -> None:
    """A misspelt LASTBIT_… would be ignored silently."""
    names = {f"LASTBIT_{name.upper()}" for name in Settings.model_fields}
    names |= {
        "LASTBIT_URL",
        "LASTBIT_TOKEN",
        "LASTBIT_PROFILE",
        "LASTBIT_SOAK",
        "LASTBIT_DATABASE_PASSWORD",
        "LASTBIT_TEST_POSTGRESQL_BIN",
    }
    assert set(re.findall(r"\bLASTBIT_[A-Z_]*[A-Z]", page.read_text())) <= names


def test_every_route_is_documented() -> None:
    """docs/http.md and docs/http/ name each path of openapi.yaml with its method."""
    page = "\n".join(path.read_text() for path in [ROOT / "docs/http.md", *ROOT.glob("docs/http/*.md")])
    for path, methods in yaml.safe_load((ROOT / "openapi.yaml").read_text())["paths"].items():
        for method in methods:
            assert f"`{method.upper()} {path}" in page, f"{method} {path}"


def test_every_problem_code_is_documented() -> None:
    """With its status."""
    from api.problems import STATUS

    page = (ROOT / "docs/http.md").read_text()
    for problem, status in STATUS.items():
        assert re.search(rf"^\| {status} \| .*`{problem}`", page, re.MULTILINE), problem


def test_every_event_of_the_log_is_documented() -> None:
    """And no others."""
    page = (ROOT / "docs/logs.md").read_text()
    names = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    documented_names = {name for cell in names for name in re.findall(r"`(\w+)`", cell)}
    sources = [path.read_text() for folder in ("core", "api", "senders") for path in (ROOT / folder).rglob("*.py")]
    assert documented_names == {
        each for text in sources for each in re.findall(r"\b_?log(?:\.\w+)?\([^\"()]*\"(\w+)\"", text)
    }


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_snippets_compile(page: Path) -> None:
    """Python as Python, JSON as JSON, YAML as YAML."""
    for snippet in blocks(page, "python"):
        compile(snippet, str(page), "exec", flags=0x2000)  # top-level await is allowed
    for snippet in blocks(page, "json"):
        json.loads(snippet)
    for snippet in blocks(page, "yaml"):
        yaml.safe_load(snippet)


def run_script(path: Path, script: str, url: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path.write_text(script)
    environment = {**os.environ, "LASTBIT_URL": url, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, str(path)], env=environment, cwd=path.parent, capture_output=True, text=True, timeout=280
    )


@pytest.fixture
def fresh_url(sqlite_url: str) -> Iterator[str]:
    """A service whose first batch will be batch 1, as in the README."""
    with running_service(sqlite_url) as service:
        yield service.url


def test_the_readmes_program_prints_the_shown_output(fresh_url: str, tmp_path: Path) -> None:
    """And that of the tour, with a service without batches."""
    for page in (README, ROOT / "docs/tour.md"):
        ((program,), (output,)) = blocks(page, "python"), blocks(page, "text")
        process = run_script(tmp_path / "program.py", program, fresh_url)
        assert process.returncode == 0, process.stderr
        assert process.stdout == output


def test_the_page_on_the_client_runs(service_url: str, tmp_path: Path) -> None:
    """docs/sdk.md, as one script."""
    snippets = blocks(ROOT / "docs/sdk.md", "python")
    process = run_script(tmp_path / "sdk.py", "\n".join(snippets), service_url)
    assert process.returncode == 0, process.stderr


CONSUMED = """
class Enough(Exception): pass
acted, positions = [], {}
def act(event):
    acted.append(event.id)
    if event.key == "the last":
        raise Enough
with Client() as client:
    client.ack(client.open(key="the last", items=1, sealed=True).ids)
    for _ in range(2):
        try:
            catch_up(client, positions, act)
        except Enough:
            pass
# What was not done with came again, and none of what was before it.
assert acted == ["batch:1:succeeded", "batch:2:succeeded", "batch:2:succeeded"], acted
"""


SHARED = """
assert sorted(record["n"] for record in handled) == list(range(1000))
for n in range(100):
    of_a_key = [record["n"] for record in handled if record["key"] == f"order-{n}"]
    assert of_a_key == sorted(of_a_key)
found = client.groups.get("orders")
assert [position.floor for position in found.positions] == [len(topic[number]) - 1 for number in range(64)]
assert found.workers == ()
"""

TALLIED = """
from types import SimpleNamespace
def message(offset, **fields):
    return SimpleNamespace(offset=offset, headers={}, **fields)
reports = [message(offset, parts=["left", "right"]) for offset in range(3)]
made = []
for _ in range(2):  # it publishes all of it twice
    for each in reports:
        republish(each, 0, lambda part, headers: made.append(headers))
assert len({SourceChain.decode(headers[SourceChain.HEADER]).source for headers in made}) == 6
floors, lanes = [], []
messages = [message(n, robot="robot-8", screws=1) for n in range(6)]
for _ in range(2):
    count(0, messages, floors.append)
with Client() as client:
    tally = client.tally("screws")
    assert tally.value("robot-8") == 6
    assert apply_range(tally, {"robot-8": 2}, None, "7") == "5"
    assert apply_range(tally, {"robot-8": 2}, "5", "7") == "7"
    assert tally.value("robot-8") == 8
    loosened = [(n, message(n, robot="robot-9", screws=n)) for n in range(50)]
    for _ in range(2):
        count_in_lanes(client, loosened, lanes.append)
    assert tally.value("robot-9") == sum(range(50))
    apply_twice(tally)
    assert tally.value("robot-7") == 3
assert floors[-1] == 5
assert lanes[-1] == 49
"""

WORKED = """
import threading
from lastbit.processes import ProcessWorker
from lastbit.models import Event
client = Client()
ORDERS_BY_PAYMENT = {"p1": "o1"}
workers = [ProcessWorker(each, client, "w1", partitions=2) for each in (ship_order, pack_order, ship_in_time)]
threads = [threading.Thread(target=worker.run) for worker in workers]
for thread in threads:
    thread.start()
client.open(key="o1", sealed=True, labels={"order": "o1"})
client.append([
    {"id": "c1", "type": "card.charged", "data": {"order": "o1", "payment": "p1"}},
    {"id": "r1", "type": "item.reserved", "data": {"order": "o1", "payload": {"order": "o1"}}},
])
follow = client.processes.follow()
found = {(command.process, command.type, command.instance) for command in (next(follow) for _ in range(3))}
assert found == {(name, name[:4], "o1") for name in ("ship-order", "pack-order", "ship-in-time")}, found
time_out = Event(1, "t1", "timer.ship-in-time", None, "o2", {"timer": "late"}, None)
assert ship_in_time(["card.charged"], time_out) == Finish([Command("refund")])
for worker in workers:
    worker.stop()
for thread in threads:
    thread.join()
"""


TOLD = """
import threading
from types import SimpleNamespace
from lastbit.processes import ProcessWorker

# A stream that fails in its middle, and is run again.
log = [(offset, {"order": offset % 5, "n": offset}) for offset in range(200)]
store, handled, failures = {}, [], []
def handle(event):
    if event["n"] == 101 and not failures:
        failures.append(event)
        raise ConnectionError
    handled.append(event)
for _ in range(2):
    try:
        work(log, store, handle)
    except Exception as error:
        assert isinstance(error.__cause__, ConnectionError), error
assert failures
for order in range(5):
    assert [event["n"] for event in handled if event["order"] == order] == list(range(order, 200, 5))

# Two workers, of which one record fails each time; the others are handled once.
shared, dead, changed = [], [], threading.Condition()
def read(partition, offset):
    yield from ((n, {"order": partition, "n": n}) for n in range(offset, 3))
    while True:
        yield None
def handle_shared(event):
    if (event["order"], event["n"]) == (7, 1):
        raise ValueError
    with changed:
        shared.append((event["order"], event["n"]))
        changed.notify_all()
def bury(event, error):
    with changed:
        dead.append(event["order"])
        changed.notify_all()
quick = Backoff(first=0.01, tries=5)
Backoff = lambda first, tries: quick
for name in ("w1", "w2"):
    threading.Thread(target=share, args=(name, read, handle_shared, bury), daemon=True).start()
with changed:
    changed.wait_for(lambda: dead and len(set(shared)) == 64 * 3 - 1, 60)
assert set(shared) == {(order, n) for order in range(64) for n in range(3)} - {(7, 1)}
assert set(dead) == {7}

# A republisher that publishes everything twice.
first = [SourceChain.decode(None).hop("reports", 0, offset) for offset in range(6)]
messages = [
    SimpleNamespace(offset=offset, robot="r", screws=2, headers={SourceChain.HEADER: chain.encode()})
    for offset, chain in enumerate(first * 2)
]
count(0, messages, lambda floor: None)
with Client() as client:
    assert client.tally("screws").value("r") == 12

    client.open(key="o1", sealed=True)
    for copy in range(2):
        client.append([
            {"id": f"c{copy}", "type": "card.charged", "data": {"order": "o1"}},
            {"id": f"r{copy}", "type": "item.reserved", "data": {"payload": {"order": "o1"}}},
        ])
    worker = ProcessWorker(ship, client, "w1", partitions=2)
    thread = threading.Thread(target=worker.run)
    thread.start()
    command = next(client.processes.follow())
    assert (command.process, command.type, command.instance) == ("ship", "ship", "o1")
    worker.stop()
    thread.join()
"""


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("concepts", ""),
        ("events", CONSUMED),
        ("consumer-groups", SHARED),
        ("tallies", TALLIED),
        ("processes", WORKED),
        ("stories", TOLD),
        ("handlers", ""),
        ("patterns", ""),
        ("without-a-service", ""),
        ("performance", ""),
    ],
)
def test_the_snippets_of_a_page_run(name: str, after: str, fresh_url: str, tmp_path: Path) -> None:
    """As one script, with the output that the page shows; the definitions behave as the page says."""
    page = ROOT / f"docs/{name}.md"
    process = run_script(tmp_path / f"{name}.py", "\n".join([*blocks(page, "python"), after]), fresh_url)
    assert process.returncode == 0, process.stderr
    if name in ("events", "consumer-groups", "handlers", "patterns"):
        outputs = re.findall(r"^```python\n[^`]*^```\n\n```text\n([^`]*)^```", page.read_text(), re.MULTILINE)
        assert outputs
        assert process.stdout == "".join(outputs)


@pytest.mark.mariadb
def test_the_page_on_effects_runs_on_each_database(database_url: str, tmp_path: Path) -> None:
    """docs/exactly-once.md: the program as it is, and with the page's changes for a server; then what follows it."""
    program, postgresql, mariadb, transactions, handler = blocks(ROOT / "docs/exactly-once.md", "python")
    (output,) = blocks(ROOT / "docs/exactly-once.md", "text")
    changes = {"postgresql": postgresql, "mysql": mariadb, "mariadb": mariadb}
    url = sqlalchemy.make_url(database_url)
    program, _, _ = program.rpartition("lastbit.close()")
    for line in changes.get(url.get_backend_name(), "").splitlines():
        variable = line.split(" = ")[0]
        program, count = re.subn(rf"^{variable} = .*$", line, program, flags=re.MULTILINE)
        assert count == 1, line
    address = url.set(drivername="x").render_as_string(hide_password=False).removeprefix("x:")
    program = program.replace("//app@db/app", address)
    process = run_script(
        tmp_path / "shop.py", f"{program}\n{transactions}\n{handler}\nlastbit.close()\n", "http://127.0.0.1:9"
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == output


def test_a_webhook_has_the_event_of_the_feed() -> None:
    """docs/webhooks.md shows the same event as docs/events.md."""
    (received,) = map(json.loads, blocks(ROOT / "docs/webhooks.md", "json"))
    assert received["data"] == json.loads(blocks(ROOT / "docs/events.md", "json")[0])


def test_the_receiver_acts_once_on_signed_events(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/webhooks.md: a signed event is verified and acted on once; a forged one is refused."""
    secret = subscriptions.new_secret()
    now = datetime.now(UTC)
    body = message.body(feed.Event(1, "batch:7:completed", "batch.completed", 7, "catalog-42", None, now))
    headers = message.headers([secret], "batch:7:completed", now, body)
    namespace: dict[str, Any] = {}
    (snippet,) = blocks(ROOT / "docs/webhooks.md", "python")
    exec(snippet, namespace)
    for _ in range(2):
        namespace["receive"](secret, headers, body)
    assert capsys.readouterr().out == "publish catalog-42\n"
    for forgery in ((secret, headers, body.replace(b"42", b"43")), (subscriptions.new_secret(), headers, body)):
        with pytest.raises(WebhookVerificationError):
            namespace["receive"](*forgery)


@pytest.mark.nightly
def test_the_spark_snippet_acks_a_dataframe(service_url: str, tmp_path: Path) -> None:
    """Every row twice, in several partitions, over two groups: each item counts once. Rows without an id are left
    out."""
    if shutil.which("java") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("a Java runtime is not installed")
    (snippet,) = [block for block in blocks(ROOT / "docs/spark.md", "python") if "urlopen" in block]
    batch_ = httpx.post(f"{service_url}/v1/batches", json={"items": 10_000, "sealed": True}).json()
    setup = f"""
import os
from pyspark.sql import SparkSession
URL = {service_url!r}
spark = SparkSession.builder.master("local[2]").config(map={LOOPBACK!r}).getOrCreate()
numbers = spark.range(10_000).unionAll(spark.range(10_000)).repartition(4)
good = numbers.selectExpr("concat('{batch_["id"]}:', id div 8192, ':', id % 8192) AS item_id")
bad = [None, "", "7", "7:0", "7:0:3:4", "7:0: 3", "7:0:03", "7:0:x", "7:0:3\\n", "7:0:99999", "9" * 20 + ":0:0"]
done = good.unionAll(spark.createDataFrame([(text,) for text in bad], "item_id string"))
"""
    process = run_script(tmp_path / "spark.py", setup + snippet, service_url)
    assert process.returncode == 0, process.stderr[-3000:]
    batch = httpx.get(f"{service_url}/v1/batches/{batch_['id']}").json()
    assert (batch["state"], batch["acked"]) == ("complete", 10_000)
    assert httpx.get(f"{service_url}/v1/batches/{batch_['id']}/verify").json()["ok"]


@pytest.mark.nightly
def test_the_page_on_spark_runs(service_url: str, tmp_path: Path) -> None:
    """docs/spark.md, as one script, with the output that it shows. Its first program runs three times."""
    if shutil.which("java") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("a Java runtime is not installed")
    page = ROOT / "docs/spark.md"
    # All but the part that needs no package, which another test runs.
    first, *others = [block for block in blocks(page, "python") if "urlopen" not in block]
    options = [word for name, value in LOOPBACK.items() for word in ("--conf", f"{name}={value}")]
    process = run_script(
        tmp_path / "page.py",
        "\n".join([first, first, "Path('42.jpg').touch()", first, *others]),
        service_url,
        PYSPARK_SUBMIT_ARGS=shlex.join([*options, "pyspark-shell"]),
        PYSPARK_PYTHON=sys.executable,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout == "".join(blocks(page, "text"))


def test_the_documented_grants_suffice(mariadb: MariaDB) -> None:
    """The SQL of docs/database.md: one account migrates, the other one serves and runs the jobs, neither is root."""
    _, _, script, *_ = blocks(ROOT / "docs/database.md", "sql")
    with mariadb.connect() as connection, connection.cursor() as cursor:
        for statement in script.split(";"):
            if statement.strip():
                cursor.execute(statement)
    suffices("mysql", mariadb.port)


def test_the_documented_grants_suffice_on_postgresql(postgresql: PostgreSQL) -> None:
    creation, grants, *_ = blocks(ROOT / "docs/database.md", "sql")
    for script, database in ((creation, "postgres"), (grants, "lastbit")):
        with contextlib.closing(postgresql.connect(database)) as connection:
            for statement in script.strip().removesuffix(";").split(";"):
                connection.execute(statement.encode())
    suffices("postgresql", postgresql.port)


def test_the_documented_grants_for_a_schema_beside_others_suffice(
    mortal_postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = blocks(ROOT / "docs/database.md", "sql")[-1]
    mortal_postgresql.new_database("app")
    with contextlib.closing(mortal_postgresql.connect("app")) as connection:
        for statement in ("CREATE ROLE app LOGIN", "CREATE ROLE lastbit_migrate LOGIN", *script.split(";")):
            connection.execute(statement.encode())
    monkeypatch.setenv("LASTBIT_DATABASE_SCHEMA", "lastbit")
    suffices("postgresql", mortal_postgresql.port, name="app")


def suffices(scheme: str, port: int, name: str = "lastbit") -> None:
    """The two accounts of the page can do their work, in the database of this name."""
    address = f"127.0.0.1:{port}/{name}"
    serving_url = f"{scheme}://{name}:change-me@{address}"
    migration = run_module("api", "migrate", "--database-url", f"{scheme}://lastbit_migrate:change-me@{address}")
    assert migration.returncode == 0, migration.stderr
    checked = run_module("api", "check", "--json", "--database-url", serving_url)
    unfit = [finding for finding in json.loads(checked.stdout)["findings"] if finding["verdict"] == "broken"]
    assert unfit == []
    with running_service(serving_url) as service, httpx.Client(base_url=service.url) as client:
        batch = client.post("/v1/batches", json={"items": 3, "sealed": True}).json()["id"]
        assert client.post("/v1/failures", json={"items": [f"{batch}:0:1"], "reason": "x"}).status_code == 200
        answer = client.post("/v1/acks", json={"items": [f"{batch}:0:0", f"{batch}:0:1", f"{batch}:0:2"]}).json()
        assert answer["completed"][0]["newly_succeeded"]
        assert client.get(f"/v1/batches/{batch}/verify").json()["ok"]
        assert client.delete(f"/v1/batches/{batch}").status_code == 204
    janitor_run = run_module("jobs.janitor", "--database-url", serving_url)
    assert janitor_run.returncode == 0, janitor_run.stderr


def test_the_site_builds_and_has_every_page(tmp_path: Path) -> None:
    """In strict mode: a link or an anchor without a target is an error. Nothing is loaded from other hosts."""
    process = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    listing = (tmp_path / "llms.txt").read_text()
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in ROOT.glob("docs/**/*.md")}
    listed_pages = {path.removesuffix("/") for path in re.findall(r"\]\(([^)]+)\)", listing)}
    assert listed_pages == pages - {"index"} | {"."}
    for page in pages - {"index"}:
        assert (tmp_path / page / "index.html").exists()
    commands = (tmp_path / "reference/commands/index.html").read_text()
    assert all(f"lastbit {name}" in commands for name in cli.commands)
    assert "Examples:" in commands
    assert "lastbit seal catalog-42" in commands
    assert "idempotency_key" in (tmp_path / "reference/python/index.html").read_text()
    tour = (tmp_path / "tour/index.html").read_text()
    assert re.findall(r"<script src=\"[^\"]+\.js\"", tour)
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]+", tour)
