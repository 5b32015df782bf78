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


# Add only: the release before works on this schema too, while it is replaced and as the way back. New columns are
# nullable or have a default of the server's. A step that the release before can't live with comes a release later, and
# says first from which revision on it serves: op.execute("UPDATE schema_support SET oldest = '...'"). See decision 0014.


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
