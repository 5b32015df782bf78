"""The labels of a batch whose end publishes a message (`on_success`, `on_complete` of a fan-out), and the process
manager that does it. The adapters write them, and the service reads them to explain a batch."""

from __future__ import annotations

from typing import Final

APP: Final = "lastbit.endings"
"""The label with the name of the app whose workers publish the messages."""
ON_SUCCESS: Final = "lastbit.on_success"
ON_COMPLETE: Final = "lastbit.on_complete"
LABELS: Final = {
    "batch.succeeded": ON_SUCCESS,
    "batch.completed": ON_COMPLETE,
    "batch.expired": ON_COMPLETE,
    "batch.cancelled": ON_COMPLETE,
}
"""The label with the message of each ending."""


def process_name(app: str) -> str:
    return f"endings.{app}"
