"""A private MariaDB Galera cluster: three nodes on this machine, and a front that leads connections to the ready ones.

Nodes notice within about two seconds that another one is gone. Everything is on 127.0.0.1, in temporary folders; a
state transfer uses rsync, which needs no account.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

import pymysql

from tests.support.servers import MariaDB, free_port

PROVIDER: Final = "galera/libgalera_smm.so"
SYNCED: Final = "4"

_TIMEOUTS: Final = (
    # A silent node is suspected after suspect_timeout and removed if the others agree; after inactive_timeout it is
    # removed unconditionally.
    *("evs.keepalive_period=PT0.25S", "evs.inactive_check_period=PT0.25S", "evs.suspect_timeout=PT1.5S"),
    *("evs.inactive_timeout=PT4S", "evs.install_timeout=PT4S", "gmcast.peer_timeout=PT1.5S", "gmcast.time_wait=PT1S"),
    *("pc.announce_timeout=PT1S", "gcache.size=32M", "gcache.page_size=32M", "gcache.recover=yes"),
)

Policy = Literal["one", "all"]
"""Where new connections lead: to one node while it is ready, or to all ready nodes in turn."""


def provider() -> Path | None:
    paths = [folder / PROVIDER for folder in (Path("/usr/lib"), Path("/usr/lib64")) if (folder / PROVIDER).exists()]
    return paths[0] if paths else None


class Node(MariaDB):
    """One server of the cluster. `start` returns once it takes part, and `stop` and `kill` once it is gone."""

    def __init__(self, number: int, *, options: Sequence[str] = ()) -> None:
        super().__init__()
        if self.user == "root":
            # An rsync daemon started by root would write as user nobody, which has no permission.
            self.user = "mysql"
            shutil.chown(self.folder, self.user)
        self.number = number
        self.extra = tuple(options)
        self.group_port = free_port()
        self.transfer_port = free_port()
        self.sst_port = free_port()
        self.frozen = False

    def join(self, nodes: Sequence[Node]) -> None:
        """Set the addresses of the other nodes."""
        host = "127.0.0.1"
        group = ",".join(f"{host}:{node.group_port}" for node in nodes)
        options = ";".join(
            [
                *(f"gmcast.listen_addr=tcp://{host}:{self.group_port}", f"base_host={host}"),
                *(f"base_port={self.group_port}", f"ist.recv_addr={host}:{self.transfer_port}"),
                *_TIMEOUTS,
            ]
        )
        self.options = (
            *("--wsrep-on=ON", f"--wsrep-provider={provider()}", "--wsrep-cluster-name=lastbit"),
            *(f"--wsrep-cluster-address=gcomm://{group}", f"--wsrep-provider-options={options}"),
            *(f"--wsrep-node-name=node{self.number}", f"--wsrep-node-address={host}:{self.group_port}"),
            *("--wsrep-sst-method=rsync", f"--wsrep-sst-receive-address={host}:{self.sst_port}"),
            *("--binlog-format=ROW", "--innodb-autoinc-lock-mode=2", "--wsrep-slave-threads=2"),
            # Answered writes are in this node's log too, not only on the two other nodes.
            "--innodb-flush-log-at-trx-commit=1",
            *("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M"),
            *self.extra,
        )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process is not None

    @property
    def ended(self) -> bool:
        """Whether its process ended without being stopped or killed."""
        return self.process is not None and self.process.poll() is not None

    def bootstrap(self) -> None:
        """Make this node and the nodes connected to it the primary component, though they are no majority. Does nothing
        if they are already, or can't be."""
        with (
            contextlib.suppress(pymysql.MySQLError, OSError),
            contextlib.closing(self._connect()) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("SET GLOBAL wsrep_provider_options = 'pc.bootstrap=YES'")

    def view(self) -> str | None:
        """The id of the cluster view that it is in, once it has just heard from all its members; None if it accepts no
        statements. A node that was away assumes for a second that nothing has changed: it hears from no other node, and
        this call waits until it notices."""
        try:
            with contextlib.closing(self._connect()) as connection, connection.cursor() as cursor:
                cursor.execute("SET SESSION wsrep_sync_wait = 1")
                cursor.execute("SELECT 1")
            status = self.status("cluster_conf_id", "cluster_size", "cluster_status", "local_state")
        except (pymysql.MySQLError, OSError):
            return None
        return str(status)

    def membership(self) -> str:
        """`Primary` if the node reports that it belongs to the majority; `silent` if it doesn't answer."""
        try:
            return self.status("cluster_status")["cluster_status"]
        except (pymysql.MySQLError, OSError):
            return "silent"

    def start(self, *, new_cluster: bool = False, full_transfer: bool = False, wait: bool = True) -> None:
        """Start the node. It rejoins with a transfer of the writes that it missed, or of all data with
        `full_transfer`."""
        data = self.folder / "data"
        if full_transfer:
            shutil.rmtree(data)
            data.mkdir()
            shutil.chown(data, self.user)
        command = self.command()
        if new_cluster:
            command.append("--wsrep-new-cluster")
        elif not full_transfer and (position := self._recovered()):
            command.append(f"--wsrep-start-position={position}")
        self._note("started without data" if full_transfer else "started")
        # In a separate session, so that the scripts of a transfer end with it.
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, text=True, start_new_session=True)
        if wait:
            self.wait_until_ready()

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def _note(self, text: str) -> None:
        """Write what was done to the node to its log, with the machine's monotonic clock."""
        with self.log.open("a") as log:
            now = datetime.now().astimezone()
            log.write(f"{now:%Y-%m-%d %H:%M:%S.%f} ({time.monotonic():.3f}) node {self.number}: {text}\n")

    def wait_until_ready(self, seconds: float = 90) -> None:
        def look() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.end_of_log()
            return self.ready()

        until(look, seconds, self.end_of_log)

    def end_of_log(self, characters: int = 20_000) -> str:
        return f"node {self.number} does not take part:\n" + self.log.read_text(errors="replace")[-characters:]

    def _recovered(self) -> str | None:
        """The position of a node that was killed; a node that was stopped has stored it."""
        state = self.folder / "data" / "grastate.dat"
        if not state.exists() or "seqno:   -1" not in state.read_text():
            return None
        process = subprocess.run([*self.command(), "--wsrep-recover"], capture_output=True, text=True, timeout=60)
        match = re.search(r"Recovered position:\s*(\S+:-?\d+)", process.stderr)
        assert match, process.stderr
        return match[1]

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.thaw()
        if self.process is None:
            return
        self._note(f"stopped by {signal.Signals(number).name}")
        if number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        super().stop(number)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop the process without closing its connections: to the others it is gone."""
        self.frozen = True
        self._note("frozen")
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        if self.frozen and self.process is not None:
            self._note("thawed")
            os.kill(self.pid, signal.SIGCONT)
        self.frozen = False

    @contextlib.contextmanager
    def lagging(self) -> Iterator[None]:
        """Within the context, it applies none of the others' commits. It answers reads and locks rows, but commits
        nothing."""
        with contextlib.closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute("BACKUP STAGE START")
            cursor.execute("BACKUP STAGE BLOCK_COMMIT")
            yield
            cursor.execute("BACKUP STAGE END")

    def works_on(self, database: str) -> int:
        """The number of statements that run there on the database."""
        with contextlib.closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute(
                "SELECT COUNT(*) FROM information_schema.processlist WHERE db = %s AND command = 'Query'", [database]
            )
            return int(cursor.fetchone()[0])

    def status(self, *names: str) -> dict[str, str]:
        """Its wsrep_… status variables. Raises PyMySQL's errors."""
        with contextlib.closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'wsrep\\_%'")
            rows = dict(cursor.fetchall())
        return {name: rows.get(f"wsrep_{name}", "") for name in names}

    def ready(self) -> bool:
        """Whether it accepts statements and has all data: what a balancer's check asks."""
        if not self.runs or self.frozen:
            return False
        try:
            status = self.status("ready", "cluster_status", "local_state")
        except (pymysql.MySQLError, OSError):
            return False
        return status == {"ready": "ON", "cluster_status": "Primary", "local_state": SYNCED}

    def _connect(self) -> pymysql.Connection:
        return pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", autocommit=True, connect_timeout=2, read_timeout=2
        )

    def url(self, database: str) -> str:
        return f"mysql://root@127.0.0.1:{self.port}/{database}"


class Front:
    """Like HAProxy with an agent check: one port that forwards connections to ready nodes; connections to a node that
    is no longer ready are broken."""

    def __init__(self, nodes: Sequence[Node], policy: Policy = "one") -> None:
        self.policy: Policy = policy
        self._nodes = nodes
        self._fit: tuple[Node, ...] = ()
        self._current: Node | None = None
        self._turn = 0
        self._lock = threading.Lock()
        self._open: dict[Node, set[socket.socket]] = {node: set() for node in nodes}
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._accept, self._watch)]
        for thread in self._threads:
            thread.start()

    @property
    def current(self) -> Node | None:
        """With the policy `one`, the node that connections lead to."""
        return self._current

    @property
    def fit(self) -> tuple[Node, ...]:
        """The nodes that were ready at the last check."""
        return self._fit

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for node in self._nodes:
            self._break(node)

    def _watch(self) -> None:
        while not self._closed.wait(0.1):
            fit = tuple(node for node in self._nodes if node.ready())
            with self._lock:
                self._fit = fit
            for node in self._nodes:
                if node not in fit:
                    self._break(node)

    def _break(self, node: Node) -> None:
        with self._lock:
            for connection in self._open[node]:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _choose(self) -> Node | None:
        with self._lock:
            if not self._fit:
                return None
            if self.policy == "one":
                if self._current not in self._fit:
                    self._current = self._fit[0]
                return self._current
            self._turn += 1
            return self._fit[self._turn % len(self._fit)]

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            node = self._choose()
            try:
                if node is None:
                    raise ConnectionRefusedError
                server = socket.create_connection(("127.0.0.1", node.port), timeout=2)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            assert node is not None
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open[node] |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(node, source, sink), daemon=True).start()

    def _pump(self, node: Node, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        # The other direction's thread notices the end and closes its own socket.
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open[node].discard(source)
        source.close()


class Cluster:
    """Three nodes and their front. `start` takes some seconds; `remove` ends all of them."""

    def __init__(self, *, size: int = 3, options: Sequence[str] = ()) -> None:
        self.nodes = [Node(number, options=options) for number in range(size)]
        for node in self.nodes:
            node.join(self.nodes)
        self.front = Front(self.nodes)
        self._databases = 0

    @property
    def available(self) -> bool:
        programs = all(shutil.which(program) for program in ("rsync", "wsrep_sst_rsync"))
        return self.nodes[0].available and provider() is not None and programs

    def start(self) -> None:
        """The first node creates the cluster. The others start as copies of it, so no state transfer is needed."""
        first, *rest = self.nodes
        first.install()
        first.start(new_cluster=True)
        first.stop()
        for node in rest:
            # `cp -a` keeps file owners where it is permitted.
            subprocess.run(["cp", "-a", first.folder / "data", node.folder / "data"], check=True)
            for name in ("gvwstate.dat", "galera.cache"):
                (node.folder / "data" / name).unlink(missing_ok=True)
        first.start(new_cluster=True)
        for node in rest:
            node.start(wait=False)
        for node in rest:
            node.wait_until_ready()
        self.wait_until_whole()

    @property
    def whole(self) -> bool:
        """Whether all nodes take part and hear each other, and the front knows it."""
        if len(self.front.fit) < len(self.nodes):
            return False
        views = {node.view() for node in self.nodes}
        return len(views) == 1 and None not in views

    def wait_until_whole(self, seconds: float = 90) -> None:
        """Wait until all nodes take part and hear each other, and the front knows it."""
        until(lambda: self.whole, seconds, lambda: f"ready are {self.front.fit}, in {[n.view() for n in self.nodes]}")

    def furthest(self, nodes: Iterable[Node]) -> Node | None:
        """The most advanced of the nodes; None if no node answers."""
        positions: dict[Node, int] = {}
        for node in nodes:
            with contextlib.suppress(pymysql.MySQLError, OSError):
                positions[node] = int(node.status("last_committed")["last_committed"])
        return max(positions, key=lambda node: positions[node]) if positions else None

    def remove(self) -> None:
        self.front.close()
        for node in self.nodes:
            node.remove()

    def new_database(self) -> str:
        """The name of an empty database, which all nodes have."""
        self._databases += 1
        name = f"lastbit_{os.getpid()}_{self._databases}"
        self._everywhere(f"CREATE DATABASE {name}")
        return name

    def differences(self, name: str) -> list[str]:
        """The tables of the database that differ between nodes, each with the nodes' checksums."""
        checksums: list[dict[str, int]] = []
        for node in self.nodes:
            with contextlib.closing(node.connect()) as connection, connection.cursor() as cursor:
                cursor.execute("SET SESSION wsrep_sync_wait = 15")
                cursor.execute(f"SHOW TABLES FROM {name}")
                tables = ", ".join(f"{name}.{table}" for (table,) in cursor.fetchall())
                cursor.execute(f"CHECKSUM TABLE {tables}")
                checksums.append(dict(cursor.fetchall()))
        return [
            f"{table}: {sums}"
            for table in sorted(set().union(*checksums))
            if len(set(sums := [sums_of_node.get(table) for sums_of_node in checksums])) > 1
        ]

    def drop_database(self, name: str) -> None:
        self._everywhere(f"DROP DATABASE {name}")

    def _everywhere(self, statement: str) -> None:
        fit = [node for node in self.nodes if node.ready()]
        for node in fit:
            with contextlib.closing(node.connect()) as connection, connection.cursor() as cursor:
                # An answer means that the other nodes have it too.
                cursor.execute("SET SESSION wsrep_sync_wait = 15")
                cursor.execute(statement if node is fit[0] else "SHOW DATABASES")

    def url(self, database: str) -> str:
        """The database's URL through the front."""
        return f"mysql://root@127.0.0.1:{self.front.port}/{database}"


def until(condition: Callable[[], bool], seconds: float, message: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, message()
        pause.wait(0.05)
