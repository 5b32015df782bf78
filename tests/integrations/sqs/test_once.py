"""A handler that runs an effect once for its item, with a consumer that has the same `Lastbit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from lastbit import Completed
from lastbit.embedded import Lastbit
from lastbit.integrations import current_item, sqs
from tests.support.aws import Moto

COUNT = 20


def test_a_handler_has_one_effect_for_each_message(moto: Moto, tmp_path: Path) -> None:
    """Although it runs twice for each. The end is reported to `on_completed` too, at least once."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/app.db")
    with engine.begin() as tx:
        tx.execute(sa.text("CREATE TABLE charges (parcel TEXT)"))
    queue = moto.queue()
    reported: list[Completed] = []
    with Lastbit(engine) as lastbit:
        lastbit.migrate()
        batch = sqs.fan_out(queue.client, queue.url, map(str, range(COUNT)), key="parcels", lastbit=lastbit)

        def handle(message: Any) -> None:
            item = current_item()
            assert item is not None
            insert = sa.text("INSERT INTO charges VALUES (:parcel)").bindparams(parcel=message["Body"])
            for _ in range(2):
                lastbit.once(item, lambda tx: tx.execute(insert))

        sqs.consume(
            queue.client,
            queue.url,
            handle,
            wait_seconds=0,
            until_empty=True,
            lastbit=lastbit,
            on_completed=reported.append,
        )
        assert batch.refresh().succeeded
        assert batch.verify().ok
    assert {completed.batch for completed in reported} == {batch.id}
    with engine.connect() as tx:
        assert sorted(map(int, tx.scalars(sa.text("SELECT parcel FROM charges")))) == list(range(COUNT))
    engine.dispose()
