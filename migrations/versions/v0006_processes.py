"""Process managers: instances, inbox, outbox, timers. The previous release has none.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from core.storage.tables import MYSQL_OPTIONS

revision = "0006"
down_revision = "0005"

BIG = sa.BigInteger()
TIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
TEXT = (
    sa.String(255)
    .with_variant(mysql.VARBINARY(1020), "mysql", "mariadb")
    .with_variant(sa.String(510, "C"), "postgresql")
)
LONG = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def ascii_text(characters: int) -> sa.types.TypeEngine[str]:
    return (
        sa.String(characters)
        .with_variant(mysql.VARBINARY(characters), "mysql", "mariadb")
        .with_variant(sa.String(characters, "C"), "postgresql")
    )


NAME = ascii_text(200)
ID = ascii_text(36)


def upgrade() -> None:
    op.create_table(
        "process_definitions",
        sa.Column("name", NAME, primary_key=True),
        sa.Column("pruned", BIG, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("deleted_at", TIME),
        **MYSQL_OPTIONS,
    )
    op.create_table(
        "processes",
        sa.Column("name", NAME, primary_key=True),
        sa.Column("instance", TEXT, primary_key=True),
        sa.Column("state", LONG),
        sa.Column("version", BIG, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.Column("finished_at", TIME),
        **MYSQL_OPTIONS,
    )
    op.create_index("processes_status", "processes", ["name", "status", "instance"])
    op.create_table(
        "inbox",
        sa.Column("name", NAME, primary_key=True),
        sa.Column("instance", TEXT, primary_key=True),
        sa.Column("event_id", TEXT, primary_key=True),
        sa.Column("position", BIG, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("event", LONG),
        sa.Column("handled_at", TIME, nullable=False),
        **MYSQL_OPTIONS,
    )
    op.create_index("inbox_position", "inbox", ["name", "status", "position"])
    op.create_table(
        "outbox",
        sa.Column("command_id", ID, primary_key=True),
        sa.Column("position", BIG, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("instance", TEXT, nullable=False),
        sa.Column("step", TEXT, nullable=False),
        sa.Column("type", NAME, nullable=False),
        sa.Column("data", LONG),
        sa.Column("created_at", TIME, nullable=False),
        sa.UniqueConstraint("position", name="outbox_position"),
        **MYSQL_OPTIONS,
    )
    op.create_index("outbox_instance", "outbox", ["name", "instance"])
    op.create_table(
        "timers",
        sa.Column("name", NAME, primary_key=True),
        sa.Column("instance", TEXT, primary_key=True),
        sa.Column("timer", TEXT, primary_key=True),
        sa.Column("token", ID, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("data", LONG),
        **MYSQL_OPTIONS,
    )
    op.create_index("timers_due", "timers", ["due_at"])


def downgrade() -> None:
    for table in ("timers", "outbox", "inbox", "processes", "process_definitions"):
        op.drop_table(table)
