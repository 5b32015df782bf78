"""Classifies database errors. Conflicts are expected and are retried at once; outages are retried rarely. The codes of
each database are in its dialect."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, ResourceClosedError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from core.errors import Fault
from core.storage import dialects


class BeginAgain(Exception):  # a request to retry, not an error
    """Raised by an operation whose data changed while it ran: roll back and run it again from its start."""


def is_duplicate(error: IntegrityError) -> bool:
    """Whether the error is a duplicate key, not another constraint."""
    dialect = dialects.of_error(error)
    return dialect is not None and dialect.code(error) in dialect.duplicate


def is_done_already(error: DBAPIError) -> bool:
    """Whether a step of a migration failed because it was done before. Only on MariaDB and MySQL; others roll back an
    interrupted migration."""
    dialect = dialects.of_error(error)
    return dialect is not None and dialect.code(error) in dialect.done_already


def is_elsewhere(error: BaseException) -> bool:
    """Whether another server behind the same address may accept a statement that this one refuses now."""
    dialect = dialects.of_error(error)
    return isinstance(error, DBAPIError) and dialect is not None and dialect.code(error) in dialect.elsewhere


def is_before_commit(error: BaseException) -> bool:
    """Whether the server refused a statement that was sent together with a COMMIT. It executes nothing after that, so
    nothing was committed. If the connection was lost, nobody knows how far the server came."""
    return (
        isinstance(error, DBAPIError) and not error.connection_invalidated and error.statement not in (None, "COMMIT")
    )


def classify(error: BaseException) -> Fault | None:
    """Classify a driver's error. None: the error is a bug in this code."""
    if isinstance(error, BeginAgain):
        return Fault.CONFLICT
    # The second one: an engine's first connection died while SQLAlchemy asked the server for its version and settings.
    if isinstance(error, PoolTimeout | ResourceClosedError):
        return Fault.OUTAGE
    if not isinstance(error, DBAPIError):
        return None
    dialect = dialects.of_error(error)
    if dialect is not None:
        return dialect.fault(error)
    return Fault.OUTAGE if error.connection_invalidated or isinstance(error, InterfaceError) else None


def outage(cause: BaseException) -> str:
    """The message for clients about an outage. It omits the driver's text, which may contain hosts and users."""
    if isinstance(cause, PoolTimeout):
        return "all database connections are busy"
    dialect = dialects.of_error(cause)
    code = None
    if isinstance(cause, DBAPIError) and dialect is not None:
        code = dialect.code(cause)
        advice: str | None = getattr(cause.orig, "advice", None)
        if advice is not None:
            return advice
    return "the database can't be reached or accepts no writes now" + (f" (its error {code})" if code else "")
