"""A producer that is its own consumer, of nested batches. It reads the parents after each answer.

A plan has three levels. All calls of a batch are sent at once: its seal, and an ack or a failure for each item, alone;
or the open of the batch that stands for the item. So any of them may end the batch. The answer to the one that does
tells that the batch has paid its parent. Failures cancel some of the batches, and the failure that does so has been
applied.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence

from lastbit import AsyncClient, errors
from tests.chaos.broker import Link
from tests.chaos.consumers import REASON
from tests.chaos.plans import Do, Fate, Plan

TIMEOUT = 60.0
"""Seconds to wait for an answer: so long that each request is sent once."""
AT_ONCE = 4
"""Plans."""


async def nest(client: AsyncClient, link: Link) -> None:
    """Work until the broker stops the actor."""
    while (plans := link.take("plans", AT_ONCE)) is not None:
        await asyncio.gather(*[_do(client, link, tag, Plan.from_json(plan)) for tag, plan in plans])


async def _do(client: AsyncClient, link: Link, tag: int, plan: Plan) -> None:
    try:
        await _resolve(client, plan)
    except errors.LastbitError:
        link.back([tag])
    else:
        link.done([tag])


async def _resolve(client: AsyncClient, plan: Plan, parent: str | None = None, above: Sequence[int] = ()) -> None:
    """Open the batch of this plan for the parent's item, and resolve all of its items. `above` are the batches that may
    end when it ends, the nearest first."""
    is_cancelled = plan.fate is Fate.EXCEEDED
    handle = await client.open(
        key=plan.key,
        group_size=plan.group_size,
        items=plan.first,
        parent=parent,
        tolerated_failures=plan.tolerated if is_cancelled else None,
        on_exceeded="cancel" if is_cancelled else None,
        idempotency_key=f"open-{plan.key}",
    )

    async def look(call: Awaitable[object]) -> None:
        with contextlib.suppress(errors.Conflict):  # a seal, after the failures; the checks judge it
            await call
        for batch in above:
            await client.batch(batch).refresh()

    calls = [look(handle.seal())]
    if plan.children:
        below = (handle.id, *above)
        items = zip(plan.children, handle.ids, strict=True)
        calls += [_resolve(client, child, item, below) for child, item in items]
    else:
        actions = [(plan.do(number), item) for number, item in enumerate(handle.ids)]
        calls += [look(client.ack(item)) for do, item in actions if do is Do.ACK]
        calls += [look(client.fail(item, REASON)) for do, item in actions if do is Do.FAIL]
    await asyncio.gather(*calls)
