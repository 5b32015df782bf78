"""Lambda's side of an SQS trigger with ReportBatchItemFailures: receives messages, calls the function with an event,
and deletes the messages that it does not report. If the function raises, none is deleted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aws_lambda_powertools.utilities.batch.exceptions import BatchProcessingError

from tests.support.aws import TestQueue

Function = Callable[[dict[str, Any], Any], Any]


def record_of(message: dict[str, Any], arn: str) -> dict[str, Any]:
    """The message as it is in an event."""
    attributes = {
        name: {"stringValue": value["StringValue"], "dataType": value["DataType"]}
        for name, value in message.get("MessageAttributes", {}).items()
    }
    return {
        "messageId": message["MessageId"],
        "receiptHandle": message["ReceiptHandle"],
        "body": message["Body"],
        "attributes": message["Attributes"],
        "messageAttributes": attributes,
        "md5OfBody": message["MD5OfBody"],
        "eventSource": "aws:sqs",
        "eventSourceARN": arn,
        "awsRegion": "eu-central-1",
    }


def poll(queue: TestQueue, function: Function) -> list[str]:
    """Invoke the function once with up to ten messages. Returns the bodies of those that it reported."""
    messages = queue.client.receive_message(
        QueueUrl=queue.url, MaxNumberOfMessages=10, MessageAttributeNames=["All"], MessageSystemAttributeNames=["All"]
    ).get("Messages", [])
    if not messages:
        return []
    event = {"Records": [record_of(message, "arn:aws:sqs:eu-central-1:123456789012:pictures") for message in messages]}
    try:
        answer = function(event, None)
    except BatchProcessingError:
        reported = {message["MessageId"] for message in messages}
    else:
        reported = {failure["itemIdentifier"] for failure in answer["batchItemFailures"]}
        assert reported <= {message["MessageId"] for message in messages}
    for message in messages:
        if message["MessageId"] not in reported:
            queue.client.delete_message(QueueUrl=queue.url, ReceiptHandle=message["ReceiptHandle"])
        else:  # instead of waiting for its visibility timeout
            queue.client.change_message_visibility(
                QueueUrl=queue.url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0
            )
    return [message["Body"] for message in messages if message["MessageId"] in reported]
