"""The recipe, implemented literally: bits in blobs, and an ack that locks one, sets its bit, and counts all bits.

It is a typical implementation of Carlyle's idea with the usual tools: FastAPI with an ordinary `def` endpoint (so a
thread for each request, 40 by default), SQLAlchemy's pool and PyMySQL, run by uvicorn. Each ack is one transaction:
SELECT … FOR UPDATE of the group's blob, UPDATE, then a SELECT of all groups of the batch, whose bits are counted in
Python. The groups are as large as Lastbit's, and are inserted when the batch is opened.

It is not exact: two acks in different groups may each count before the other commits, and then neither is the last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import sqlalchemy as sa
from fastapi import FastAPI
from pydantic import BaseModel
from sqlalchemy.dialects.mysql import VARBINARY

from bench import measure
from lastbit.ids import DEFAULT_GROUP_SIZE
from tests.support.servers import MariaDB

THREADS = 40
"""FastAPI's default number of endpoint threads; each needs a connection."""

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
    """The service on its own database, and its batches."""

    def __init__(self, server: MariaDB) -> None:
        self.url = server.new_database().replace("mysql://", "mysql+pymysql://")
        self.port = 0
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
        with measure.uvicorn("bench.peer.recipe:create", RECIPE_DATABASE_URL=self.url) as port:
            self.port = port
            yield self
        self._engine.dispose()
