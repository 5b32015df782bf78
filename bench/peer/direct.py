"""The common part of the peers that are measured without HTTP: each has one sealed batch, and its writers ack parts of
it, one call a part."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import pymysql

from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.commits.combiner import Combiner, Inline
from core.service import Service
from core.storage import schema
from core.storage.database import Database
from lastbit.ids import DEFAULT_GROUP_SIZE
from tests.support.servers import MariaDB


class Writer(Protocol):
    def ack(self, numbers: Sequence[int]) -> None:
        """Durably ack items that are still pending. Raises `RuntimeError` if fewer were pending."""

    def close(self) -> None: ...


class Peer(Protocol):
    def writer(self) -> Writer: ...

    def acked(self) -> int:
        """The number of acked items by the bits or rows, not by a counter."""

    def close(self) -> None: ...


def connect(server: MariaDB, url: str) -> pymysql.Connection:
    """A session for a writer; without autocommit, a transaction starts with its first statement."""
    connection = server.connect(url.rpartition("/")[2])
    connection.autocommit(False)
    return connection


def ask(server: MariaDB, url: str, *statements: str) -> Any:
    """Run statements, each in its own transaction; return the rows of the last."""
    with contextlib.closing(server.connect(url.rpartition("/")[2])) as session, session.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return cursor.fetchall()


class Lastbit:
    """Lastbit's core without HTTP: one `Service` that writers share, like the requests of a process. With one writer
    each call is a transaction in the caller's own thread; with several, the combiner merges concurrent calls."""

    def __init__(self, server: MariaDB, items: int, writers: int) -> None:
        database = Database(server.new_database())
        schema.migrate(database)
        self._service = Service(database, combiner=Inline if writers == 1 else Combiner)
        self._batch = self._service.batches.open(Opening(items=items, sealed=True)).batch.id

    def writer(self) -> LastbitWriter:
        return LastbitWriter(self._service, self._batch)

    def acked(self) -> int:
        verification = self._service.batches.verify(self._batch)
        if not verification.ok:
            raise RuntimeError(f"the counts of Lastbit's batch differ from its bits: {verification}")
        return verification.counted_acked

    def close(self) -> None:
        self._service.stop()


class LastbitWriter:
    def __init__(self, service: Service, batch: int) -> None:
        self._service = service
        self._batch = batch

    def ack(self, numbers: Sequence[int]) -> None:
        items = [(self._batch, *divmod(number, DEFAULT_GROUP_SIZE)) for number in numbers]
        applied = self._service.acks.ack(Call.of(Verb.ACK, items)).result().applied
        if applied != len(numbers):
            raise RuntimeError(f"{applied} of {len(numbers)} acks were applied")

    def close(self) -> None: ...
