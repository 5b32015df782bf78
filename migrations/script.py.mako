"""${message}

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


# Only add: the previous release uses this schema too, during an upgrade and after going back. New columns are nullable or
# have a server default. A step that breaks the previous release belongs in a later release, and must first set the oldest
# revision that it serves: op.execute("UPDATE schema_support SET oldest = '...'"). See decision 0014.


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
