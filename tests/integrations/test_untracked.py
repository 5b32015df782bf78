"""Messages without an item's id, as those that a script has moved by their bodies: handled, told of, or refused."""

from __future__ import annotations

import logging

import confluent_kafka
import pytest

from lastbit import InvalidArgument
from lastbit.integrations import kafka, rabbitmq
from lastbit.integrations._untracked import WhenUntracked
from tests.integrations.drivers import Driver, Link
from tests.mutants import mutant

LINE = "carry no item's id"


@mutant(
    "messages-without-an-item-are-handled-anyhow",
    "lastbit.integrations._workers:Workers._process",
    "self._untracked is not None and self._untracked.refuses(delivery.item)",
    "False",
    case="rabbitmq-refuse",
)
@mutant(
    "a-refused-message-is-acked",
    "lastbit.integrations.rabbitmq._consumer:QueueSession._send",
    "outcome in (Outcome.FAILED, Outcome.REFUSED)",
    "outcome is Outcome.FAILED",
    case="rabbitmq-refuse",
)
@mutant(
    "a-refused-record-is-lost-with-its-dead-letter",
    "lastbit.integrations.kafka._consumer:Delivery.settle",
    "not self._consumer.has_refused(self.record)",
    "self._consumer.has_refused(self.record) is None",
    case="kafka-refuse",
)
@mutant(
    "a-consumer-of-sqs-handles-messages-without-an-item-anyhow",
    "lastbit.integrations.sqs._consumer:Consumer._handled",
    "self._untracked.refuses(item)",
    "False",
    case="sqs-refuse",
)
@mutant(
    "a-refused-message-of-sqs-is-deleted",
    "lastbit.integrations.sqs._consumer:Consumer._leave",
    "self._leases.release(message)",
    "self._queue.delete([message], None)",
    case="sqs-refuse",
)
@mutant(
    "a-record-without-an-item-is-handled-anyhow",
    "lastbit.integrations.aws_lambda:_Resolving._refuse_untracked",
    "self._untracked.refuses(current_item(None))",
    "False",
    case="aws_lambda-refuse",
)
@mutant(
    "each-message-without-an-item-is-logged",
    "lastbit.integrations._untracked:UntrackedMessages.refuses",
    "next(self._seen) == 0",
    "True",
    case="rabbitmq-warn",
)
@mutant(
    "a-malformed-id-counts-as-an-item",
    "lastbit.integrations._untracked:UntrackedMessages.refuses",
    "item_of(item) is not None",
    "item is not None",
    case="sqs-refuse",
)
@pytest.mark.parametrize("untracked", ["handle", "warn", "refuse"])
def test_messages_without_an_item(
    driver: Driver, producer: Link, link: Link, untracked: WhenUntracked, caplog: pytest.LogCaptureFixture
) -> None:
    """Or with a malformed id. Those that are refused are kept, and no handler gets them. One line tells of them, unless
    all is well."""
    if not driver.loses_ids:
        return
    caplog.set_level(logging.WARNING)
    driver.untracked = untracked
    handled: list[str] = []
    batch = driver.send(producer, ["a", "b"])
    for body, item in (("moved", None), ("moved too", None), ("malformed", "7:0")):
        driver.send_body(body, item)

    def is_over() -> bool:
        if untracked == "refuse":
            return batch.refresh().complete and (driver.refused() == 3 or len(handled) > 2)
        return len(handled) == 5 and driver.left() == 0

    assert driver.work(link, handled.append, is_over) is None
    assert batch.refresh().acked == 2
    assert sorted(handled) == (["a", "b"] if untracked == "refuse" else ["a", "b", "malformed", "moved", "moved too"])
    assert driver.refused() == (3 if untracked == "refuse" else 0)
    assert len([line for line in caplog.messages if LINE in line]) == (0 if untracked == "handle" else 1)


def test_a_wrong_option_is_refused() -> None:
    """Before anything is connected. Kafka has no dead letters of its own, so it needs a place for refused records."""
    with pytest.raises(InvalidArgument, match="untracked is"):
        rabbitmq.consume("amqp://127.0.0.1:1", "pictures", print, untracked="drop")  # type: ignore[arg-type]
    reader = kafka.Confluent(confluent_kafka.Consumer({"group.id": "readers", "enable.auto.commit": False}))
    with pytest.raises(InvalidArgument, match="untracked='refuse' needs dead_letter"):
        kafka.consume(reader, ["pictures"], print, untracked="refuse")
