"""The usual recipe as a service: a row for each item, a counter in the batch's row, and a thread for each request.

The tables are those of `rows`, without the index of pending items. The service uses the usual tools: FastAPI with
ordinary `def` endpoints (so a thread for each request, 40 by default), SQLAlchemy's pool and PyMySQL, run by uvicorn.
Each request is one transaction. Paths, bodies and the fields that the benchmarks check are Lastbit's, so the same load
drives both.

It promises less: no idempotency keys, no failures, no feed, no expiry, and a row for each item to delete in the end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import sqlalchemy as sa
from fastapi import FastAPI
from pydantic import BaseModel
from sqlalchemy.engine import Connection

from bench import measure
from bench.peer.recipe import THREADS
from lastbit.ids import DEFAULT_GROUP_SIZE
from tests.support.servers import MariaDB

metadata = sa.MetaData()
batches = sa.Table(
    "batches",
    metadata,
    sa.Column("id", sa.BigInteger, primary_key=True),
    sa.Column("total", sa.BigInteger, nullable=False),
    sa.Column("pending", sa.BigInteger, nullable=False),
    sa.Column("sealed", sa.Boolean, nullable=False),
)
items = sa.Table(
    "items",
    metadata,
    sa.Column("batch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("done", sa.Boolean, nullable=False),
)


class Opening(BaseModel):
    items: int = 0
    sealed: bool = False


class Extension(BaseModel):
    count: int


class Batch(BaseModel):
    id: int
    items: int
    pending: int
    state: str


class Issued(BaseModel):
    batch: int
    start: int
    count: int
    items: int


class Watermark(BaseModel):
    watermark: int


class Acks(BaseModel):
    items: list[str]


class Completed(BaseModel):
    batch: int
    newly: bool


class Acked(BaseModel):
    applied: int
    completed: list[Completed]


def _insert(tx: Connection, batch: int, start: int, count: int) -> None:
    if count:
        rows = [{"batch": batch, "number": number, "done": False} for number in range(start, start + count)]
        tx.execute(items.insert(), rows)


def _read(tx: Connection, batch: int) -> Batch:
    row = tx.execute(sa.select(batches).where(batches.c.id == batch)).one()
    state = "open" if not row.sealed else "sealed" if row.pending else "complete"
    return Batch(id=row.id, items=row.total, pending=row.pending, state=state)


def create() -> FastAPI:
    engine = sa.create_engine(os.environ["RECIPE_DATABASE_URL"], pool_size=THREADS)
    app = FastAPI()

    @app.post("/v1/batches", status_code=201)
    def open_batch(body: Opening) -> Batch:
        with engine.begin() as tx:
            row = {"total": body.items, "pending": body.items, "sealed": body.sealed}
            batch = tx.execute(batches.insert(), row).lastrowid
            _insert(tx, batch, 0, body.items)
            return Batch(id=batch, items=body.items, pending=body.items, state="sealed" if body.sealed else "open")

    @app.post("/v1/batches/{batch}/items", status_code=201)
    def extend(batch: int, body: Extension) -> Issued:
        with engine.begin() as tx:
            columns = {"total": batches.c.total + body.count, "pending": batches.c.pending + body.count}
            tx.execute(batches.update().where(batches.c.id == batch).values(columns))
            total = _read(tx, batch).items
            _insert(tx, batch, total - body.count, body.count)
            return Issued(batch=batch, start=total - body.count, count=body.count, items=total)

    @app.post("/v1/batches/{batch}/seal")
    def seal(batch: int) -> Batch:
        with engine.begin() as tx:
            tx.execute(batches.update().where(batches.c.id == batch).values(sealed=True))
            return _read(tx, batch)

    @app.get("/v1/batches/{batch}")
    def status(batch: int) -> Batch:
        with engine.connect() as tx:
            return _read(tx, batch)

    @app.get("/v1/batches/{batch}/watermark")
    def watermark(batch: int) -> Watermark:
        with engine.connect() as tx:
            pending = (items.c.batch == batch) & ~items.c.done
            first = tx.execute(sa.select(sa.func.min(items.c.number)).where(pending)).scalar_one()
            return Watermark(watermark=_read(tx, batch).items if first is None else first)

    @app.post("/v1/acks")
    def ack(body: Acks) -> Acked:
        applied = 0
        completed: list[Completed] = []
        with engine.begin() as tx:
            for item in body.items:
                batch, group, index = map(int, item.split(":"))
                row = (items.c.batch == batch) & (items.c.number == group * DEFAULT_GROUP_SIZE + index)
                count = tx.execute(items.update().where(row & ~items.c.done).values(done=True)).rowcount
                counted = {"pending": batches.c.pending - count}
                tx.execute(batches.update().where(batches.c.id == batch).values(counted))
                applied += count
                if _read(tx, batch).state == "complete":
                    completed.append(Completed(batch=batch, newly=count > 0))
        return Acked(applied=applied, completed=completed)

    return app


@contextlib.contextmanager
def served(server: MariaDB) -> Iterator[int]:
    """Run the service on its own database; yield its port."""
    url = server.new_database().replace("mysql://", "mysql+pymysql://")
    engine = sa.create_engine(url)
    metadata.create_all(engine)
    engine.dispose()
    with measure.uvicorn("bench.peer.row_recipe:create", RECIPE_DATABASE_URL=url) as port:
        yield port
