"""The databases behind the service's URL, and the failures that they can cause."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tests.support.galera import Cluster, Node
from tests.support.oceanbase import OceanBase
from tests.support.postgresql import PostgreSQL
from tests.support.proxies import Cut, Proxy
from tests.support.servers import MariaDB

Trouble = Callable[[random.Random], None]
"""Causes a failure and undoes it. A world causes one failure at a time."""


class World(Protocol):
    url: str
    """The URL for the service; set by `start`."""
    direct: str
    """The URL for the checks after the run."""
    every: float
    """Seconds between two failures, on average."""

    @property
    def available(self) -> bool:
        """Whether this machine has the programs it needs."""

    def start(self) -> None: ...

    def troubles(self) -> Mapping[str, Trouble]: ...

    def lose(self, every: int) -> None:
        """Lose the answer to one of this many COMMITs, until `settle`."""

    def settle(self) -> None:
        """Return when everything is healthy again."""

    def facts(self) -> Mapping[str, int]:
        """Counts for the report."""

    def differences(self) -> list[str]:
        """Differences between its servers after all work has ended."""

    def logs(self) -> Sequence[Path]:
        """The log files of its servers."""

    def close(self) -> None: ...


LEFT = "Disconnected"
"""The status of a node that has left the cluster permanently, for example after Galera's own membership failed
("backend must be restarted" in its log). It still runs, and only a restart brings it back."""
FIND_BACK = 90
"""Seconds in which nodes should find each other again."""
PATIENCE = 600
"""Seconds for the same with help, on a busy machine."""
DURABLE = ("--innodb-flush-log-at-trx-commit=1",)


class OneServer:
    """A MariaDB on disk, or another server, behind a proxy."""

    every = 8.0

    def __init__(self, server: MariaDB | PostgreSQL | None = None) -> None:
        self._server = server or MariaDB(in_memory=False, options=DURABLE)
        self._proxy = Proxy(self._server.port)
        self._pause = threading.Event()

    @property
    def available(self) -> bool:
        return self._server.available

    def start(self) -> None:
        self._server.install()
        self._server.start()
        self.direct = self._server.new_database()
        self.url = self.direct.replace(f":{self._server.port}/", f":{self._proxy.port}/")

    def troubles(self) -> Mapping[str, Trouble]:
        return {
            "database killed": self._killed,
            "database restarted": self._restarted,
            "database frozen": self._frozen,
            "network away": self._away,
            "network silent": self._silent,
            "network slow": self._slow,
            "connections cut before COMMIT": lambda dice: self._cut("before", dice),
            "connections cut amid the last writes and COMMIT": lambda dice: self._cut("amid", dice),
            "connections cut after COMMIT": lambda dice: self._cut("after", dice),
        }

    def lose(self, every: int) -> None:
        self._proxy.every, self._proxy.cut = every, "after"

    def facts(self) -> Mapping[str, int]:
        return {"COMMITs cut": self._proxy.cuts}

    def settle(self) -> None:
        """Each other failure undoes itself."""
        self._proxy.cut = None

    def differences(self) -> list[str]:
        return []  # there is one server

    def logs(self) -> Sequence[Path]:
        return ()

    def close(self) -> None:
        self._proxy.close()
        self._server.remove()

    def _killed(self, dice: random.Random) -> None:
        self._server.stop(signal.SIGKILL)
        self._pause.wait(dice.choice([0, dice.uniform(0, 3)]))
        self._server.start()

    def _restarted(self, _: random.Random) -> None:
        self._server.stop()
        self._server.start()

    def _frozen(self, dice: random.Random) -> None:
        with self._server.frozen():
            self._pause.wait(dice.uniform(0.2, 5))

    def _away(self, dice: random.Random) -> None:
        self._proxy.leave()
        self._pause.wait(dice.uniform(0, 4))
        self._proxy.come_back()

    def _silent(self, dice: random.Random) -> None:
        self._proxy.fall_silent()
        self._pause.wait(dice.uniform(0.2, 5))
        self._proxy.speak()

    def _slow(self, dice: random.Random) -> None:
        self._proxy.delay = dice.uniform(0.005, 0.03)
        self._pause.wait(dice.uniform(1, 3))
        self._proxy.delay = 0

    def _cut(self, cut: Cut, dice: random.Random) -> None:
        before = self._proxy.cuts
        self._proxy.every = dice.choice([1, 2, 5])
        self._proxy.cut = cut
        for _ in range(50):
            self._pause.wait(0.1)
            if self._proxy.cuts >= before + 5:
                break
        self._proxy.cut = None


class OneOceanBase(OneServer):
    """A seekdb, behind a proxy."""

    def __init__(self) -> None:
        super().__init__(OceanBase(in_memory=False))


class OnePostgreSQL(OneServer):
    """A PostgreSQL on disk, behind a proxy. Each of its sessions is a process. If one is killed, the server ends all
    sessions and recovers."""

    def __init__(self) -> None:
        self._postgresql = PostgreSQL(in_memory=False)
        super().__init__(self._postgresql)

    def troubles(self) -> Mapping[str, Trouble]:
        return {
            **super().troubles(),
            "database session killed": self._session_killed,
            "database sessions ended": self._sessions_ended,
        }

    def _session_killed(self, dice: random.Random) -> None:
        if sessions := self._sessions():
            with contextlib.suppress(ProcessLookupError):  # it was ending
                os.kill(dice.choice(sessions), signal.SIGKILL)

    def _sessions_ended(self, _: random.Random) -> None:
        with contextlib.closing(self._postgresql.connect()) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )

    def _sessions(self) -> list[int]:
        with contextlib.closing(self._postgresql.connect()) as connection:
            rows = connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
            return [pid for (pid,) in rows]


class ThreeNodes:
    """A Galera cluster behind its front; one node is always down or joining, and never two."""

    every = 0.5

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._rejoined = 0
        self._rebuilt = 0
        self._bootstrapped = 0
        self._pause = threading.Event()

    @property
    def available(self) -> bool:
        return self._cluster.available

    @property
    def nodes(self) -> Sequence[Node]:
        return self._cluster.nodes

    def start(self) -> None:
        self._cluster.start()
        self._name = self._cluster.new_database()
        self.url = self.direct = self._cluster.url(self._name)

    def troubles(self) -> Mapping[str, Trouble]:
        return {
            "node killed": self._killed,
            "writer killed": lambda dice: self._killed(dice, self._cluster.front.current),
            "node restarted": self._restarted,
            "node frozen": self._frozen,
            "node rebuilt": lambda dice: self._killed(dice, full_transfer=True),
            "front led elsewhere": self._led_elsewhere,
        }

    def lose(self, every: int) -> None:
        raise NotImplementedError("there is no proxy that knows a COMMIT")

    def facts(self) -> Mapping[str, int]:
        return {
            "nodes that rejoined": self._rejoined,
            "nodes that were rebuilt": self._rebuilt,
            "clusters without a majority": self._bootstrapped,
        }

    def settle(self) -> None:
        """Return when all nodes take part. Nodes that don't rejoin by themselves get an operator's help. If no node has
        the majority, as after a node was killed while the others could not reach each other, one live node is made the
        primary component. A node that ended, has left or stays out is restarted."""
        deadline = time.monotonic() + PATIENCE
        last_help = time.monotonic()
        while not self._cluster.whole:
            assert time.monotonic() < deadline, "\n".join(node.end_of_log(4_000) for node in self._cluster.nodes)
            self._pause.wait(0.5)
            if any(node.ended for node in self._cluster.nodes) or time.monotonic() - last_help > FIND_BACK:
                self.help()
                last_help = time.monotonic()

    def help(self) -> None:
        """See `settle`."""
        memberships = {node: node.membership() for node in self._cluster.nodes if node.runs and not node.ended}
        primary = "Primary" in memberships.values()
        if (
            not primary
            and (node := self._cluster.furthest([node for node in memberships if memberships[node] != LEFT]))
            is not None
        ):
            self._bootstrapped += 1
            node.bootstrap()
        for node in self._cluster.nodes:
            if memberships.get(node) == LEFT or (primary and memberships.get(node) != "Primary"):
                self._rebuilt += 1
                node.kill()
                node.start(full_transfer=True, wait=False)

    def differences(self) -> list[str]:
        return self._cluster.differences(self._name)

    def logs(self) -> Sequence[Path]:
        return [node.log for node in self._cluster.nodes if node.log.exists()]

    def close(self) -> None:
        self._cluster.remove()

    def _killed(self, dice: random.Random, node: Node | None = None, *, full_transfer: bool = False) -> None:
        node = node or dice.choice(self._cluster.nodes)
        node.kill()
        self._pause.wait(dice.uniform(0, 4))
        self._rejoin(node, full_transfer=full_transfer)

    def _restarted(self, dice: random.Random) -> None:
        node = dice.choice(self._cluster.nodes)
        node.stop()
        self._pause.wait(dice.uniform(0, 2))
        self._rejoin(node)

    def _frozen(self, dice: random.Random) -> None:
        node = dice.choice(self._cluster.nodes)
        node.freeze()
        self._pause.wait(dice.uniform(0.5, 8))
        node.thaw()
        self.settle()
        self._rejoined += 1

    def _led_elsewhere(self, dice: random.Random) -> None:
        """New connections go to one node, or to all in turn."""
        self._cluster.front.policy = dice.choice(["one", "all"])

    def _rejoin(self, node: Node, *, full_transfer: bool = False) -> None:
        node.start(full_transfer=full_transfer, wait=False)
        self.settle()
        self._rejoined += 1
