"""The items that depend on a message: that of its own task, and those of tasks that run only if this one succeeds.

The later tasks of a chain, the body of a chord and the callbacks of `link` travel inside the message. If the task fails
for good, they are never published. Their items would stay pending, so they fail with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lastbit.integrations._messages import item_of

_CANVASES = ("chain", "group", "chord")


def is_item(task_id: object) -> bool:
    """Whether a task's id is an item's id. Celery's own ids contain no colon, so they are decided at once."""
    return isinstance(task_id, str) and ":" in task_id and item_of(task_id) is not None


def later_items(embed: object) -> list[str]:
    """The items that wait for this task's success. `embed` is the third part of a message's payload."""
    if not isinstance(embed, Mapping):
        return []
    return list(dict.fromkeys(_of_all([embed.get("chain"), embed.get("chord"), embed.get("callbacks")])))


def items_of_message(headers: object, payload: object) -> list[str]:
    """All items that depend on the message of a task, that of the task itself first."""
    own: object = None
    embed: object = None
    if isinstance(payload, Mapping):  # protocol 1
        own, embed = payload.get("id"), payload
    elif isinstance(payload, list | tuple) and len(payload) == 3:
        embed = payload[2]
    if isinstance(headers, Mapping):
        own = headers.get("id", own)
    return [*([str(own)] if is_item(own) else []), *later_items(embed)]


def has_one_end(signature: Mapping[str, Any]) -> bool:
    """Whether one task is the last of this signature: not if it is, or ends with, a group or `chunks`. Celery gives no
    task of these the id of the whole."""
    while signature["task"] in ("celery.chain", "celery.chord"):
        parts = signature["kwargs"]
        last = parts.get("body") or (parts.get("tasks") or [None])[-1]
        if last is None:
            break
        signature = last
    return signature["task"] not in ("celery.group", "celery.chunks")


def _of_all(signatures: object) -> Iterator[str]:
    for signature in signatures if isinstance(signatures, list | tuple) else [signatures]:
        if isinstance(signature, list | tuple):
            yield from _of_all(signature)
        elif isinstance(signature, Mapping):
            yield from _of_signature(signature)


def _of_signature(signature: Mapping[str, Any]) -> Iterator[str]:
    options = signature.get("options") or {}
    if is_item(options.get("task_id")):
        yield options["task_id"]
    yield from _of_all([options.get("chain"), options.get("chord"), options.get("link")])
    if signature.get("subtask_type") in _CANVASES:
        parts = signature.get("kwargs") or {}
        yield from _of_all([parts.get("tasks"), parts.get("header"), parts.get("body")])
