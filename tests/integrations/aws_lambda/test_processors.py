"""Each outcome of a record, and the state of its item after it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aws_lambda_powertools.utilities.batch import (
    EventType,
    async_process_partial_response,
    process_partial_response,
)
from aws_lambda_powertools.utilities.parser.models import SqsRecordModel

from lastbit import Client, Completed, InvalidArgument, Retry
from lastbit.integrations import Failed, Skipped, sqs
from lastbit.integrations.aws_lambda import (
    LastbitAsyncBatchProcessor,
    LastbitBatchProcessor,
    LastbitSqsFifoPartialProcessor,
)
from tests.integrations.aws_lambda.poller import Function, poll
from tests.integrations.sqs.conftest import FailuresLost
from tests.support.aws import Moto
from tests.support.servers import free_port

BROKEN = "broken"
TWICE = "at the second time"


@pytest.fixture
def lastbit(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client:
        yield client


@pytest.fixture
def away() -> Iterator[Client]:
    """A client of a service that doesn't answer."""
    with Client(f"http://127.0.0.1:{free_port()}", retry=Retry(attempts=1)) as client:
        yield client


def handle(record: Any) -> None:
    if record.body.endswith(BROKEN):
        raise Failed("no picture")
    if record.body.endswith(TWICE) and record.attributes.approximate_receive_count == "1":
        raise ValueError("not yet")


def function_of(processor: Any, handler: Callable[..., Any] = handle) -> Function:
    return lambda event, context: process_partial_response(event, handler, processor, context)


def test_records_resolve_their_items(moto: Moto, lastbit: Client) -> None:
    """Succeeded: acked. `Failed`: failed with its reason. Raised: pending, reported, and acked when it succeeds. One
    without an item is handled like the others."""
    queue = moto.queue(most_receives=5)
    batch = sqs.fan_out(queue.client, queue.url, ["a", BROKEN, TWICE, "b"], lastbit=lastbit)
    queue.send("untracked")
    processor = LastbitBatchProcessor(event_type=EventType.SQS, lastbit=lastbit)
    assert poll(queue, function_of(processor)) == [TWICE]
    assert (batch.refresh().acked, batch.info.failed, batch.info.pending) == (2, 1, 1)
    assert len(processor.success_messages) == 3
    assert poll(queue, function_of(processor)) == []
    assert (batch.refresh().acked, batch.info.failed, batch.info.pending) == (3, 1, 0)
    assert [reason for failure in batch.failed() for reason in failure.reasons.values()] == ["no picture"]
    assert batch.verify().ok
    assert queue.count() == 0


def test_the_handler_may_take_the_context(moto: Moto, lastbit: Client) -> None:
    queue = moto.queue()
    batch = sqs.fan_out(queue.client, queue.url, ["a"], lastbit=lastbit)
    contexts: list[object] = []

    def with_context(record: Any, lambda_context: Any) -> None:
        contexts.append(lambda_context)

    processor = LastbitBatchProcessor(event_type=EventType.SQS, lastbit=lastbit)
    poll(queue, lambda event, _: process_partial_response(event, with_context, processor, "context"))
    assert contexts == ["context"]
    assert batch.refresh().succeeded


def test_a_model_works_too(moto: Moto, lastbit: Client, away: Client) -> None:
    """Pydantic's, of Powertools' parser; also when the ack fails."""
    queue = moto.queue()
    batch = sqs.fan_out(queue.client, queue.url, ["a"], lastbit=lastbit)
    bodies: list[str] = []
    for client in (away, lastbit):
        processor = LastbitBatchProcessor(EventType.SQS, SqsRecordModel, False, lastbit=client)
        poll(queue, function_of(processor, lambda record: bodies.append(record.body)))
    assert bodies == ["a", "a"]
    assert batch.refresh().succeeded


def test_records_whose_acks_failed_are_reported(moto: Moto, lastbit: Client, away: Client) -> None:
    """And acked with their redelivery. A record without an item is not concerned."""
    queue = moto.queue(most_receives=5)
    batch = sqs.fan_out(queue.client, queue.url, ["a", BROKEN], lastbit=lastbit)
    queue.send("untracked")
    processor = LastbitBatchProcessor(event_type=EventType.SQS, lastbit=away)
    assert sorted(poll(queue, function_of(processor))) == ["a", BROKEN]
    assert [record["body"] for record in processor.success_messages] == ["untracked"]
    assert (batch.refresh().pending, queue.count()) == (2, 2)
    processor = LastbitBatchProcessor(event_type=EventType.SQS, lastbit=lastbit)
    assert poll(queue, function_of(processor)) == []
    assert (batch.refresh().acked, batch.info.failed) == (1, 1)


def test_records_are_reported_if_a_completion_can_not_be_processed(moto: Moto, lastbit: Client) -> None:
    """`on_completed` raises four times: nothing can hold the records, so they are delivered again, and their acks
    report the completion again."""
    queue = moto.queue(most_receives=5)
    batch = sqs.fan_out(queue.client, queue.url, ["a"], key="catalog", lastbit=lastbit)
    calls: list[Completed] = []

    def publish(completion: Completed) -> None:
        calls.append(completion)
        if len(calls) <= 4:
            raise ConnectionError("the broker is away")

    processor = LastbitBatchProcessor(event_type=EventType.SQS, lastbit=lastbit, on_completed=publish)
    assert poll(queue, function_of(processor)) == ["a"]
    assert poll(queue, function_of(processor)) == []
    assert [(completion.batch, completion.key, completion.newly) for completion in calls] == [
        *[(batch.id, "catalog", True)] * 4,
        (batch.id, "catalog", False),
    ]
    assert (batch.refresh().acked, queue.count()) == (1, 0)


def test_an_invocation_of_which_all_acks_failed_raises(moto: Moto, lastbit: Client, away: Client) -> None:
    """As Powertools does if all records failed; or it reports all, with `raise_on_entire_batch_failure=False`."""
    queue = moto.queue(most_receives=5)
    sqs.fan_out(queue.client, queue.url, ["a", "b"], lastbit=lastbit)
    raising = LastbitBatchProcessor(event_type=EventType.SQS, lastbit=away)
    errors: list[str] = []

    def function(event: Any, context: Any) -> Any:
        try:
            return process_partial_response(event, handle, raising, context)
        except Exception as error:
            errors.append(str(error))
            raise

    assert sorted(poll(queue, function)) == ["a", "b"]
    assert "All records failed" in errors[0]
    assert "no response from" in errors[0]
    reporting = LastbitBatchProcessor(EventType.SQS, raise_on_entire_batch_failure=False, lastbit=away)
    assert sorted(poll(queue, function_of(reporting))) == ["a", "b"]


def test_a_rejected_or_malformed_item_does_not_come_back(
    moto: Moto, lastbit: Client, caplog: pytest.LogCaptureFixture
) -> None:
    queue = moto.queue()
    batch = sqs.fan_out(queue.client, queue.url, ["a"], lastbit=lastbit)
    batch.cancel()
    queue.send("b", MessageAttributes={sqs.ITEM: {"DataType": "String", "StringValue": "7:0"}})
    processor = LastbitBatchProcessor(event_type=EventType.SQS, lastbit=lastbit)
    assert poll(queue, function_of(processor)) == []
    assert queue.count() == 0
    assert "cancelled" in caplog.text
    assert "'7:0' is not an item id" in caplog.text


def test_coroutines_have_a_processor(moto: Moto, lastbit: Client) -> None:
    queue = moto.queue(most_receives=5)
    batch = sqs.fan_out(queue.client, queue.url, ["a", BROKEN, TWICE, "not needed"], lastbit=lastbit)

    async def handle_async(record: Any) -> None:
        handle(record)
        if record.body == "not needed":
            raise Skipped

    processor = LastbitAsyncBatchProcessor(event_type=EventType.SQS, lastbit=lastbit)

    def function(event: Any, context: Any) -> Any:
        return async_process_partial_response(event, handle_async, processor, context)

    assert poll(queue, function) == [TWICE]
    assert poll(queue, function) == []
    assert (batch.refresh().acked, batch.info.failed, batch.info.skipped, batch.info.pending) == (2, 1, 1, 0)


def test_a_fifo_queue_keeps_its_order(moto: Moto, lastbit: Client) -> None:
    """After a record that raised, none of its group is handled or acked; `Failed` stops nothing."""
    queue = moto.queue(fifo=True, most_receives=5)
    bodies = ["a 0", f"b 0 {BROKEN}", f"a 1 {TWICE}", "b 1", "a 2"]
    batch = sqs.fan_out(queue.client, queue.url, bodies, group=lambda body: str(body)[0], lastbit=lastbit)
    handled: list[str] = []

    def note(record: Any) -> None:
        handled.append(record.body)
        handle(record)

    processor = LastbitSqsFifoPartialProcessor(skip_group_on_error=True, lastbit=lastbit)
    assert poll(queue, function_of(processor, note)) == [f"a 1 {TWICE}", "a 2"]
    assert (batch.refresh().acked, batch.info.failed, batch.info.pending) == (2, 1, 2)
    assert poll(queue, function_of(processor, note)) == []
    assert [body for body in handled if body[0] == "a"] == ["a 0", f"a 1 {TWICE}", f"a 1 {TWICE}", "a 2"]
    assert batch.refresh().complete


@pytest.mark.parametrize("by_group", [True, False])
def test_an_outcome_that_is_not_stored_keeps_a_fifo_queues_order(moto: Moto, lastbit: Client, by_group: bool) -> None:
    """The later records come back with it, although their acks were stored."""
    queue = moto.queue(fifo=True, most_receives=5)
    bodies = [f"a 0 {BROKEN}", "b 0", "a 1"]
    batch = sqs.fan_out(queue.client, queue.url, bodies, group=lambda body: str(body)[0], lastbit=lastbit)
    with Client(lastbit.url, retry=Retry(attempts=1), transport=FailuresLost()) as client:
        processor = LastbitSqsFifoPartialProcessor(skip_group_on_error=by_group, lastbit=client)
        assert poll(queue, function_of(processor)) == ([bodies[0], "a 1"] if by_group else bodies)
    assert (batch.refresh().acked, batch.info.pending) == (2, 1)


def test_the_header_of_a_kafka_record_is_its_item(lastbit: Client) -> None:
    """As Lambda gives it: signed bytes."""
    batch = lastbit.open(items=1, sealed=True)
    headers = [{"other": [-61, -87]}, {"lastbit-item": list(batch.ids[0].encode())}]
    record = {
        "topic": "pictures",
        "partition": 0,
        "offset": 15,
        "timestamp": 1545084650987,
        "timestampType": "CREATE_TIME",
        "key": base64.b64encode(b"k").decode(),
        "value": base64.b64encode(b"v").decode(),
        "headers": headers,
    }
    event = {"eventSource": "aws:kafka", "records": {"pictures-0": [record]}}
    processor = LastbitBatchProcessor(event_type=EventType.Kafka, lastbit=lastbit)
    assert process_partial_response(event, lambda record: None, processor) == {"batchItemFailures": []}
    assert batch.refresh().succeeded


def test_other_records_need_a_function(lastbit: Client) -> None:
    """Kinesis and DynamoDB have no attributes."""
    with pytest.raises(InvalidArgument, match="pass item"):
        LastbitBatchProcessor(event_type=EventType.KinesisDataStreams, lastbit=lastbit)
    batch = lastbit.open(items=2, sealed=True)

    def item_of(record: Any) -> str:
        return str(json.loads(base64.b64decode(record["kinesis"]["data"]))["item"])

    processor = LastbitBatchProcessor(event_type=EventType.KinesisDataStreams, item=item_of, lastbit=lastbit)
    records = [
        {
            "eventSource": "aws:kinesis",
            "kinesis": {
                "sequenceNumber": str(number),
                "data": base64.b64encode(json.dumps({"item": item}).encode()).decode(),
            },
        }
        for number, item in enumerate(batch.ids)
    ]

    def fail_the_second(record: Any) -> None:
        if record.kinesis.sequence_number == "1":
            raise ValueError("not yet")

    answer = process_partial_response({"Records": records}, fail_the_second, processor)
    assert answer == {"batchItemFailures": [{"itemIdentifier": "1"}]}
    assert (batch.refresh().acked, batch.info.pending) == (1, 1)
