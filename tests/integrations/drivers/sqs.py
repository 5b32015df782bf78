"""Amazon SQS: moto's server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from lastbit import BatchHandle
from lastbit.failures import Redrive
from lastbit.integrations import Skipped
from lastbit.integrations import sqs as adapter
from lastbit.integrations._untracked import WhenUntracked
from tests.integrations.drivers import Handle, Link, OnCompleted, Until, consumed
from tests.support.aws import Moto


class Driver:
    pauses: ClassVar = False
    holds: ClassVar = True
    reports: ClassVar = True
    handlers: ClassVar = 8
    follows: ClassVar = True
    questions: ClassVar = 10
    loses_ids: ClassVar = True
    skipped: ClassVar = Skipped
    skip_ended = True
    untracked: WhenUntracked = "handle"

    def __init__(self, request: pytest.FixtureRequest) -> None:
        moto: Moto = request.getfixturevalue("moto")
        self._queue = moto.queue(visibility=1)

    def send(self, link: Link, bodies: Sequence[str], *, seal: bool = True) -> BatchHandle:
        return adapter.fan_out(self._queue.client, self._queue.url, bodies, seal=seal, lastbit=link.given)

    def resend(self, link: Link, redrive: Redrive, bodies: Sequence[str]) -> int:
        return adapter.resend(self._queue.client, self._queue.url, redrive, bodies, lastbit=link.given)

    def work(self, link: Link, handle: Handle, until: Until, on_completed: OnCompleted | None = None) -> object:
        def run(**options: object) -> None:
            adapter.consume(self._queue.client, self._queue.url, lambda message: handle(message["Body"]), **options)  # type: ignore[arg-type]

        return consumed(
            run,
            link,
            until,
            on_completed=on_completed,
            skip_ended=self.skip_ended,
            untracked=self.untracked,
            retry_delay=0,
            wait_seconds=1,
        )

    def left(self) -> int:
        return self._queue.count()

    def send_body(self, body: str, item: str | None) -> None:
        attribute = {"DataType": "String", "StringValue": item}
        self._queue.send(body, MessageAttributes={} if item is None else {adapter.ITEM: attribute})

    def refused(self) -> int:
        return self.left()
