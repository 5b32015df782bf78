"""Lastbit on a database of Django's settings."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import sqlalchemy as sa

from tests.support.servers import ROOT

pytestmark = [pytest.mark.mariadb]

PROGRAM = """
import json, sys
import django
from django.conf import settings

settings.configure(DATABASES={"default": json.loads(sys.argv[1])}, INSTALLED_APPS=[])
django.setup()

from django.db import connection, transaction

from lastbit import errors
from lastbit.embedded import Lastbit

lastbit = Lastbit.from_django()
lastbit.migrate()
with connection.cursor() as cursor:
    cursor.execute("CREATE TABLE charges (item varchar(40))")


def charge(tx):
    with tx.cursor() as cursor:
        cursor.execute("INSERT INTO charges VALUES (%s)", ["100 %"])


def rows():
    with connection.cursor() as cursor:
        cursor.execute("SELECT item FROM charges")
        return [item for (item,) in cursor.fetchall()]


with transaction.atomic():
    batch = lastbit.open(connection, key="order-7", items=3, sealed=True)
try:
    lastbit.ack(connection, batch.ids[0])
except errors.InvalidArgument as error:
    print(error)
results = [lastbit.once(item, charge).applied for item in (batch.ids[0], batch.ids[0], batch.ids[1])]
try:
    with transaction.atomic():
        lastbit.ack(connection, batch.ids[2])
        with transaction.atomic():
            charge(connection)
            raise ZeroDivisionError
except ZeroDivisionError:
    pass
with transaction.atomic():
    lastbit.ack(connection, batch.ids[2])
    try:
        with transaction.atomic():
            charge(connection)
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
lastbit.client().batch(batch.id).wait(timeout=30)
print(json.dumps([results, rows(), lastbit.client().batch(batch.id).refresh().state]))
lastbit.close()
"""


def django_settings(url: sa.URL) -> dict[str, object]:
    if url.get_backend_name() == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": url.database}
    address = {"HOST": url.host, "PORT": url.port, "USER": url.username, "PASSWORD": url.password}
    return {"ENGINE": "django.db.backends.postgresql", "NAME": url.database, **address}


def test_effects_and_acks_in_atomic_blocks(database_url: str) -> None:
    url = sa.make_url(database_url)
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        pytest.skip("Django's driver of MariaDB, mysqlclient, is not on PyPI as a wheel")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(django_settings(url))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    error, facts = result.stdout.strip().splitlines()
    assert "transaction.atomic" in error
    assert json.loads(facts) == [[1, 0, 1], ["100 %", "100 %"], "complete"]
