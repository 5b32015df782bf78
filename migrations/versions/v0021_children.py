"""The number of children that were opened under a batch's items.

Revision ID: 0021
Revises: 0020
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"

_PAGE = 500


def upgrade() -> None:
    op.add_column("batches", sa.Column("children", sa.BigInteger(), nullable=False, server_default="0"))
    batches = sa.table("batches", *map(sa.column, ("id", "state", "parent_batch", "parent_due", "children")))
    # Of earlier children, those that still hold an item matter. They are few, and found by an index.
    connection = op.get_bind()
    parents: set[int] = set()
    for holds in (batches.c.state.in_(["open", "sealed"]), batches.c.parent_due > ""):
        query = sa.select(batches.c.parent_batch).where(holds, batches.c.parent_batch.is_not(None))
        parents.update(connection.scalars(query))
    ids = sorted(parents)
    for start in range(0, len(ids), _PAGE):
        some = batches.c.id.in_(ids[start : start + _PAGE])
        connection.execute(sa.update(batches).where(some, batches.c.children == 0).values(children=1))


def downgrade() -> None:
    op.drop_column("batches", "children")
