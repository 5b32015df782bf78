from __future__ import annotations

import contextlib

import psycopg
import pymysql
import pytest
import sqlalchemy as sa

from tests.support.galera import until
from tests.support.postgresql import PostgreSQL
from tests.support.proxies import Cut, proxied
from tests.support.servers import MariaDB


@pytest.mark.mariadb
@pytest.mark.parametrize("cut", ["before", "amid", "after"])
def test_a_connection_cut_at_its_commit_leaves_no_locks(mariadb: MariaDB, cut: Cut) -> None:
    """A lock that is never released would stop the tests that cut connections, not the service that they test."""
    url = sa.make_url(mariadb.new_database())
    arguments = {"host": url.host, "user": url.username, "password": url.password or "", "database": url.database}
    with proxied(mariadb.port) as proxy, pymysql.connect(port=mariadb.port, **arguments) as direct:
        looking = direct.cursor()
        looking.execute("CREATE TABLE rows_ (id INT PRIMARY KEY)")
        looking.execute("INSERT INTO rows_ VALUES (1)")
        direct.commit()
        cutting = pymysql.connect(port=proxy.port, **arguments)
        cutting.cursor().execute("SELECT * FROM rows_ FOR UPDATE")
        proxy.every = 1
        proxy.cut = cut
        with pytest.raises(pymysql.OperationalError):
            cutting.commit()
        looking.execute("SET SESSION innodb_lock_wait_timeout = 20")
        looking.execute("SELECT * FROM rows_ FOR UPDATE")
    assert proxy.cuts == 1


@pytest.mark.parametrize("cut", ["before", "amid", "after"])
@pytest.mark.parametrize("together", [False, True])
def test_a_connection_cut_at_its_commit_on_postgresql(postgresql: PostgreSQL, cut: Cut, together: bool) -> None:
    """The COMMIT is a packet of its own, or the end of one."""
    name = postgresql.new_database().rpartition("/")[2]
    with proxied(postgresql.port) as proxy, contextlib.closing(postgresql.connect(name)) as direct:
        direct.execute("CREATE TABLE rows_ (id INT PRIMARY KEY)")
        cutting = psycopg.connect(host="127.0.0.1", port=proxy.port, user=postgresql.user, dbname=name, autocommit=True)
        proxy.every = 1
        proxy.cut = cut
        *others, last = ["BEGIN", "INSERT INTO rows_ VALUES (1)", "COMMIT"]
        if together:
            others, last = [], ";".join([*others, last])
        for text in others:
            cutting.execute(text.encode())
        with pytest.raises(psycopg.OperationalError):
            cutting.execute(last.encode())
        sessions = f"SELECT pid FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()"
        until(lambda: not direct.execute(sessions.encode()).fetchall(), 20, lambda: "its session goes on")
        count = len(direct.execute("SELECT 1 FROM rows_").fetchall())
    assert proxy.cuts == 1
    assert count == (1 if cut == "after" else 0)
