"""A service whose calls run in transactions of callers, for tests of what a call does, whoever commits it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from sqlalchemy.engine import Connection

from core.acks.call import AckResult, Call
from core.batches.batch import Extended, Opened, Opening
from core.batches.writing import Extend
from core.enlisted.transaction import Transaction
from core.service import Service
from core.service.batches import opening_of
from lastbit.ids import ItemId
from tests.guarantees.enlisted.callers import over

T = TypeVar("T")


class EnlistingService(Service):
    """Acks, failures, skips, opens without a parent and extends are enlisted. What they leave is moved at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.enlisted._mover.expect = lambda changed: None  # type: ignore[method-assign]  # nothing in the background
        self._open = self.batches.open
        self.acks.ack = self._ack  # type: ignore[method-assign]
        self.batches.open = self._open_enlisted  # type: ignore[method-assign]
        self.batches.extend = self._extend  # type: ignore[method-assign]

    def _write(self, work: Callable[[Transaction], T]) -> T:
        """In a transaction that is repeated after a conflict, as a caller does."""

        def write(connection: Connection) -> T:
            return work(over(connection))

        return self.database.write(write)

    def _ack(self, call: Call) -> Future[AckResult]:
        future: Future[AckResult] = Future()
        try:
            resolved = self._write(lambda tx: self.enlisted.resolve(tx, call))
            answer = self.enlisted.settled(call, resolved)
            self.enlisted.move(call.units)
            future.set_result(answer)
        except Exception as error:  # noqa: BLE001  # as the combiner does
            future.set_exception(error)
        return future

    def _open_enlisted(self, opening: Opening, idempotency_key: str | None = None, **options: Any) -> Opened:
        if opening.parent is not None:
            return self._open(opening, idempotency_key, **options)
        opened = self._write(lambda tx: self.enlisted.open(tx, opening_of(opening, idempotency_key)))
        self.enlisted.move([opened.batch.id])
        return opened

    def _extend(
        self,
        batch: int,
        count: int,
        idempotency_key: str | None = None,
        digest: str | None = None,
        by: ItemId | None = None,
    ) -> Extended:
        operation = Extend(batch=batch, count=count, idempotency_key=idempotency_key, digest=digest, by=by)
        extended = self._write(lambda tx: self.enlisted.extend(tx, operation))
        self.enlisted.move([batch])
        return extended
