"""The queue, which delivers each message at least once."""

from __future__ import annotations

import json

import boto3

from examples.fastapi_shop.database import Order, lastbit

sqs = boto3.client("sqs")
queue = sqs.create_queue(QueueName="lastbit-parcels")["QueueUrl"]


def send_pending(order: Order) -> int:
    """Send a message for each parcel that is pending: once more, if it has been sent before. Returns how many."""
    sent = 0
    for pending in lastbit.client().batch(order.batch).pending():
        for item, parcel in zip(pending.ids, order.parcels[pending.start : pending.end], strict=True):
            body = json.dumps({"item": item, "order": order.id, "parcel": parcel})
            sqs.send_message(QueueUrl=queue, MessageBody=body)
            sent += 1
    return sent
