"""Consumer groups, their workers and partitions. The previous release has none.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from core.storage.tables import MYSQL_OPTIONS

revision = "0004"
down_revision = "0003"

BIG = sa.BigInteger()
TIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
NAME = (
    sa.String(255)
    .with_variant(mysql.VARBINARY(1020), "mysql", "mariadb")
    .with_variant(sa.String(510, "C"), "postgresql")
)
SESSION = (
    sa.String(64).with_variant(mysql.VARBINARY(64), "mysql", "mariadb").with_variant(sa.String(64, "C"), "postgresql")
)


def upgrade() -> None:
    op.create_table(
        "consumer_groups",
        sa.Column("name", NAME, primary_key=True),
        sa.Column("partitions", sa.Integer, nullable=False),
        sa.Column("partition_of", sa.String(16), nullable=False),
        sa.Column("ttl_ms", BIG, nullable=False),
        sa.Column("release_ms", BIG, nullable=False),
        sa.Column("first_epoch", BIG, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("deleted_at", TIME),
        **MYSQL_OPTIONS,
    )
    op.create_table(
        "consumers",
        sa.Column("group_name", NAME, primary_key=True),
        sa.Column("worker", NAME, primary_key=True),
        sa.Column("session", SESSION, nullable=False),
        sa.Column(
            "replaced",
            sa.String(640)
            .with_variant(mysql.VARBINARY(640), "mysql", "mariadb")
            .with_variant(sa.String(640, "C"), "postgresql"),
            nullable=False,
        ),
        sa.Column("capacity", sa.Integer),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("last_seen", TIME, nullable=False),
        sa.Column("lease_until", TIME, nullable=False),
        postgresql_with={"fillfactor": 60},
        **MYSQL_OPTIONS,
    )
    op.create_table(
        "positions",
        sa.Column("group_name", NAME, primary_key=True),
        sa.Column("partition_no", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("owner", NAME),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("owned_since", TIME),
        sa.Column("release_by", TIME),
        sa.Column("floor", BIG),
        sa.Column("high", BIG),
        sa.Column("head", BIG),
        sa.Column("outstanding", sa.LargeBinary),
        sa.Column("outstanding_count", sa.Integer),
        sa.Column("token", sa.Text),
        sa.Column("updated_at", TIME),
        postgresql_with={"fillfactor": 60},
        **MYSQL_OPTIONS,
    )


def downgrade() -> None:
    for table in ("positions", "consumers", "consumer_groups"):
        op.drop_table(table)
