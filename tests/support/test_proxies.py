from __future__ import annotations

import pymysql
import pytest
import sqlalchemy as sa

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
