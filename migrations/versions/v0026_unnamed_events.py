"""Processes: how many events named no instance, and up to which position they were counted.

Revision ID: 0026
Revises: 0025
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    for name in ("unnamed", "unnamed_upto"):
        op.add_column("process_definitions", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    for name in ("unnamed_upto", "unnamed"):
        op.drop_column("process_definitions", name)
