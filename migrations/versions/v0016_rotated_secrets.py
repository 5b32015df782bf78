"""Rotated secrets of webhooks.

Revision ID: 0016
Revises: 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("webhooks", sa.Column("rotation", sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")))


def downgrade() -> None:
    op.drop_column("webhooks", "rotation")
