"""Kafka's surface: a recorded log with a client that behaves as the real ones do, and confluent-kafka itself on the
mock cluster that librdkafka brings."""

from __future__ import annotations

import base64
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import confluent_kafka
import kafka
import kafka.errors
import pytest

from lastbit.streams import SessionEnded, Snapshot, run_ordered
from lastbit.streams.sources.kafka import AHEAD, KafkaPython, KafkaTopics, Place, Position
from tests.streams import crash
from tests.streams.kafka_broker import LOG, PLACES, Attributes, Broker, OffsetMetadataTooLarge, RecordedClient

ZERO, ONE, TWO = PLACES


def take(source: KafkaTopics, count: int) -> dict[int, Any]:
    """The next records by their numbers; they are outstanding then."""
    found = dict(itertools.islice(filter(None, source), count))
    for number in found:
        source.window.track(number)
    return found


def known(position: Position) -> Snapshot:
    return Snapshot.decode(base64.b64decode(position.metadata))


def last_of(place: Place) -> int:
    return max(record["offset"] for record in LOG if record["partition"] == place.partition)


def many(count: int, first: int = 0) -> list[Attributes]:
    return [Attributes("orders", 0, first + each, b"", b"") for each in range(count)]


@pytest.mark.parametrize("methods", [False, True], ids=["attributes", "methods"])
def test_all_is_handled_in_order_and_committed(methods: bool) -> None:
    """Both shapes of records; in the end each partition's offset is the one after its last, its metadata a snapshot."""
    broker = Broker()
    handled: dict[str, list[int]] = defaultdict(list)

    def handle(record: Any) -> None:
        key, value = (record.key(), record.value()) if methods else (record.key, record.value)
        handled[key.decode()].append(int(value))
        if sum(map(len, handled.values())) == len(LOG):
            topics.stop()

    with KafkaTopics(RecordedClient(broker, methods=methods), ["orders"]) as topics:
        key = (lambda record: record.key()) if methods else (lambda record: record.key)
        run_ordered(topics, handle, key=key, commit=topics.commit, window=topics.window)
    assert handled == {key: list(range(8)) for key in "abcdef"}
    for place in PLACES:
        assert broker.committed[place].offset == last_of(place) + 1
        assert known(broker.committed[place]).outstanding == ()


def test_what_is_done_above_the_floor_does_not_replay() -> None:
    """The commit's metadata says what is outstanding; whoever reads next skips all else, near 2^63 too."""
    broker = Broker()
    with KafkaTopics(RecordedClient(broker), ["orders"]) as topics:
        taken = take(topics, len(LOG))
        stuck = {number: taken[number] for number in taken if taken[number].value == b"3"}
        for number in taken.keys() - stuck.keys():
            topics.window.ack(number)
        topics.commit(topics.window.floor)
    for place in PLACES:
        left = tuple(record.offset for record in stuck.values() if record.partition == place.partition)
        assert broker.committed[place].offset == left[0]
        assert known(broker.committed[place]).outstanding == left
    with KafkaTopics(RecordedClient(broker), ["orders"]) as topics:
        assert list(take(topics, len(stuck)).values()) == sorted(stuck.values(), key=broker.records.index)
        for number in range(len(stuck)):
            topics.window.ack(number)
        topics.commit(topics.window.floor)
    assert [broker.committed[place].offset for place in PLACES] == [last_of(place) + 1 for place in PLACES]


def test_metadata_over_the_limit_does_not_stop_consumption_parallel_consumer_647() -> None:
    """A snapshot that would be larger is cut: it is committed, and what it leaves out replays."""
    broker = Broker(many(900), limit=100)
    with KafkaTopics(RecordedClient(broker, assigned=[ZERO]), ["orders"], metadata_limit=broker.limit) as topics:
        for number in take(topics, 900):
            if number % 3:
                topics.window.ack(number)
        topics.commit(-1)
    (position,) = broker.committed.values()
    assert position.offset == 0
    kept = known(position)
    assert kept.outstanding == tuple(range(0, kept.high + 1, 3))
    assert 0 < kept.high < 899
    with KafkaTopics(RecordedClient(broker, assigned=[ZERO]), ["orders"]) as topics:
        replayed = [record.offset for record in take(topics, 900 - kept.high + len(kept.outstanding) - 1).values()]
    assert replayed == [*kept.outstanding, *range(kept.high + 1, 900)]


def test_metadata_that_the_broker_refuses_is_told() -> None:
    """Where the broker's limit is lower than was said, the commit raises the client's error, and can be repeated."""
    broker = Broker(many(2), limit=8)
    with KafkaTopics(RecordedClient(broker, assigned=[ZERO]), ["orders"]) as topics:
        take(topics, 2)
        topics.window.ack(0)
        for _ in range(2):
            with pytest.raises(OffsetMetadataTooLarge):
                topics.commit(0)
        broker.limit = 4096
        topics.commit(0)
    assert broker.committed[ZERO].offset == 1


def test_a_late_ack_after_the_partition_was_taken_away_is_refused_redpanda_connect_4477() -> None:
    """The next owner has committed further; a handler of the former one ends, and its ack moves nothing."""
    broker = Broker(many(10))
    client = RecordedClient(broker, assigned=[ZERO])
    with KafkaTopics(client, ["orders"]) as topics:
        take(topics, 10)
        topics.window.ack(0)
        topics.commit(0)
        client.tell("lost", [ZERO])
        theirs = broker.committed[ZERO] = Position(ZERO, 9, "theirs")
        for number in range(1, 10):
            topics.window.ack(number)
        topics.commit(9)
        assert topics.refused == 9
    assert broker.committed == {ZERO: theirs}
    assert len(client.commits) == 1


def test_what_is_done_is_committed_before_a_partition_leaves() -> None:
    """So that the next owner replays only what is outstanding; what was read of it and not begun is dropped."""
    broker = Broker(many(10))
    client = RecordedClient(broker, assigned=[ZERO])
    with KafkaTopics(client, ["orders"]) as topics:
        take(topics, 4)
        for number in (0, 2):
            topics.window.ack(number)
        client.tell("revoked", [ZERO])
        assert broker.committed[ZERO].offset == 1
        assert known(broker.committed[ZERO]) == Snapshot(0, 3, (1, 3))
        client.tell("assigned", [ZERO])
        assert [record.offset for record in take(topics, 8).values()] == [1, 3, 4, 5, 6, 7, 8, 9]


def test_a_partition_that_was_lost_is_not_committed() -> None:
    """Somebody else has it already."""
    broker = Broker(many(3))
    client = RecordedClient(broker, assigned=[ZERO])
    with KafkaTopics(client, ["orders"]) as topics:
        take(topics, 3)
        topics.window.ack(0)
        client.tell("lost", [ZERO])
        topics.commit(0)
    assert not broker.committed


def test_other_partitions_go_on_when_one_leaves() -> None:
    """A rebalance that takes one of three away leaves the windows of the others as they are."""
    broker = Broker()
    client = RecordedClient(broker)
    with KafkaTopics(client, ["orders"]) as topics:
        taken = take(topics, len(LOG))
        client.tell("revoked", [ONE])
        for number in taken:
            topics.window.ack(number)
        topics.commit(topics.window.floor)
        assert topics.refused == sum(record.partition == ONE.partition for record in taken.values())
    assert set(broker.committed) == {ZERO, TWO}
    assert broker.committed[TWO].offset == last_of(TWO) + 1


@pytest.mark.parametrize(
    "metadata",
    [
        *("", "somebody else's", "Zm9v"),
        base64.b64encode(Snapshot(5, 9, (6,)).encode()).decode(),
        base64.b64encode(Snapshot(2, 9, (3,)).encode()[:-1] + b"?").decode(),
    ],
    ids=["none", "another's", "no snapshot", "of another offset", "damaged"],
)
def test_metadata_that_cannot_be_trusted_replays_from_the_offset(metadata: str) -> None:
    """Never a record is skipped for it."""
    broker = Broker(many(10), {ZERO: Position(ZERO, 3, metadata)})
    with KafkaTopics(RecordedClient(broker, assigned=[ZERO]), ["orders"]) as topics:
        assert [record.offset for record in take(topics, 7).values()] == list(range(3, 10))


def test_the_group_is_polled_while_nobody_takes_records() -> None:
    """Partitions are paused when enough is read, and resumed when it is taken; none is missing."""
    broker = Broker(many(2 * AHEAD))
    client = RecordedClient(broker, assigned=[ZERO])
    with KafkaTopics(client, ["orders"]) as topics:
        assert client.paused.wait(10)
        client.tell("assigned")  # a poll that calls back
        assert [record.offset for record in take(topics, 2 * AHEAD).values()] == list(range(2 * AHEAD))
        assert not client.paused.is_set()


def test_a_commit_during_a_rebalance_is_made_after_it() -> None:
    """The broker takes none meanwhile; that is no failure, and nothing is forgotten."""
    broker = Broker(many(3))
    client = RecordedClient(broker, assigned=[ZERO])
    with KafkaTopics(client, ["orders"]) as topics:
        take(topics, 3)
        topics.window.ack(0)
        client.rebalancing = True
        topics.commit(0)
        assert not broker.committed
        client.rebalancing = False
        topics.commit(0)
    assert broker.committed[ZERO].offset == 1


def test_a_client_that_fails_ends_the_session() -> None:
    """Readers and commits are told, with what the client raised as the cause; the client is closed."""
    client = RecordedClient(Broker(many(3)), assigned=[ZERO])
    with KafkaTopics(client, ["orders"]) as topics:
        take(topics, 3)
        client.tell("broken")
        with pytest.raises(SessionEnded, match="all brokers are down") as reading:
            list(topics)
        assert isinstance(reading.value.__cause__, ConnectionError)
        topics.window.ack(0)
        with pytest.raises(SessionEnded):
            topics.commit(0)
    assert client.closed
    assert client.commits == []


class Assigning:
    """A consumer of kafka-python whose calls are held against the real signatures."""

    def __init__(self) -> None:
        self.consumer = create_autospec(kafka.KafkaConsumer, instance=True)
        self.consumer.poll.side_effect = self._poll
        self.consumer.subscribe.side_effect = self._subscribe
        self.consumer.committed.return_value = kafka.OffsetAndMetadata(3, "", -1)
        self.consumer.assignment.return_value = {self.partition}
        self.committed = threading.Event()
        self._answers: list[dict[Any, list[Attributes]]] = [{self.partition: many(2, first=3)}]

    partition = kafka.TopicPartition("orders", 0)

    def _subscribe(self, *, topics: list[str], listener: kafka.ConsumerRebalanceListener) -> None:
        assert topics == ["orders"]
        self.listener = listener

    def _poll(self, timeout_ms: int) -> dict[Any, list[Attributes]]:
        if not self._answers:
            threading.Event().wait(timeout_ms / 1000)
            return {}
        self.listener.on_partitions_assigned([self.partition])
        return self._answers.pop()


def test_kafka_python_is_called_as_it_wants_to_be() -> None:
    """Its signatures, its types; a commit that comes in a rebalance is told from one that fails."""
    assigning = Assigning()
    consumer = assigning.consumer
    with KafkaTopics(KafkaPython(consumer), ["orders"]) as topics:
        assert [record.offset for record in take(topics, 2).values()] == [3, 4]
        topics.window.ack(0)
        consumer.commit.side_effect = kafka.errors.RebalanceInProgressError
        topics.commit(0)
        consumer.commit.side_effect = kafka.errors.KafkaTimeoutError
        with pytest.raises(kafka.errors.KafkaTimeoutError):
            topics.commit(0)
        consumer.commit.side_effect = None
        topics.commit(0)
        (offsets,) = consumer.commit.call_args.args
        metadata = base64.b64encode(Snapshot(3, 4, (4,)).encode()).decode()
        assert offsets == {assigning.partition: kafka.OffsetAndMetadata(4, metadata, -1)}
        assigning.listener.on_partitions_lost([assigning.partition])
        topics.window.ack(1)
        topics.commit(1)
        assert topics.refused == 1
        client = KafkaPython(consumer)
        client.pause()
        client.resume()
    consumer.pause.assert_called_with(assigning.partition)
    consumer.resume.assert_called_with(assigning.partition)
    consumer.close.assert_called_once_with(autocommit=False)


@pytest.fixture
def mock_cluster() -> Iterator[tuple[confluent_kafka.Producer, str]]:
    """librdkafka's broker, in this process: a producer, and the address for the consumers of other processes."""
    owner = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    brokers = owner.list_topics(timeout=30).brokers.values()
    address = ",".join(f"{each.host}:{each.port}" for each in brokers)
    yield confluent_kafka.Producer({"bootstrap.servers": address, "log_level": 0}), address
    owner.flush(0)  # it lives as long as its owner


def test_a_consumer_of_confluent_kafka_that_is_killed_is_resumed(
    mock_cluster: tuple[confluent_kafka.Producer, str], tmp_path: Path
) -> None:
    """SIGKILL, in the middle of handling: the metadata of its last commit knows what was outstanding."""
    producer, address = mock_cluster
    published = crash.records()
    for key, number in published:
        producer.produce("orders", key=key, value=str(number), partition=crash.KEYS.index(key) % 2)
    assert producer.flush(30) == 0
    crash.killed_and_resumed("kafka", address, "orders", tmp_path, published)
