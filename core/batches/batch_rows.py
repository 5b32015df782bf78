"""Rows of batches as text, for statements that a `Pipeline` sends."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from core.batches.batch import Batch
from core.storage import dialects
from core.storage.statements import LIST, chunks


def updates(dialect: dialects.Dialect, changed: Iterable[tuple[Batch, Batch]]) -> list[str]:
    """UPDATEs that write the changed columns of each batch, given before and after: one for each set of columns."""
    by_columns: dict[tuple[str, ...], dict[int, list[Any]]] = {}
    for before, after in changed:
        pairs = [(name, getattr(after, name)) for name in _CHANGEABLE if getattr(after, name) != getattr(before, name)]
        columns = tuple(name for name, _ in pairs)
        by_columns.setdefault(columns, {})[after.id] = [value for _, value in pairs]
    texts = []
    for columns, rows in by_columns.items():
        for part in chunks(sorted(rows), LIST):
            assignments = []
            for place, column in enumerate(columns):
                literals = {id: plain(dialect, rows[id][place]) for id in part}
                if len(set(literals.values())) == 1:
                    assignments.append(f"{column} = {literals[part[0]]}")
                else:
                    cases = " ".join(f"WHEN {id} THEN {literal}" for id, literal in literals.items())
                    assignments.append(f"{column} = CASE id {cases} END")
            ids = ",".join(map(str, part))
            texts.append(f"UPDATE batches SET {', '.join(assignments)} WHERE id IN ({ids})")  # noqa: S608
    return [text for text in texts if " SET  WHERE " not in text]


_CHANGEABLE: Final = (
    *("items", "state", "sealed_at", "ended_at", "completed_by", "succeeded_by", "journal_next", "parent_due"),
    *("updated_at", "exceeded"),
)


def text(dialect: dialects.Dialect, value: str) -> str:
    return dialect.text(value.encode().hex())


def literal(dialect: dialects.Dialect, value: Any) -> str:
    """The SQL literal of a value, which may be a client's text."""
    if isinstance(value, str) and not isinstance(value, StrEnum):
        return text(dialect, value)
    return plain(dialect, value)


def plain(dialect: dialects.Dialect, value: Any) -> str:
    """The SQL literal of a value of ours."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return dialect.blob(value.hex())
    if isinstance(value, datetime):
        return dialect.time(f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}")
    return str(int(value)) if isinstance(value, int) else f"'{value}'"
