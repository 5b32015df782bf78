"""Process managers: definitions, instances, parked events and commands."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from core.processes import definitions, instances, outbox
from core.processes.handling import handle_of
from core.service.writes import WriteService
from core.storage.database import Database


class ProcessService:
    """Methods that name an existing process raise `errors.ProcessNotFound`."""

    def __init__(self, database: Database, writes: WriteService) -> None:
        self._database = database
        self._writes = writes

    def define(
        self,
        name: str,
        *,
        partitions: int | None = None,
        ttl: timedelta | None = None,
        release: timedelta | None = None,
        after: int | None = None,
    ) -> tuple[definitions.Definition, bool]:
        """Returns the process, and whether it is new. Raises `errors.PartitionsFixed`, `PositionTrimmed`,
        `InvalidRequest`, `ConsumerGroupInUse`."""
        definitions.sweep(self._database)  # an earlier process of that name may be half deleted
        return self._database.write(definitions.define, name, partitions, ttl, release, after)

    def count_unnamed(self, name: str, after: int, upto: int, count: int) -> definitions.Definition:
        """Returns the process as it is then."""
        return self._database.write(definitions.count_unnamed, name, after, upto, count)

    def summaries(self) -> list[instances.Summary]:
        return self._database.snapshot(instances.summaries)

    def delete(self, name: str) -> None:
        """Raises `errors.ConsumerGroupInUse`."""
        definitions.delete(self._database, name)

    def handle(self, handling: instances.Handling) -> instances.Handled:
        """Raises `errors.StaleEpoch`, `VersionConflict`, `InvalidRequest`."""
        handled: instances.Handled = self._writes.run(handle_of(handling))
        return handled

    def page(
        self, process: str, status: instances.Status | None, after: str | None, limit: int, *, parked: bool = False
    ) -> tuple[list[instances.Instance], bool]:
        """The instances with a name above `after`, and whether there may be more."""
        return self._database.snapshot(lambda tx: instances.page(tx, process, status, after, limit, parked=parked))

    def instance(self, process: str, instance: str) -> instances.Details:
        """Raises `errors.InstanceNotFound`."""
        return self._database.snapshot(instances.get, process, instance)

    def retry_parked(self, process: str, instance: str, event: str | None = None) -> int:
        """Returns the number of events that will be handled again. Raises `errors.InstanceNotFound`."""
        return self._database.write(instances.retry, process, instance, event)

    def commands(
        self, after: int, limit: int, *, types: Sequence[str] = (), process: str | None = None
    ) -> outbox.CommandPage:
        """Raises `errors.PositionTrimmed`; `InvalidRequest` for a position from the future."""
        return self._database.snapshot(lambda tx: outbox.read(tx, after, limit, types=types, process=process))
