"""The positions of the sources that a tally counts by ranges. The previous release has none.

Revision ID: 0027
Revises: 0026
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from core.storage.tables import MYSQL_OPTIONS, Blob

revision = "0027"
down_revision = "0026"

BIG = sa.BigInteger()
NAME = (
    sa.String(255)
    .with_variant(mysql.VARBINARY(255), "mysql", "mariadb")
    .with_variant(sa.String(255, "C"), "postgresql")
)
TEXT = (
    sa.String(255)
    .with_variant(mysql.VARBINARY(1020), "mysql", "mariadb")
    .with_variant(sa.String(510, "C"), "postgresql")
)


def upgrade() -> None:
    op.create_table(
        "tally_sources",
        sa.Column("tally", NAME, primary_key=True),
        sa.Column("topic", TEXT, primary_key=True),
        sa.Column("partition_no", BIG, primary_key=True, autoincrement=False),
        sa.Column("generation", BIG, primary_key=True, autoincrement=False),
        sa.Column("position", Blob(128), nullable=False),
        postgresql_with={"fillfactor": 60},
        **MYSQL_OPTIONS,
    )


def downgrade() -> None:
    op.drop_table("tally_sources")
