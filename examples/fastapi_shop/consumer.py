"""Charges parcels until it is stopped, at any moment: a message that isn't deleted comes again."""

from __future__ import annotations

import json
import logging

from sqlalchemy import orm

from examples.fastapi_shop.database import Charge, Session, lastbit
from examples.fastapi_shop.messages import queue, sqs


def charge(session: orm.Session, order: int, parcel: str) -> None:
    session.add(Charge(order=order, parcel=parcel))
    session.flush()


charge_once = lastbit.once(charge, using=Session)


def main() -> None:
    while True:
        for message in sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, WaitTimeSeconds=20).get(
            "Messages", []
        ):
            body = json.loads(message["Body"])
            try:
                result = charge_once(body["item"], body["order"], body["parcel"])
            except Exception:  # SQS delivers it again
                logging.exception("not charged")
                continue
            sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
            if any(batch.newly for batch in result.completed):
                print(f"order {body['order']} is complete", flush=True)


if __name__ == "__main__":
    main()
