"""PostgreSQL with a synchronous standby: the primary is killed under load, and the standby is promoted.

A request that got a 200 is on both servers, so no promotion loses it; a COMMIT that was waiting for the standby may be
lost or not, and its request got a 503 or no answer. `make failover` promotes 50 times.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from core import feed
from core.storage import schema
from core.storage.database import Database
from tests.conftest import need
from tests.guarantees.drivers.load import Load, check, open_shared
from tests.support.galera import until
from tests.support.postgresql import programs
from tests.support.postgresql_pair import Pair, running_pair
from tests.support.servers import running_service

PROMOTIONS = int(os.environ.get("LASTBIT_PROMOTIONS", "3"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + 60 * PROMOTIONS)]


@pytest.fixture
def pair() -> Iterator[Pair]:
    need("postgresql", programs() is not None)
    with running_pair() as running:
        yield running


def test_promotions_under_load_lose_no_answered_ack(pair: Pair) -> None:
    """Two services. The feed of the last primary has no gap and no duplicate."""
    url = pair.url(pair.primary.new_database())
    with Database(url) as database:
        schema.migrate(database)
        shared_batch = open_shared(database)
        with running_service(url) as service, running_service(url) as second_service:
            with (
                Load(service.url, shared_batch, threads=2) as load,
                Load(second_service.url, shared_batch, threads=2) as second_load,
            ):
                loads = (load, second_load)
                for number in range(PROMOTIONS):
                    for each in loads:
                        each.reaches(20, 120)
                    pair.fail_over()
                    pair.rejoin()
                    answered = sum(each.answered for each in loads)
                    lost = sum(each.lost + each.statuses[503] for each in loads)
                    print(f"promotion {number + 1}: {answered:,} acks answered, {lost:,} requests refused or lost")
                for each in loads:
                    each.reaches(20, 120)
            for each in loads:
                check(each, database)
        events = database.snapshot(feed.read, 0, 10_000_000).events
    assert [event.position for event in events] == list(range(1, len(events) + 1))
    assert len({event.id for event in events}) == len(events)
    completed = Counter(event.batch for event in events if event.type == "batch.completed")
    assert {completed[batch] for each in loads for batch in each.finished} == {1}
    assert any(each.lost or each.statuses[503] for each in loads), "no promotion came between a request and its answer"


@pytest.mark.parametrize("reaches_standby", [False, True])
def test_an_ack_that_waits_for_the_standby_is_not_answered(pair: Pair, reaches_standby: bool) -> None:
    """The primary has committed it, and is killed. Sent again, it is applied, or found applied if the standby has
    it."""
    url = pair.url(pair.primary.new_database())
    if reaches_standby:
        # The standby flushes the commit, and answers once it has replayed it.
        pair.set_on_primary("synchronous_commit", "remote_apply")
    with Database(url) as database:
        schema.migrate(database)
        with running_service(url) as service, httpx.Client(base_url=service.url, timeout=90) as client:
            batch = client.post("/v1/batches", json={"items": 3}).json()["id"]

            def ack() -> httpx.Response:
                return client.post("/v1/acks", json={"items": [f"{batch}:0:1"]}, headers={"Idempotency-Key": "one"})

            if reaches_standby:
                pair.pause_replay()
            else:
                pair.standby.kill()
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(ack)
                until(lambda: pair.waiting_commits() == 1, 30, lambda: "no commit waits for the standby")
                assert not answer.done()
                if not reaches_standby:
                    pair.primary.kill()
                    pair.standby.start()
                pair.fail_over()
                assert answer.result().status_code == 503
            pair.rejoin()
            second = ack().json()
            assert (second["applied"], second["repeated"]) == ((0, 1) if reaches_standby else (1, 0))
            assert client.get(f"/v1/batches/{batch}").json()["acked"] == 1


def test_an_ack_whose_wait_for_the_standby_is_cancelled_is_not_answered(pair: Pair) -> None:
    """The server then reports the COMMIT as successful. The call is repeated, and waits for the standby again."""
    url = pair.url(pair.primary.new_database())
    with Database(url) as database:
        schema.migrate(database)
        with running_service(url) as service, httpx.Client(base_url=service.url, timeout=90) as client:
            batch = client.post("/v1/batches", json={"items": 3}).json()["id"]
            pair.standby.kill()
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(client.post, "/v1/acks", json={"items": [f"{batch}:0:1"]})
                for _ in range(2):
                    until(lambda: answer.done() or pair.waiting_commits() == 1, 30, lambda: "no commit waits")
                    assert not answer.done(), "it was answered, and the standby lacks it"
                    ended = functools.partial(pair.is_over, pair.cancel_waiting_commits())
                    until(lambda ended=ended: answer.done() or ended(), 30, lambda: "the session goes on")
                pair.standby.start()
                assert answer.result().status_code in (200, 503)
            pair.wait_until_synchronous()
            answered = answer.result().status_code == 200
            pair.fail_over()
            pair.rejoin()
            assert client.get(f"/v1/batches/{batch}").json()["acked"] == 1 or not answered
