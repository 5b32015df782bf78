"""Kafka: a recorded log with a client that behaves like the real ones, and confluent-kafka itself on the mock cluster
of librdkafka."""

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
from tests.streams import crash, poison
from tests.streams.kafka_broker import LOG, PLACES, Attributes, Broker, OffsetMetadataTooLarge, RecordedClient
from tests.support.threads import no_more_threads

ZERO, ONE, TWO = PLACES


def take(source: KafkaTopics, count: int) -> dict[int, Any]:
    """The next records by their numbers; they are outstanding."""
    records = dict(itertools.islice(filter(None, source), count))
    for number in records:
        source.window.track(number)
    return records


def snapshot_of(position: Position) -> Snapshot:
    return Snapshot.decode(base64.b64decode(position.metadata))


def last_of(place: Place) -> int:
    return max(record["offset"] for record in LOG if record["partition"] == place.partition)


def make_records(count: int, first: int = 0) -> list[Attributes]:
    return [Attributes("orders", 0, first + n, b"", b"") for n in range(count)]


@pytest.mark.parametrize("methods", [False, True], ids=["attributes", "methods"])
def test_all_records_are_handled_in_order_and_committed(methods: bool) -> None:
    """Both shapes of records; in the end each partition's offset is the one after its last, and its metadata is a
    snapshot."""
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
        assert snapshot_of(broker.committed[place]).outstanding == ()


def test_a_poison_record_becomes_a_dead_letter_while_others_go_on() -> None:
    """And it is committed: nothing is outstanding in the end."""
    broker = Broker()
    with KafkaTopics(RecordedClient(broker, methods=False), ["orders"]) as topics:
        poison.check_dead_letter(
            topics,
            len(LOG),
            key=lambda record: record.key,
            is_poison=lambda record: (record.key, record.value) == (b"c", b"3"),
        )
    for place in PLACES:
        assert broker.committed[place].offset == last_of(place) + 1
        assert snapshot_of(broker.committed[place]).outstanding == ()


def test_acked_records_above_the_floor_do_not_replay() -> None:
    """The commit's metadata lists the outstanding offsets; the next reader skips all others, near 2^63 too."""
    broker = Broker()
    with KafkaTopics(RecordedClient(broker), ["orders"]) as topics:
        records = take(topics, len(LOG))
        stuck = {number: records[number] for number in records if records[number].value == b"3"}
        for number in records.keys() - stuck.keys():
            topics.window.ack(number)
        topics.commit(topics.window.floor)
    for place in PLACES:
        outstanding = tuple(record.offset for record in stuck.values() if record.partition == place.partition)
        assert broker.committed[place].offset == outstanding[0]
        assert snapshot_of(broker.committed[place]).outstanding == outstanding
    with KafkaTopics(RecordedClient(broker), ["orders"]) as topics:
        assert list(take(topics, len(stuck)).values()) == sorted(stuck.values(), key=broker.records.index)
        for number in range(len(stuck)):
            topics.window.ack(number)
        topics.commit(topics.window.floor)
    assert [broker.committed[place].offset for place in PLACES] == [last_of(place) + 1 for place in PLACES]


def test_restored_offsets_missing_from_the_log_do_not_hold_the_floor(caplog: pytest.LogCaptureFixture) -> None:
    """Compaction or retention may remove a record that was outstanding: the next owner never gets it."""
    broker = Broker(make_records(10))
    with KafkaTopics(RecordedClient(broker, assigned=[ZERO]), ["orders"]) as topics:
        for number in take(topics, 10).keys() - {3, 5}:
            topics.window.ack(number)
        topics.commit(-1)
    assert snapshot_of(broker.committed[ZERO]).outstanding == (3, 5)
    broker.records = [record for record in broker.records if record.offset != 3]
    with KafkaTopics(RecordedClient(broker, assigned=[ZERO]), ["orders"]) as topics:
        [(number, record)] = take(topics, 1).items()
        assert record.offset == 5
        topics.window.ack(number)
        topics.commit(topics.window.floor)
    assert broker.committed[ZERO].offset == 10
    assert "the source skipped offset 3" in caplog.text


def test_metadata_over_the_limit_does_not_stop_consumption_parallel_consumer_647() -> None:
    """A snapshot over the limit is shortened and committed, and the omitted offsets replay."""
    broker = Broker(make_records(900), limit=100)
    with KafkaTopics(RecordedClient(broker, assigned=[ZERO]), ["orders"], metadata_limit=broker.limit) as topics:
        for number in take(topics, 900):
            if number % 3:
                topics.window.ack(number)
        topics.commit(-1)
    (position,) = broker.committed.values()
    assert position.offset == 0
    snapshot = snapshot_of(position)
    assert snapshot.outstanding == tuple(range(0, snapshot.high + 1, 3))
    assert 0 < snapshot.high < 899
    with KafkaTopics(RecordedClient(broker, assigned=[ZERO]), ["orders"]) as topics:
        replayed = [
            record.offset for record in take(topics, 900 - snapshot.high + len(snapshot.outstanding) - 1).values()
        ]
    assert replayed == [*snapshot.outstanding, *range(snapshot.high + 1, 900)]


def test_metadata_that_the_broker_refuses_raises_an_error() -> None:
    """If the broker's limit is lower than configured, the commit raises the client's error, and can be repeated."""
    broker = Broker(make_records(2), limit=8)
    with KafkaTopics(RecordedClient(broker, assigned=[ZERO]), ["orders"]) as topics:
        take(topics, 2)
        topics.window.ack(0)
        for _ in range(2):
            with pytest.raises(OffsetMetadataTooLarge):
                topics.commit(0)
        broker.limit = 4096
        topics.commit(0)
    assert broker.committed[ZERO].offset == 1


def test_a_late_ack_after_the_partition_was_revoked_is_refused_redpanda_connect_4477() -> None:
    """The next owner has committed further; an earlier owner's handler finishes, and its ack moves nothing."""
    broker = Broker(make_records(10))
    client = RecordedClient(broker, assigned=[ZERO])
    with KafkaTopics(client, ["orders"]) as topics:
        take(topics, 10)
        topics.window.ack(0)
        topics.commit(0)
        client.rebalance("lost", [ZERO])
        next_owners_position = broker.committed[ZERO] = Position(ZERO, 9, "theirs")
        for number in range(1, 10):
            topics.window.ack(number)
        topics.commit(9)
        assert topics.refused == 9
    assert broker.committed == {ZERO: next_owners_position}
    assert len(client.commits) == 1


def test_acks_are_committed_before_a_partition_is_revoked() -> None:
    """So that the next owner replays only the outstanding records; records that were read but not started are
    dropped."""
    broker = Broker(make_records(10))
    client = RecordedClient(broker, assigned=[ZERO])
    with KafkaTopics(client, ["orders"]) as topics:
        take(topics, 4)
        for number in (0, 2):
            topics.window.ack(number)
        client.rebalance("revoked", [ZERO])
        assert broker.committed[ZERO].offset == 1
        assert snapshot_of(broker.committed[ZERO]) == Snapshot(0, 3, (1, 3))
        client.rebalance("assigned", [ZERO])
        assert [record.offset for record in take(topics, 8).values()] == [1, 3, 4, 5, 6, 7, 8, 9]


def test_records_that_wait_are_not_begun_after_their_partition_was_revoked() -> None:
    """Its next owner handles them, so each is handled once, in order, also if that is this consumer again."""
    client = RecordedClient(Broker(make_records(10)), assigned=[ZERO])
    handled: list[int] = []
    begun, goes_on = threading.Event(), threading.Event()

    def handle(record: Any) -> None:
        handled.append(record.offset)
        begun.set()
        assert goes_on.wait(30)
        if record.offset == 9:
            topics.stop()

    with KafkaTopics(client, ["orders"]) as topics:
        lanes = threading.Thread(
            target=run_ordered,
            args=(topics, handle),
            kwargs={"key": lambda record: 0, "window": topics.window, "commit": topics.commit, "every": 60},
        )
        lanes.start()
        assert begun.wait(30)
        while topics.window.high < 9:
            topics.window.wait_for_room()
        client.rebalance("revoked", [ZERO])
        client.rebalance("assigned", [ZERO])
        goes_on.set()
        lanes.join(30)
    # The one that was being handled when it was revoked is handled again.
    assert handled == [0, *range(10)]


def test_a_partition_that_was_lost_is_not_committed() -> None:
    """Another consumer owns it already."""
    broker = Broker(make_records(3))
    client = RecordedClient(broker, assigned=[ZERO])
    with KafkaTopics(client, ["orders"]) as topics:
        take(topics, 3)
        topics.window.ack(0)
        client.rebalance("lost", [ZERO])
        topics.commit(0)
    assert not broker.committed


def test_other_partitions_continue_when_one_is_revoked() -> None:
    """A rebalance that removes one of three leaves the windows of the others unchanged."""
    broker = Broker()
    client = RecordedClient(broker)
    with KafkaTopics(client, ["orders"]) as topics:
        records = take(topics, len(LOG))
        client.rebalance("revoked", [ONE])
        for number in records:
            topics.window.ack(number)
        topics.commit(topics.window.floor)
        assert topics.refused == sum(record.partition == ONE.partition for record in records.values())
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
def test_unreadable_metadata_replays_from_the_offset(metadata: str) -> None:
    """No record is skipped because of it."""
    broker = Broker(make_records(10), {ZERO: Position(ZERO, 3, metadata)})
    with KafkaTopics(RecordedClient(broker, assigned=[ZERO]), ["orders"]) as topics:
        assert [record.offset for record in take(topics, 7).values()] == list(range(3, 10))


def test_the_group_is_polled_while_no_records_are_taken() -> None:
    """Partitions are paused once enough is read, and resumed once it is taken; no record is missing."""
    broker = Broker(make_records(2 * AHEAD))
    client = RecordedClient(broker, assigned=[ZERO])
    with KafkaTopics(client, ["orders"]) as topics:
        assert client.paused.wait(10)
        client.rebalance("assigned")  # a poll with a callback
        assert [record.offset for record in take(topics, 2 * AHEAD).values()] == list(range(2 * AHEAD))
        assert not client.paused.is_set()


def test_a_commit_during_a_rebalance_is_made_after_it() -> None:
    """The broker accepts none meanwhile; that isn't a failure, and nothing is lost."""
    broker = Broker(make_records(3))
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
    """Readers and commits get an error with the client's exception as the cause; the client is closed."""
    client = RecordedClient(Broker(make_records(3)), assigned=[ZERO])
    with KafkaTopics(client, ["orders"]) as topics:
        take(topics, 3)
        client.rebalance("broken")
        with pytest.raises(SessionEnded, match="all brokers are down") as reading:
            list(topics)
        assert isinstance(reading.value.__cause__, ConnectionError)
        topics.window.ack(0)
        with pytest.raises(SessionEnded):
            topics.commit(0)
    assert client.closed
    assert client.commits == []


def test_a_source_whose_thread_cannot_be_started_closes_its_consumer() -> None:
    """Otherwise its partitions would have an owner that never polls."""
    client = RecordedClient(Broker(make_records(3)), assigned=[ZERO])
    with pytest.raises(RuntimeError, match="can't start new thread"), no_more_threads():
        KafkaTopics(client, ["orders"])
    assert client.closed


class Assigning:
    """A consumer of kafka-python whose calls are checked against the real signatures."""

    def __init__(self) -> None:
        self.consumer = create_autospec(kafka.KafkaConsumer, instance=True)
        self.consumer.poll.side_effect = self._poll
        self.consumer.subscribe.side_effect = self._subscribe
        self.consumer.committed.return_value = kafka.OffsetAndMetadata(3, "", -1)
        self.consumer.assignment.return_value = {self.partition}
        self.committed = threading.Event()
        self._answers: list[dict[Any, list[Attributes]]] = [{self.partition: make_records(2, first=3)}]

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


def test_kafka_python_is_called_with_its_real_signatures() -> None:
    """Its signatures, its types; and a commit during a rebalance is distinguished from one that fails."""
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
    """librdkafka's broker, in this process: a producer, and the address for consumers in other processes."""
    owner = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    brokers = owner.list_topics(timeout=30).brokers.values()
    address = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    yield confluent_kafka.Producer({"bootstrap.servers": address, "log_level": 0}), address
    owner.flush(0)  # the cluster lives as long as its owner


@pytest.mark.slow
def test_another_consumer_resumes_after_a_killed_one_with_confluent_kafka(
    mock_cluster: tuple[confluent_kafka.Producer, str], tmp_path: Path
) -> None:
    """SIGKILL in the middle of handling: the metadata of its last commit lists the outstanding records."""
    producer, address = mock_cluster
    published = crash.records()
    for key, number in published:
        producer.produce("orders", key=key, value=str(number), partition=crash.KEYS.index(key) % 2)
    assert producer.flush(30) == 0
    crash.check_kill_and_resume("kafka", address, "orders", tmp_path, published)
