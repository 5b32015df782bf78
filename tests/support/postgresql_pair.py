"""Two PostgreSQL servers, a primary and its synchronous standby, and one address that leads to the primary.

A commit is answered once the standby has it too. `fail_over` does what tools such as Patroni do: the old primary is
gone before its standby is promoted, and the address leads to one server at most.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Final

from tests.support.galera import until
from tests.support.postgresql import PostgreSQL
from tests.support.proxies import Proxy

REPLICATION: Final = ("wal_keep_size=64MB", "wal_receiver_status_interval=1s", "wal_retrieve_retry_interval=200ms")


class Pair:
    """`start` begins with both servers; `fail_over` and `rejoin` take turns."""

    def __init__(self, *, options: Sequence[str] = ()) -> None:
        self.primary, self.standby = (PostgreSQL(options=[*REPLICATION, *options]) for _ in range(2))
        self._front = Proxy(self.primary.port)

    def start(self) -> None:
        self.primary.install()
        self.primary.start()
        self.set_on_primary("synchronous_standby_names", "*")
        self.rejoin()

    def url(self, database_url: str) -> str:
        """A database's URL, through the front."""
        head, _, name = database_url.rpartition("/")
        return f"{head.rpartition(':')[0]}:{self._front.port}/{name}"

    def set_on_primary(self, name: str, value: str) -> None:
        """Change a setting; a standby that joins later gets it too."""
        with contextlib.closing(self.primary.connect()) as connection:
            connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            connection.execute("SELECT pg_reload_conf()")

    def fail_over(self) -> None:
        """Kill the primary, promote the standby, and lead new connections to it. Its commits wait until a standby
        joins."""
        self.primary.kill()
        self._front.leave()
        self.standby.run("pg_ctl", "promote", "-w", "-D", str(self.standby.data))
        self.primary, self.standby = self.standby, self.primary
        self._front.target = self.primary.port
        self._front.come_back()

    def rejoin(self) -> None:
        """Make the server that is down the standby, with a copy of the primary's data."""
        shutil.rmtree(self.standby.data, ignore_errors=True)
        source = f"host=127.0.0.1 port={self.primary.port} user={self.primary.user}"
        self.standby.run(
            "pg_basebackup",
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--no-sync",
            "-D",
            str(self.standby.data),
            "-d",
            source,
        )
        self.standby.start()
        self.wait_until_synchronous()

    def wait_until_synchronous(self) -> None:
        until(lambda: self._count("pg_stat_replication", "sync_state = 'sync'") == 1, 60, lambda: "no standby")

    def pause_replay(self) -> None:
        """From now on the standby stores the primary's writes but doesn't apply them, until it is promoted."""
        with contextlib.closing(self.standby.connect()) as connection:
            connection.execute("SELECT pg_wal_replay_pause()")
        until(lambda: self._state() == "paused", 30, lambda: f"the standby's replay is {self._state()}")

    def _state(self) -> str:
        with contextlib.closing(self.standby.connect()) as connection:
            row = connection.execute("SELECT pg_get_wal_replay_pause_state()").fetchone()
        assert row is not None
        return str(row[0])

    def waiting_commits(self) -> int:
        """The commits on the primary that wait for the standby."""
        return self._count("pg_stat_activity", "wait_event = 'SyncRep'")

    def cancel_waiting_commits(self) -> list[int]:
        """Cancel them, as `pg_cancel_backend` does for an operator; the sessions."""
        with contextlib.closing(self.primary.connect()) as connection:
            rows = connection.execute("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'").fetchall()
            for row in rows:
                connection.execute("SELECT pg_cancel_backend(%s)", row)
        return [pid for (pid,) in rows]

    def is_over(self, sessions: Sequence[int]) -> bool:
        """Whether all of these sessions of the primary have ended."""
        return not sessions or self._count("pg_stat_activity", f"pid IN ({','.join(map(str, sessions))})") == 0

    def _count(self, view: str, condition: str) -> int:
        with contextlib.closing(self.primary.connect()) as connection:
            row = connection.execute(f"SELECT COUNT(*) FROM {view} WHERE {condition}".encode()).fetchone()
        assert row is not None
        return int(row[0])

    def remove(self) -> None:
        self._front.close()
        self.primary.remove()
        self.standby.remove()


@contextlib.contextmanager
def running_pair(*, options: Sequence[str] = ()) -> Iterator[Pair]:
    """Two servers that are gone when the context ends."""
    pair = Pair(options=options)
    try:
        pair.start()
        yield pair
    finally:
        pair.remove()
