"""Why and with which other batch a batch ended, and what it owes its children.

Revision ID: 0023
Revises: 0022
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.add_column("batches", sa.Column("children_due", sa.String(8)))
    op.add_column("batches", sa.Column("children_told", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("ended_by", sa.BigInteger()))
    op.add_column("batches", sa.Column("reason", sa.Text()))
    op.create_index("batches_children_due", "batches", ["children_due"])


def downgrade() -> None:
    op.drop_index("batches_children_due", "batches")
    for column in ("reason", "ended_by", "children_told", "children_due"):
        op.drop_column("batches", column)
