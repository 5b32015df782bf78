"""The oldest schema that this release upgrades. No database is brought to it: a new one gets the newest schema at once
(see `core.storage.schema`).

Revision ID: 0016
Revises:
"""

from __future__ import annotations

revision = "0016"
down_revision = None


def upgrade() -> None:
    raise RuntimeError("the database is new: create its tables with `python -m api migrate`")


def downgrade() -> None:
    raise RuntimeError("there is no schema before this one")
