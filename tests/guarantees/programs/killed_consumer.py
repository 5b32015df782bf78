"""A consumer that is killed at any time: `python -m tests.guarantees.programs.killed_consumer KIND URL RECORD ITEM…`.

It takes pending items at random until no batch has one. KIND is `embedded` (URL: the database; each item gets a row in
`effects`, in the transaction of its ack) or `http` (URL: the service). Each result is appended to the file RECORD.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from lastbit import Client, Retry, errors
from lastbit.embedded import Lastbit
from lastbit.models import AckResult
from tests import mutants

EFFECTS = sa.Table(
    "effects",
    sa.MetaData(),
    sa.Column("item", sa.String(40), nullable=False),
    sa.Column("process", sa.Integer, nullable=False),
)
AT_ONCE = 100
"""Items that are taken at once; other consumers may have the same ones."""
MERGED = 2
"""Items of one call to the service."""
SLOWER = 0.03
"""Seconds that a consumer of the service waits between calls, as it would take all items before the others begin."""
FAILING = 0.05
"""Share of the effects that fail after they have written."""
PAUSE = threading.Event()

Resolve = Callable[[Sequence[str]], AckResult]


class EffectFailed(Exception):
    pass


def _once(lastbit: Lastbit, dice: random.Random) -> Resolve:
    def resolve(items: Sequence[str]) -> AckResult:
        def effect(tx: Any) -> None:
            tx.execute(sa.insert(EFFECTS).values(item=items[0], process=os.getpid()))
            if dice.random() < FAILING:
                raise EffectFailed

        return lastbit.once(items[0], effect)

    return resolve


def _slowly(client: Client) -> Resolve:
    def resolve(items: Sequence[str]) -> AckResult:
        PAUSE.wait(SLOWER)
        return client.ack(items)

    return resolve


def _pending(client: Client, batches: Sequence[int], dice: random.Random) -> Iterator[list[str]]:
    """Items to resolve, until no batch has any."""
    left = list(batches)
    while left:
        batch = client.batch(dice.choice(left))
        items = [item for span in batch.pending() for item in span.ids]
        if items:
            yield dice.sample(items, min(AT_ONCE, len(items)))
        elif batch.refresh().complete:
            left.remove(batch.id)
        else:
            PAUSE.wait(0.05)  # what waits is moved within a second


def _work(client: Client, batches: Sequence[int], resolve: Resolve, size: int, record: Path) -> None:
    dice = random.Random()
    with record.open("a", buffering=1) as file:
        for items in _pending(client, batches, dice):
            for start in range(0, len(items), size):
                chosen = items[start : start + size]
                result = resolve(chosen)
                newly = [completed.batch for completed in result.completed if completed.newly]
                applied = chosen if result.applied == len(chosen) else []
                file.write(json.dumps({"applied": applied, "newly": newly}) + "\n")


def main(kind: str, url: str, record: Path, batches: Sequence[int]) -> None:
    retry = Retry(attempts=10_000, deadline=300, cap=0.2)
    while True:
        try:
            if kind == "http":
                with Client(url, retry=retry) as client:
                    _work(client, batches, _slowly(client), MERGED, record)
            else:
                engine = sa.create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True)
                with Lastbit(engine, connections=3) as lastbit:
                    _work(lastbit.client(retry=retry), batches, _once(lastbit, random.Random()), 1, record)
            return
        except (EffectFailed, errors.LastbitError, sa.exc.DBAPIError) as error:
            if not isinstance(error, EffectFailed):
                print(repr(error)[:300], file=sys.stderr, flush=True)
                PAUSE.wait(0.1)  # the database may be away


if __name__ == "__main__":
    mutants.from_environment()
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), [int(batch) for batch in sys.argv[4:]])
