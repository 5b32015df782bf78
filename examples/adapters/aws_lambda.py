"""A Lambda function that renders pictures: `python -m examples.adapters.aws_lambda`, with a Lastbit service at
LASTBIT_URL.

`lambda_handler` is what you deploy. The rest stands in for Lambda: it makes an event of five messages, calls the
function, and calls it again with the messages that the function reported.
"""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.batch import EventType, process_partial_response
from aws_lambda_powertools.utilities.data_classes.sqs_event import SQSRecord

from lastbit import Client
from lastbit.integrations.aws_lambda import ITEM, Failed, LastbitBatchProcessor

processor = LastbitBatchProcessor(event_type=EventType.SQS)


def render(record: SQSRecord) -> None:
    if record.body == "picture 3":
        raise Failed("the file is broken")
    if record.body == "picture 4" and record.attributes.approximate_receive_count == "1":
        raise TimeoutError("the storage did not answer")


def lambda_handler(event: dict[str, Any], context: Any) -> Any:
    return process_partial_response(event, render, processor, context)


def main() -> None:
    with Client() as lastbit:
        batch = lastbit.open(items=5, sealed=True)
        records: list[dict[str, Any]] = [
            {
                "messageId": str(number),
                "body": f"picture {number}",
                "attributes": {"ApproximateReceiveCount": "0"},
                "messageAttributes": {ITEM: {"stringValue": item, "dataType": "String"}},
                "eventSource": "aws:sqs",
            }
            for number, item in enumerate(batch.ids)
        ]
        while records:
            for record in records:
                receives = int(record["attributes"]["ApproximateReceiveCount"]) + 1
                record["attributes"]["ApproximateReceiveCount"] = str(receives)
            answer = lambda_handler({"Records": records}, None)
            reported = {failure["itemIdentifier"] for failure in answer["batchItemFailures"]}
            records = [record for record in records if record["messageId"] in reported]
            bodies = ", ".join(record["body"] for record in records) or "nothing"
            info = batch.refresh()
            print(f"{info.acked} acked, {info.failed} failed, {info.pending} pending; to be delivered again: {bodies}")


if __name__ == "__main__":
    main()
