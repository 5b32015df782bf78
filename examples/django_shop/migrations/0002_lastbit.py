"""Lastbit's tables, in the same database. After an upgrade of Lastbit, call `migrate` in another migration."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from lastbit.embedded import Lastbit


def migrate(_: Any, editor: Any) -> None:
    with Lastbit.from_django(editor.connection.alias) as lastbit:
        lastbit.migrate()


class Migration(migrations.Migration):
    atomic = False  # Lastbit has a connection of its own
    dependencies = (("django_shop", "0001_initial"),)
    operations = (migrations.RunPython(migrate, migrations.RunPython.noop),)
