"""Producers: each opens its batches with keys, extends them in pieces, publishes the ids, and seals or cancels them.

A plan whose producer died or got no answer is executed from its beginning by another one, with the same
Idempotency-Keys. So the ids are the same, and published ids are published again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Protocol

from lastbit import AsyncClient, Client, errors
from lastbit.ids import ItemIds
from tests.chaos.broker import Link
from tests.chaos.command_line import CommandLine
from tests.chaos.plans import Fate, Plan

Issued = tuple[int, ItemIds]
"""A batch, and the ids that its open issued."""


class Hand(Protocol):
    """How a producer sends its requests. Raises `LastbitError`."""

    async def open(self, plan: Plan) -> Issued: ...
    async def extend(self, batch: int, count: int, key: str) -> ItemIds: ...
    async def seal(self, batch: int) -> None: ...
    async def cancel(self, batch: int) -> None: ...


class SyncHand:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def open(self, plan: Plan) -> Issued:
        handle = self._client.open(
            key=plan.key, group_size=plan.group_size, items=plan.first, idempotency_key=f"open-{plan.key}"
        )
        return handle.id, handle.ids

    async def extend(self, batch: int, count: int, key: str) -> ItemIds:
        return self._client.batch(batch).extend(count, idempotency_key=key)

    async def seal(self, batch: int) -> None:
        self._client.batch(batch).seal()

    async def cancel(self, batch: int) -> None:
        self._client.batch(batch).cancel()


class AsyncHand:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def open(self, plan: Plan) -> Issued:
        handle = await self._client.open(
            key=plan.key, group_size=plan.group_size, items=plan.first, idempotency_key=f"open-{plan.key}"
        )
        return handle.id, handle.ids

    async def extend(self, batch: int, count: int, key: str) -> ItemIds:
        return await self._client.batch(batch).extend(count, idempotency_key=key)

    async def seal(self, batch: int) -> None:
        await self._client.batch(batch).seal()

    async def cancel(self, batch: int) -> None:
        await self._client.batch(batch).cancel()


class CommandLineHand:
    def __init__(self, lastbit: CommandLine) -> None:
        self._lastbit = lastbit

    async def open(self, plan: Plan) -> Issued:
        body = {"key": plan.key, "group_size": plan.group_size, "items": plan.first}
        options = ["--key", plan.key, "--group-size", str(plan.group_size), "--items", str(plan.first)]
        key = f"open-{plan.key}"
        output = self._lastbit.run(["open", *options, "--idempotency-key", key], "/v1/batches", body, key=key)
        ids = range(output["start"], output["start"] + output["count"])
        return output["id"], ItemIds(output["id"], output["group_size"], ids)

    async def extend(self, batch: int, count: int, key: str) -> ItemIds:
        arguments = ["extend", str(batch), str(count), "--idempotency-key", key]
        output = self._lastbit.run(arguments, f"/v1/batches/{batch}/items", {"count": count}, key=key)
        return ItemIds(batch, output["group_size"], range(output["start"], output["start"] + output["count"]))

    async def seal(self, batch: int) -> None:
        self._lastbit.run(["seal", str(batch)], f"/v1/batches/{batch}/seal", None)

    async def cancel(self, batch: int) -> None:
        self._lastbit.run(["cancel", str(batch)], f"/v1/batches/{batch}/cancel", None)


async def produce(hand: Hand, link: Link, dice: random.Random, at_once: int = 1) -> None:
    """Work until the broker stops the actor."""
    while (plans := link.take("plans", at_once)) is not None:
        await asyncio.gather(*[_do(hand, link, dice, tag, Plan.from_json(plan)) for tag, plan in plans])


async def _do(hand: Hand, link: Link, dice: random.Random, tag: int, plan: Plan) -> None:
    try:
        batch, ids = await hand.open(plan)
        _publish(link, plan, ids)
        for number, count in enumerate(plan.pieces):
            _publish(link, plan, await hand.extend(batch, count, f"{plan.key}-{number}"))
        # A batch that refuses was cancelled or has completed. The checks decide whether it may.
        with contextlib.suppress(errors.Conflict):
            if plan.fate is not Fate.CANCELLED or dice.random() < 0.5:
                await hand.seal(batch)
            if plan.fate is Fate.CANCELLED:
                await hand.cancel(batch)
    except errors.LastbitError:
        link.back([tag])
    else:
        link.done([tag])


def _publish(link: Link, plan: Plan, ids: ItemIds) -> None:
    messages = [(item, plan.do(number)) for number, item in zip(ids.numbers, ids, strict=True)]
    link.put([(item, action) for item, action in messages if action is not None])
