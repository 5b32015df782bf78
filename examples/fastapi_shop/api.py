"""Takes orders, and tells how far they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

from examples.fastapi_shop.database import Order, Session, Table, engine, lastbit
from examples.fastapi_shop.messages import send_pending


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    Table.metadata.create_all(engine)
    lastbit.migrate()
    yield
    lastbit.close()


app = FastAPI(lifespan=lifespan)


@app.post("/orders")
def place_order(parcels: list[str]) -> dict[str, int]:
    with Session.begin() as session:  # the order and its batch: both are committed, or none
        batch = lastbit.open(session, key="order", items=len(parcels), sealed=True)
        order = Order(batch=batch.id, parcels=parcels)
        session.add(order)
    return {"order": order.id, "sent": send_pending(order)}


@app.post("/orders/{number}/send")
def send_again(number: int) -> dict[str, int]:
    """For messages that were never sent, as the process died after the commit, or that are lost."""
    return {"order": number, "sent": send_pending(found(number))}


@app.get("/orders/{number}")
def show(number: int) -> dict[str, int | str]:
    batch = lastbit.client().batch(found(number).batch).refresh()
    return {"order": number, "state": batch.state, "charged": batch.acked, "pending": batch.pending}


def found(number: int) -> Order:
    with Session() as session:
        order = session.get(Order, number)
    if order is None:
        raise HTTPException(404)
    return order
