"""Fixtures: fresh databases on SQLite, MariaDB, PostgreSQL and OceanBase, and the service as a real process."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
import structlog

from core.commits.combiner import Inline
from core.service import Service
from core.storage.database import Database
from tests.support import profiles, templates
from tests.support.aws import Moto, moto_server
from tests.support.brokers import RabbitMQ, RedisServer, redis_server
from tests.support.galera import Cluster
from tests.support.nursery import Nursery
from tests.support.oceanbase import LEFT_OUT, OceanBase, running_oceanbase
from tests.support.oceanbase import program as seekdb
from tests.support.postgresql import PostgreSQL, programs, running_postgresql
from tests.support.receivers import Receiver, receiving
from tests.support.servers import MariaDB, ServiceProcess, running_service, sqlite_file

profiles.load()


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[Nursery]:
    """Starts services and commands at once: most of a second of their start is imports. Services with several workers
    are started in a new interpreter, as users start them."""
    ServiceProcess.nursery = running = Nursery()
    yield running
    ServiceProcess.nursery = None
    running.close()


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Restore the log configuration after each test: a command called in this process directs its logs to the test's
    own standard error."""
    yield
    structlog.reset_defaults()


def need(package: str, available: bool) -> None:
    """A missing package fails the test in CI and skips it elsewhere."""
    if not available:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{package} is not installed")


@contextlib.contextmanager
def running_mariadb(
    *, folder: Path | None = None, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[MariaDB]:
    server = MariaDB(folder=folder, options=options, environment=environment)
    try:
        need("mariadb-server", server.available)
        server.install()
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """A private MariaDB server with default settings."""
    with running_mariadb() as server:
        yield server


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A private PostgreSQL server with default settings."""
    need("postgresql", programs() is not None)
    with running_postgresql() as server:
        yield server


@pytest.fixture
def mortal_postgresql() -> Iterator[PostgreSQL]:
    """A server for this test only, which may be killed."""
    need("postgresql", programs() is not None)
    with running_postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def oceanbase() -> Iterator[OceanBase]:
    """A private OceanBase server: seekdb, with default settings."""
    need("seekdb (`make .venv-seekdb/.ready`)", seekdb() is not None)
    with running_oceanbase() as server:
        yield server


Server = MariaDB | PostgreSQL


@contextlib.contextmanager
def running_server(
    *, folder: Path | None = None, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A private server of the kind that tests use which run on one server."""
    if server_kind() == "postgresql":
        need("postgresql", programs() is not None)
        with running_postgresql(folder=folder, options=options, environment=environment) as postgresql_server:
            yield postgresql_server
    elif server_kind() == "oceanbase":
        need("seekdb (`make .venv-seekdb/.ready`)", seekdb() is not None)
        with running_oceanbase(folder=folder, options=options, environment=environment) as oceanbase_server:
            yield oceanbase_server
    else:
        with running_mariadb(folder=folder, options=options, environment=environment) as mariadb_server:
            yield mariadb_server


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    """The server of `server_url`."""
    running: Server = request.getfixturevalue(server_kind())
    return running


@pytest.fixture
def mortal_server() -> Iterator[Server]:
    """A server for this test only, which may be killed."""
    with running_server() as running:
        yield running


@pytest.fixture(scope="session")
def galera() -> Iterator[Cluster]:
    """Three private nodes. They take ten seconds to start, so their tests set `xdist_group("galera")`."""
    cluster = Cluster()
    try:
        need("galera-4", cluster.available)
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """A private RabbitMQ node. It takes ten seconds to start, so its tests set `xdist_group("rabbitmq")`."""
    server = RabbitMQ()
    try:
        need("rabbitmq-server", server.available)
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """A private Redis."""
    need("redis-server", shutil.which("redis-server") is not None)
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    """SQS, by moto's server."""
    with moto_server() as server:
        yield server


@pytest.fixture
def sqlite_url() -> Iterator[str]:
    """The URL of an empty SQLite file."""
    with sqlite_file() as url:
        yield url


@pytest.fixture
def mariadb_url(mariadb: MariaDB) -> Iterator[str]:
    """The URL of an empty database on MariaDB."""
    url = mariadb.new_database()
    yield url
    mariadb.drop_database(url)


@pytest.fixture
def postgresql_url(postgresql: PostgreSQL) -> Iterator[str]:
    """The URL of an empty database on PostgreSQL."""
    url = postgresql.new_database()
    yield url
    postgresql.drop_database(url)


@pytest.fixture
def oceanbase_url(oceanbase: OceanBase) -> str:
    """The URL of an empty database on OceanBase."""
    return oceanbase.new_database()


KINDS: Final = os.environ.get("LASTBIT_TEST_DATABASES", "sqlite,mariadb").split(",")
"""The databases on which tests run that run on several; `make test-postgresql` and `make test-oceanbase` set it."""
KINDS_OF_CONTRACT: Final = [
    kind if kind == "sqlite" else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS
]
"""The databases of tests of the HTTP contract. The tests of storage and of the guarantees show that databases don't
differ; each night the contract is tried on all."""
_ON_SERVERS: Final = {"server_url", "server", "mortal_server", "server_on_a_small_disk"}
"""Fixtures of tests that use the only database, if it isn't MariaDB."""


def server_kind() -> str:
    """The kind of server for tests that run on one."""
    return next(kind for kind in KINDS if kind != "sqlite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """If PostgreSQL or OceanBase is the only database, run only the tests that use it."""
    if len(KINDS) > 1 or KINDS[0] not in ("postgresql", "oceanbase"):
        return
    kind = KINDS[0]
    fixtures = _ON_SERVERS | {kind, f"{kind}_url", f"mortal_{kind}"}

    def uses_it(item: pytest.Item) -> bool:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        # Only strings are compared: pika's properties can't be compared with one.
        kinds = {value for value in values if isinstance(value, str)}
        return kind in kinds or not fixtures.isdisjoint(getattr(item, "fixturenames", ()))

    config.hook.pytest_deselected(items=[item for item in items if not uses_it(item)])
    items[:] = [item for item in items if uses_it(item)]
    for item in items if kind == "oceanbase" else ():
        if reason := LEFT_OUT.get(getattr(item, "originalname", item.name)):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str:
    """An empty database; the test runs once on each kind."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def server_url(request: pytest.FixtureRequest) -> str:
    """An empty database on a server: the one on which tests run that need concurrent transactions."""
    url: str = request.getfixturevalue(f"{server_kind()}_url")
    return url


@pytest.fixture
def server_database(server_url: str) -> Iterator[Database]:
    with Database(server_url) as database:
        templates.migrate(database)
        yield database


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A database with the current schema, on each kind."""
    with Database(database_url) as database:
        templates.migrate(database)
        yield database


@pytest.fixture
def mariadb_database(mariadb_url: str) -> Iterator[Database]:
    with Database(mariadb_url) as database:
        templates.migrate(database)
        yield database


@pytest.fixture
def service(database: Database) -> Iterator[Service]:
    """The core on each kind of database; each call is its own transaction."""
    service_ = Service(database, combiner=Inline)
    yield service_
    service_.stop()


@pytest.fixture(scope="module")
def service_database() -> Iterator[str]:
    """The URL of the SQLite file of `service_url`."""
    with sqlite_file() as url:
        yield url


@pytest.fixture(scope="module")
def service_url(service_database: str) -> Iterator[str]:
    """A real service on a new SQLite file, shared by the tests of a module."""
    with running_service(service_database) as running:
        yield running.url


@pytest.fixture
def api_url(database_url: str) -> Iterator[str]:
    """A real service on a new database of each kind."""
    with Database(database_url) as database:
        templates.migrate(database)
    with running_service(database_url) as running:
        yield running.url


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver of webhooks."""
    with receiving() as running:
        yield running
