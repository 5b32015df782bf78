"""Webhooks, their deliveries and attempts. The previous release has none, and delivers no events.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from core.storage.tables import MYSQL_OPTIONS

revision = "0003"
down_revision = "0002"

BIG = sa.BigInteger()
ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")


def ascii_text(characters: int) -> sa.types.TypeEngine[str]:
    return (
        sa.String(characters)
        .with_variant(mysql.VARBINARY(characters), "mysql", "mariadb")
        .with_variant(sa.String(characters, "C"), "postgresql")
    )


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", ID, sa.Identity(), primary_key=True, autoincrement=True),
        sa.Column("url", ascii_text(2048), nullable=False),
        sa.Column("types", sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")),
        sa.Column(
            "label",
            sa.String(255)
            .with_variant(mysql.VARBINARY(1020), "mysql", "mariadb")
            .with_variant(sa.String(510, "C"), "postgresql"),
        ),
        sa.Column("secret", ascii_text(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("position", BIG, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sqlite_autoincrement=True,
        **MYSQL_OPTIONS,
    )
    op.create_table(
        "deliveries",
        sa.Column("id", ID, sa.Identity(), primary_key=True, autoincrement=True),
        sa.Column("webhook_id", BIG, nullable=False),
        sa.Column("position", BIG, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_at", TIME),
        sa.Column("token", sa.LargeBinary().with_variant(mysql.VARBINARY(16), "mysql", "mariadb")),
        sa.UniqueConstraint("webhook_id", "position", name="deliveries_webhook"),
        sa.Index("deliveries_due", "state", "due_at", "webhook_id"),
        sa.Index("deliveries_state", "state", "position"),
        sa.Index("deliveries_position", "position"),
        sqlite_autoincrement=True,
        **MYSQL_OPTIONS,
    )
    op.create_table(
        "delivery_attempts",
        sa.Column("id", ID, sa.Identity(), primary_key=True, autoincrement=True),
        sa.Column("delivery_id", BIG, nullable=False),
        sa.Column("attempted_at", TIME, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("error", sa.String(255)),
        sa.Column("milliseconds", sa.Integer, nullable=False),
        sa.Index("delivery_attempts_delivery", "delivery_id", "id"),
        sqlite_autoincrement=True,
        **MYSQL_OPTIONS,
    )


def downgrade() -> None:
    for table in ("delivery_attempts", "deliveries", "webhooks"):
        op.drop_table(table)
