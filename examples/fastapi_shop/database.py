"""The tables, the engine, and Lastbit on it, with a schema of its own."""

from __future__ import annotations

import os

from sqlalchemy import JSON, BigInteger, ForeignKey, String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from lastbit.embedded import Lastbit


class Table(DeclarativeBase):
    pass


class Order(Table):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    batch: Mapped[int] = mapped_column(BigInteger, unique=True)
    parcels: Mapped[list[str]] = mapped_column(JSON)
    """Their names. The item of each has its position in this list as its number."""


class Charge(Table):
    __tablename__ = "charges"
    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[int] = mapped_column(ForeignKey(Order.id))
    parcel: Mapped[str] = mapped_column(String(200))


engine = create_engine(os.environ.get("DATABASE_URL", "postgresql+psycopg://app@127.0.0.1/app"))
Session = sessionmaker(engine, expire_on_commit=False)
lastbit = Lastbit(engine, schema="lastbit")
