"""AWS Lambda: invocations with messages of moto's server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from aws_lambda_powertools.utilities.batch import EventType, process_partial_response

from lastbit import BatchHandle
from lastbit.errors import LastbitError
from lastbit.failures import Redrive
from lastbit.integrations import Skipped, sqs
from lastbit.integrations._untracked import WhenUntracked
from lastbit.integrations.aws_lambda import LastbitBatchProcessor
from tests.integrations.aws_lambda.poller import poll
from tests.integrations.drivers import Handle, Link, OnCompleted, Until, repeated
from tests.support.aws import Moto


class Driver:
    pauses: ClassVar = False
    holds: ClassVar = False
    reports: ClassVar = True
    handlers: ClassVar = 10
    follows: ClassVar = False
    questions: ClassVar = 10
    loses_ids: ClassVar = True
    skipped: ClassVar = Skipped
    skip_ended = True
    untracked: WhenUntracked = "handle"

    def __init__(self, request: pytest.FixtureRequest) -> None:
        moto: Moto = request.getfixturevalue("moto")
        self._queue = moto.queue(visibility=1)

    def send(self, link: Link, bodies: Sequence[str], *, seal: bool = True) -> BatchHandle:
        return sqs.fan_out(self._queue.client, self._queue.url, bodies, seal=seal, lastbit=link.given)

    def resend(self, link: Link, redrive: Redrive, bodies: Sequence[str]) -> int:
        return sqs.resend(self._queue.client, self._queue.url, redrive, bodies, lastbit=link.given)

    def work(self, link: Link, handle: Handle, until: Until, on_completed: OnCompleted | None = None) -> object:
        processor = LastbitBatchProcessor(
            EventType.SQS,
            raise_on_entire_batch_failure=False,
            lastbit=link.given,
            on_completed=on_completed,
            skip_ended=self.skip_ended,
            untracked=self.untracked,
        )

        def function(event: dict[str, Any], context: Any) -> Any:
            return process_partial_response(event, lambda record: handle(record.body), processor, context)

        try:
            repeated(lambda: poll(self._queue, function), until)
        except LastbitError as error:
            return error
        return None

    def left(self) -> int:
        return self._queue.count()

    def send_body(self, body: str, item: str | None) -> None:
        attribute = {"DataType": "String", "StringValue": item}
        self._queue.send(body, MessageAttributes={} if item is None else {sqs.ITEM: attribute})

    def refused(self) -> int:
        return self.left()
