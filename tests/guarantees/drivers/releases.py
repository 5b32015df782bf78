"""Several releases of the service on one database: an earlier commit of this repository, this checkout, and a simulated
later release; and load that sends requests to all of them, on the same batches."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from core.commits.combiner import Inline
from core.service import Service
from core.storage import schema
from core.storage.database import Database
from tests.guarantees.drivers.load import GROUP, SHARED, Load, check
from tests.guarantees.models.service import events_of
from tests.support.servers import ROOT, ServiceProcess

EARLIER = "f9b71277a7925b588ba7a9318145e12247eb1976"
"""The last commit of this repository with the schema of revision 0016, the oldest that can be upgraded."""
CODE = ("api", "core", "jobs", "lastbit", "migrations", "senders")


@dataclass(frozen=True)
class Release:
    """A copy of the code in its own folder, run by this environment's Python."""

    root: Path

    def service(self, database_url: str) -> ServiceProcess:
        environment = {"LASTBIT_JANITOR_EVERY": "1", **self.environment}
        return ServiceProcess(database_url, root=self.root, environment=environment)

    @contextlib.contextmanager
    def running(self, database_url: str) -> Iterator[ServiceProcess]:
        service = self.service(database_url).start()
        try:
            yield service
        finally:
            service.stop(9)

    def migration(self, database_url: str) -> subprocess.Popen[bytes]:
        """Start `python -m api migrate` without waiting for it."""
        command = [sys.executable, "-m", "api", "migrate", "--database-url", database_url]
        return subprocess.Popen(command, cwd=self.root, env=self.environment)

    def migrates(self, database_url: str) -> None:
        with self.migration(database_url) as process:
            assert process.wait(60) == 0

    def works_on(self, database_url: str) -> None:
        """Run one pass of its janitor and its dispatcher; neither may find anything wrong."""
        for_both = f"['--database-url', {database_url!r}]"
        script = (
            "from jobs import dispatcher, janitor\n"
            f"assert (janitor.main({for_both}), dispatcher.main(['--once', *{for_both}])) == (0, 0)"
        )
        process = subprocess.run([sys.executable, "-c", script], cwd=self.root, env=self.environment)
        assert process.returncode == 0

    @property
    def environment(self) -> dict[str, str]:
        """For a Python that imports this copy."""
        return {**os.environ, "PYTHONPATH": str(self.root)}


THIS = Release(ROOT)


def earlier(folder: Path) -> Release:
    """The earlier release, from the git history. A checkout without that history fails in CI and is skipped
    elsewhere."""
    archive = folder / "earlier.tar"
    process = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--output", str(archive), EARLIER], capture_output=True, text=True
    )
    if process.returncode:
        words = f"this checkout has no history that reaches back to {EARLIER[:7]}: {process.stderr.strip()}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(words)
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "earlier", filter="data")
    return Release(folder / "earlier")


def later(folder: Path, *statements: str) -> Release:
    """This checkout with one more migration, revision 9999, that executes the statements. The tables of a new database
    are those of this checkout, so the way down is empty."""
    for name in CODE:
        shutil.copytree(ROOT / name, folder / name)  # including the compiled files
    newest = schema.newest()
    (folder / "migrations/versions/v9999_later.py").write_text(
        f"from alembic import op\n\nrevision = '9999'\ndown_revision = {newest!r}\n\n\n"
        "def downgrade() -> None:\n    pass\n\n\n"
        "def upgrade() -> None:\n" + "".join(f"    op.execute({statement!r})\n" for statement in statements)
    )
    return Release(folder)


class Everything(Load):
    """Every verb, on batches that all services share; each request goes to a random service. All batches end succeeded,
    half of them by a seal and half by an item."""

    def __init__(self, *services: ServiceProcess) -> None:
        shared_batch = httpx.post(f"{services[0].url}/v1/batches", json={"items": SHARED, "group_size": GROUP}).json()
        super().__init__(services[0].url, shared_batch["id"])
        self._asked = services

    def moves_to(self, *services: ServiceProcess, count: int = 60) -> None:
        """Send requests to these services from now on, until at least `count` more acks are answered."""
        self._asked = services
        self.reaches(count)

    def _target(self) -> str:
        return random.choice(self._asked).url

    def _batch(self, client: httpx.Client) -> None:
        batch: int = self._ask(client, "/v1/batches", {"items": 3, "group_size": GROUP})["id"]
        self.opened.add(batch)
        assert self._ask(client, f"/v1/batches/{batch}/items", {"count": 3})["start"] == 3
        first = random.random() < 0.5
        if first:
            self._seal(client, batch)
        for number in (*range(5), 2):  # one item is acked twice
            self._ack(client, batch, number)
            self._ack(client, self.shared, next(self._numbers))
        given_up = self._ask(client, "/v1/failures", {"items": [f"{batch}:0:5"], "reason": "a dead letter"})
        assert given_up["applied"] + given_up["repeated"] == 1, given_up
        with self._changed:
            self.newly.update(entry["batch"] for entry in given_up["completed"] if entry["newly"])
        self._ack(client, batch, 5)  # the failed item is acked again
        if not first:
            self._seal(client, batch)
        self._waits(client, batch)
        self.finished.append(batch)

    def _seal(self, client: httpx.Client, batch: int) -> None:
        sealed = self._ask(client, f"/v1/batches/{batch}/seal", {})
        with self._changed:
            self.newly.update([batch] if sealed["newly"] else [])

    def _waits(self, client: httpx.Client, batch: int) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(httpx.TransportError):
                response = client.get(f"{self._target()}/v1/batches/{batch}?wait=10")
                assert response.status_code in (200, 503), response.text
                if response.status_code == 200:
                    assert response.json()["succeeded"], response.text
                    return
            self._pause.wait(0.02)


def assert_nothing_lost(load: Everything, url: str) -> None:
    """Each request that was answered is stored once, each transition has one event, and the feed has no gap."""
    with Database(url) as database:
        check(load, database)
        service = Service(database, combiner=Inline)
        for batch in load.finished:
            assert events_of(service, batch) == ["opened", "sealed", "completed", "succeeded"]
            assert service.batches.get(batch).acked == 6
        after = 0
        while page := service.feed.read(after, 1000).events:
            assert [event.position for event in page] == list(range(after + 1, after + 1 + len(page)))
            after = page[-1].position
        assert after >= 4 * len(load.finished)
    assert set(load.statuses) <= {200, 201, 503}
