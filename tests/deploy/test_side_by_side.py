"""The nginx example for Lastbits side by side, run: each call of a batch reaches the Lastbit that has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from core.storage import schema
from core.storage.database import Database
from core.storage.numbering import Numbering
from lastbit import Client, errors
from lastbit.ids import ItemIds
from tests.conftest import need
from tests.support import nginx
from tests.support.servers import free_port, running_service

pytestmark = pytest.mark.xdist_group("side-by-side")


@dataclass(frozen=True)
class Sides:
    """The URL of the front, and those of the two behind it, by the last digit of their ids."""

    front: str
    behind: tuple[str, str]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    need("nginx", nginx.PROGRAM is not None)
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    urls = [f"sqlite:///{folder}/{digit}.db" for digit in range(2)]
    for digit, url in enumerate(urls):
        with Database(url) as database:
            schema.migrate(database, ids=Numbering(digit, 10))
    with running_service(urls[0]) as north, running_service(urls[1]) as south:
        replacements = {
            "server 127.0.0.1:8000;": f"server 127.0.0.1:{north.port};",
            "server 127.0.0.1:8001;": f"server 127.0.0.1:{south.port};",
            "listen 8080;": f"listen 127.0.0.1:{port};",
            "    listen [::]:8080;\n": "",
        }
        with nginx.running_nginx(folder, nginx.example("side-by-side.conf", replacements), port):
            yield Sides(f"http://127.0.0.1:{port}", (north.url, south.url))


@pytest.fixture
def client(sides: Sides) -> Iterator[Client]:
    with Client(sides.front) as front:
        yield front


def one_of_each(client: Client, **options: int) -> list[int]:
    """A batch of each, by the last digit of its id."""
    batches: dict[int, int] = {}
    for _ in range(200):
        batch = client.open(**options).id  # type: ignore[arg-type]
        batches.setdefault(batch % 10, batch)
        if len(batches) == 2:
            return [batches[0], batches[1]]
    raise AssertionError(batches)


def test_the_calls_of_a_batch_reach_the_one_that_has_it(sides: Sides, client: Client) -> None:
    """Its whole life, with each kind of call."""
    for digit, id in enumerate(one_of_each(client, items=70)):
        batch = client.batch(id)
        ids = [*ItemIds(id, 8192, range(70)), *batch.extend(10, idempotency_key="more")]
        assert list(batch.extend(10, idempotency_key="more")) == ids[70:]
        assert batch.update(labels={"side": str(digit)}).labels == {"side": str(digit)}
        assert client.ack(ids[:8]).applied == 8
        assert client.ack(ItemIds(id, 8192, range(8, 70))).applied == 62
        assert client.skip(ids[70]).applied == 1
        assert client.fail(ids[71:73], "broken").applied == 2
        assert [(found.start, found.end) for found in batch.failed()] == [(71, 73)]
        assert [(found.start, found.end) for found in batch.skipped()] == [(70, 71)]
        assert sum(found.end - found.start for found in batch.pending()) == 7
        assert batch.failure_reasons().reasons[0].reason == "broken"
        assert batch.watermark().watermark == 73
        assert batch.verify().ok
        assert not batch.repair(dry_run=True).needed
        assert batch.explain().batch == id
        assert batch.history()
        child = client.open(items=1, sealed=True, parent=ids[73])
        assert child.id % 10 == digit
        client.ack(f"{child.id}:0:0")
        assert client.ack(ids[74:]).applied == 6
        batch.seal()
        assert batch.wait(timeout=30).complete
        assert sum(batch.progress().batches.values()) == 2
        names = [event.type for event in client.events(batch=id, after=0).events]
        assert (names[0], "batch.completed" in names) == ("batch.opened", True)
        with Client(sides.behind[digit]) as own, Client(sides.behind[1 - digit]) as other:
            assert own.batch(id).refresh().labels == {"side": str(digit)}
            with pytest.raises(errors.BatchNotFound):
                other.batch(id).refresh()
            assert all(found.id % 10 == digit for found in own.batches())
        child.delete()
        batch.delete()
        with pytest.raises(errors.BatchNotFound):
            batch.refresh()


def test_a_repeated_open_reaches_the_same_one(client: Client) -> None:
    id_of_key = {key: client.open(items=1, idempotency_key=key).id for key in map(str, range(40))}
    assert {id % 10 for id in id_of_key.values()} == {0, 1}
    assert {key: client.open(items=1, idempotency_key=key).id for key in id_of_key} == id_of_key


def test_items_of_two_in_one_call_are_rejected_and_can_be_sent_again(client: Client) -> None:
    north, south = (f"{id}:0:0" for id in one_of_each(client, items=1))
    result = client.ack([north, south])
    assert (result.applied, [rejection.item for rejection in result.rejected]) == (1, [south])
    assert result.rejected[0].reason == "unknown_batch"
    assert client.ack(south).applied == 1


def test_a_client_without_the_header_may_name_the_batch_in_the_path(sides: Sides, client: Client) -> None:
    for id in one_of_each(client, items=1):
        assert httpx.get(f"{sides.front}/v1/batches/{id}").json()["id"] == id
        acked = httpx.post(f"{sides.front}/v1/acks", json={"items": [f"{id}:0:0"]}, headers={"Lastbit-Batch": str(id)})
        assert acked.json()["applied"] == 1


@pytest.mark.parametrize("path", ["/v1/events", "/v1/batches", "/v1/batches/counts", "/v1/webhooks", "/v1/batches/7"])
def test_calls_of_no_batch_are_refused_by_the_front(sides: Sides, path: str) -> None:
    """And those of a batch that none of them could have."""
    response = httpx.get(sides.front + path)
    assert (response.status_code, response.json()["code"]) == (421, "misdirected")
    assert response.headers["content-type"] == "application/problem+json"
