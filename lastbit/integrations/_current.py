"""The item that a handler works for. Every adapter sets it around its handler.

It is a context variable: tasks of asyncio and `asyncio.to_thread` see it, and so does a thread that runs in a copy of
the handler's context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypeVar, overload

from lastbit.errors import NoCurrentItem
from lastbit.ids import ItemId
from lastbit.integrations._ended import EndedBatches
from lastbit.integrations._messages import ended_batch_of, item_of

T = TypeVar("T")

_REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class _Handling:
    """A message that is being handled: its id, its item, and what was handled around it, as by a task that runs another
    one in place."""

    message_id: str | None
    item: str | None
    outer: _Handling | None
    ended: EndedBatches | None
    fan_outs: Iterator[int] = field(default_factory=count)
    """The numbers of the fan-outs that the handler makes for its item. Tasks and threads share them."""


_handling: ContextVar[_Handling | None] = ContextVar("lastbit_handling", default=None)


@overload
def current_item() -> str: ...
@overload
def current_item(default: T) -> str | T: ...
def current_item(default: object = _REQUIRED) -> object:
    """The id of the item whose message is being handled. Where there is none, outside of a handler and for a message
    without an item, it returns the `default`, or raises `NoCurrentItem`.

    Tasks that the handler starts have the same item. A thread has it if it runs in a copy of the handler's context:
    `executor.submit(contextvars.copy_context().run, work)`.
    """
    handling = _handling.get()
    if handling is not None and handling.item is not None:
        return handling.item
    if default is _REQUIRED:
        raise NoCurrentItem
    return default


@overload
def current_batch() -> int: ...
@overload
def current_batch(default: T) -> int | T: ...
def current_batch(default: object = _REQUIRED) -> object:
    """The id of the batch of `current_item`; in a task at the end of a batch, which has no item, of that batch.
    Otherwise as there."""
    item = current_item(None)
    if item is not None:
        return ItemId.parse(item).batch
    handling = _handling.get()
    ended_batch = None if handling is None else ended_batch_of(handling.message_id)
    if ended_batch is not None:
        return ended_batch
    if default is _REQUIRED:
        raise NoCurrentItem
    return default


def current_batch_ended() -> bool:
    """Whether the batch of `current_item` was cancelled, has expired or was deleted, as far as this worker knows: then
    the handler may stop early, as its item can't be resolved any more. It asks nobody, so it may be called often. False
    where there is no item, and with `skip_ended=False`."""
    handling = _handling.get()
    if handling is None or handling.item is None or handling.ended is None:
        return False
    return ItemId.parse(handling.item).batch in handling.ended


def fan_out_number(item: str) -> int | None:
    """The number of another fan-out of the handler on behalf of its own item; None if it has another one."""
    handling = _handling.get()
    return next(handling.fan_outs) if handling is not None and handling.item == item else None


def enter(message_id: str | None, ended: EndedBatches | None = None) -> None:
    """A handler begins, of a message with this id: an item's, or any other one. `leave` ends it, in the same context.
    `ended`: what its worker knows."""
    _handling.set(_Handling(message_id, item_of(message_id), _handling.get(), ended))


@contextmanager
def again() -> Iterator[None]:
    """The block is another attempt of the handler, with the same item."""
    handling = _handling.get()
    if handling is None:
        yield
        return
    token = _handling.set(_Handling(handling.message_id, handling.item, handling.outer, handling.ended))
    try:
        yield
    finally:
        _handling.reset(token)


def leave() -> None:
    handling = _handling.get()
    if handling is not None:
        _handling.set(handling.outer)


def replace(message_id: str | None, ended: EndedBatches | None = None) -> None:
    """This thread handles this message from now on, and no other; None: it handles none."""
    _handling.set(None if message_id is None else _Handling(message_id, item_of(message_id), None, ended))


@contextmanager
def handling(message_id: str | None, ended: EndedBatches | None = None) -> Iterator[None]:
    """The block handles a message with this id. `ended`: what its worker knows."""
    enter(message_id, ended)
    try:
        yield
    finally:
        leave()
