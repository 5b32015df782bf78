"""The recipe, taken literally: bits in blobs, and an ack that locks one, sets its bit, and counts them all.

It is what one writes after reading how Carlyle works, in the usual tools: FastAPI with an ordinary `def` endpoint (so a
thread per request, 40 by default), SQLAlchemy's pool and PyMySQL, run by uvicorn. Each ack is one transaction: SELECT …
FOR UPDATE of the group's blob, UPDATE, then a SELECT of all groups of the batch, whose bits are counted in Python. The
groups are as large as Lastbit's, and are inserted when the batch is made.

It is not exact: two acks in different groups may each count before the other commits, and then nobody is the last.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import sqlalchemy as sa
from fastapi import FastAPI
from pydantic import BaseModel
from sqlalchemy.dialects.mysql import VARBINARY

from lastbit.ids import DEFAULT_GROUP_SIZE
from tests.support.servers import ROOT, MariaDB, free_port, wait_until_it_says

THREADS = 40
"""Of the endpoint, as FastAPI has it; each needs a connection."""

metadata = sa.MetaData()
groups = sa.Table(
    "item_groups",
    metadata,
    sa.Column("batch_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("group_no", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("bits", VARBINARY(DEFAULT_GROUP_SIZE // 8), nullable=False),
    sa.Column("size", sa.Integer, nullable=False),
)


class Acks(BaseModel):
    items: list[str]


class Answer(BaseModel):
    acked: int
    complete: bool


def create() -> FastAPI:
    engine = sa.create_engine(os.environ["RECIPE_DATABASE_URL"], pool_size=THREADS)
    app = FastAPI()

    @app.post("/v1/acks")
    def ack(body: Acks) -> Answer:
        with engine.begin() as tx:
            for item in body.items:
                batch, group, index = map(int, item.split(":"))
                its_row = (groups.c.batch_id == batch) & (groups.c.group_no == group)
                bits = bytearray(tx.execute(sa.select(groups.c.bits).where(its_row).with_for_update()).scalar_one())
                bits[index // 8] |= 1 << index % 8
                tx.execute(groups.update().where(its_row).values(bits=bytes(bits)))
            rows = tx.execute(sa.select(groups.c.bits, groups.c.size).where(groups.c.batch_id == batch)).all()
            acked = sum(int.from_bytes(bits, "little").bit_count() for bits, _ in rows)
            return Answer(acked=acked, complete=acked == sum(size for _, size in rows))

    return app


class Recipe:
    """The service on a database of its own, and its batches."""

    def __init__(self, server: MariaDB) -> None:
        self.url = server.new_database().replace("mysql://", "mysql+pymysql://")
        self.port = free_port()
        self._engine = sa.create_engine(self.url, isolation_level="READ COMMITTED")
        metadata.create_all(self._engine)
        self._batches = 0

    def open(self, items: int) -> int:
        self._batches += 1
        size = DEFAULT_GROUP_SIZE
        with self._engine.begin() as tx:
            rows = [
                {
                    "batch_id": self._batches,
                    "group_no": number,
                    "bits": bytes(size // 8),
                    "size": min(items - number * size, size),
                }
                for number in range(-(-items // size))
            ]
            tx.execute(groups.insert(), rows)
        return self._batches

    def acked(self, batch: int) -> int:
        with self._engine.begin() as tx:
            blobs = tx.execute(sa.select(groups.c.bits).where(groups.c.batch_id == batch)).scalars()
            return sum(int.from_bytes(bits, "little").bit_count() for bits in blobs)

    @contextlib.contextmanager
    def served(self) -> Iterator[Recipe]:
        command = [sys.executable, "-m", "uvicorn", "--factory", "bench.peer.recipe:create", "--no-access-log"]
        process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            cwd=ROOT,
            env={**os.environ, "RECIPE_DATABASE_URL": self.url},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until_it_says(process, "Uvicorn running")
            yield self
        finally:
            process.terminate()
            process.wait(60)
            self._engine.dispose()
