"""The journal of acks that arrive out of order.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from core.storage.tables import MYSQL_OPTIONS

revision = "0008"
down_revision = "0007"

BIG = sa.BigInteger()


def upgrade() -> None:
    op.create_table(
        "ack_journal",
        sa.Column("batch_id", BIG, primary_key=True, autoincrement=False),
        sa.Column("entry_no", BIG, primary_key=True, autoincrement=False),
        sa.Column("numbers", sa.LargeBinary, nullable=False),
        postgresql_with={"toast_tuple_target": 8160},
        **MYSQL_OPTIONS,
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE ack_journal ALTER COLUMN numbers SET STORAGE EXTERNAL")
    op.add_column("batches", sa.Column("journal_next", BIG, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("batches", "journal_next")
    op.drop_table("ack_journal")
