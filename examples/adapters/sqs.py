"""Pictures through SQS: `python -m examples.adapters.sqs`, with a Lastbit service at LASTBIT_URL.

It creates two queues in your AWS account, sends a message for each picture, consumes them, and deletes the queues.
One picture is broken and fails at once. Another one crashes its handler each time, and ends in the dead-letter queue.
In the end the batch is complete, and shows both.

Without an AWS account, moto's server will do:

    pip install 'moto[server]' && moto_server --port 5000
    export AWS_ENDPOINT_URL=http://127.0.0.1:5000 AWS_DEFAULT_REGION=eu-central-1
    export AWS_ACCESS_KEY_ID=any AWS_SECRET_ACCESS_KEY=any
"""

from __future__ import annotations

import json
import uuid

import boto3

from lastbit import Client
from lastbit.integrations import sqs

PICTURES = 50


def resize(message: sqs.Message) -> None:
    picture = json.loads(message["Body"])["picture"]
    if picture == 7:
        raise sqs.Failed("the file is broken")
    if picture == 8:
        raise MemoryError("too large")


def main() -> None:
    client = boto3.client("sqs")
    name = f"lastbit-example-{uuid.uuid4().hex[:8]}"
    dead_letters = client.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    arn = client.get_queue_attributes(QueueUrl=dead_letters, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 3})
    pictures = client.create_queue(QueueName=name, Attributes={"RedrivePolicy": policy})["QueueUrl"]
    try:
        with Client() as lastbit:
            bodies = (json.dumps({"picture": number}) for number in range(PICTURES))
            batch = sqs.fan_out(client, pictures, bodies, key=name, idempotency_key=name, lastbit=lastbit)
            print(f"sent {batch.refresh().items} messages of batch {batch.key}")
            # `until_empty` is for this example; a consumer runs until it gets SIGTERM.
            sqs.consume(client, pictures, resize, retry_delay=0, wait_seconds=1, until_empty=True, lastbit=lastbit)
            print(f"consumed: {batch.refresh().acked} acked, {batch.info.failed} failed, {batch.info.pending} pending")
            sqs.fail_dead_letters(client, dead_letters, wait_seconds=1, until_empty=True, lastbit=lastbit)
            batch.wait(60)
            print(f"dead letters: {batch.info.acked} acked, {batch.info.failed} failed, the batch is {batch.state}")
            for failure in batch.failed():
                for item, reason in failure.reasons.items():
                    print(f"  item {item.rpartition(':')[2]}: {reason}")
    finally:
        for url in (pictures, dead_letters):
            client.delete_queue(QueueUrl=url)


if __name__ == "__main__":
    main()
