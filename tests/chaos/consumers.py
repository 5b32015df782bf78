"""Consumers: each resolves items in its own way and confirms the messages after the answer.

Messages without an answer go back to the queue. A consumer sometimes also sends an id that was never issued.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import tempfile
import uuid
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lastbit import AsyncClient, Client, Retry, errors
from lastbit._urllib import Connection
from lastbit.ids import ItemId
from tests.chaos.broker import Link
from tests.chaos.command_line import CommandLine
from tests.chaos.plans import Do
from tests.chaos.record import Record

if TYPE_CHECKING:
    from lastbit.spark.posting import Mask

STRANGER = 10**9
"""The group of ids that were never issued."""
REASON = "the consumer gave up"
TIMEOUT = 4.0
"""Seconds to wait for an answer: so short that the service may still execute a request after the client gave up."""
PATIENCE = Retry(attempts=40, deadline=20, base=0.2, cap=2)


class Messages:
    """Messages that a consumer has taken."""

    def __init__(self, link: Link, deliveries: Iterable[tuple[int, Any]]) -> None:
        self._link = link
        self._held = [(tag, item, Do(action)) for tag, (item, action) in deliveries]

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def to_ack(self) -> list[str]:
        return [item for _, item, action in self._held if action is Do.ACK]

    @property
    def to_fail(self) -> list[str]:
        return [item for _, item, action in self._held if action is not Do.ACK]

    def alone(self) -> Iterator[Messages]:
        """Each message on its own."""
        for tag, item, action in self._held:
            yield Messages(self._link, [(tag, (item, action))])

    @contextlib.contextmanager
    def handled(self, *doubts: type[Exception]) -> Iterator[None]:
        """Confirm the messages when the block ends, return them when the service fails, or at these other errors. Items
        to redrive are published first."""
        tags = [tag for tag, _, _ in self._held]
        try:
            yield
        except (errors.LastbitError, *doubts):
            self._link.back(tags)
        else:
            if redriven := [(item, Do.ACK) for _, item, action in self._held if action is Do.REDRIVE]:
                self._link.put(redriven)
            self._link.done(tags)


class Way(Protocol):
    """How a consumer resolves its messages."""

    most: int
    """The number of messages that it takes at a time."""

    def resolve(self, messages: Messages) -> None: ...


def consume(way: Way, link: Link) -> None:
    """Work until the broker stops the actor."""
    while (deliveries := link.take("items", way.most)) is not None:
        if deliveries:
            way.resolve(Messages(link, deliveries))


def _with_stranger(dice: random.Random, items: Sequence[str]) -> list[str]:
    if items and dice.random() < 0.03:
        return [*items, f"{items[0].partition(':')[0]}:{STRANGER}:{dice.randrange(64)}"]
    return [*items]


class Sync:
    """`Client.ack`, with one id or with several."""

    most = 12

    def __init__(self, client: Client, dice: random.Random) -> None:
        self._client = client
        self._dice = dice

    def resolve(self, messages: Messages) -> None:
        for part in messages.alone() if self._dice.random() < 0.5 else [messages]:
            self.send(part)

    def send(self, messages: Messages) -> None:
        with messages.handled():
            if messages.to_ack:
                self._client.ack(_with_stranger(self._dice, messages.to_ack))
            if messages.to_fail:
                reason = self._dice.choice([REASON, None])
                self._client.fail(_with_stranger(self._dice, messages.to_fail), reason)


class Bulk(Sync):
    """Enough ids in one call to make it a large one."""

    most = 160

    def resolve(self, messages: Messages) -> None:
        self.send(messages)


class Async:
    """Many tasks with one id each."""

    most = 40

    def __init__(self, client: AsyncClient, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner

    def resolve(self, messages: Messages) -> None:
        async def one(message: Messages) -> None:
            with message.handled():
                for item in message.to_ack:
                    await self._client.ack(item)
                for item in message.to_fail:
                    await self._client.fail(item, REASON)

        async def every() -> None:
            await asyncio.gather(*map(one, messages.alone()))

        self._runner.run(every())


class Acking:
    """`acker()`: a message is confirmed when its futures are done."""

    most = 60

    def __init__(self, client: Client) -> None:
        self._acker = client.acker()

    def resolve(self, messages: Messages) -> None:
        waiting = []
        for message in messages.alone():
            futures = [self._acker.ack(item) for item in message.to_ack]
            futures += [self._acker.fail(item, REASON) for item in message.to_fail]
            waiting.append((message, futures))
        for message, futures in waiting:
            with message.handled():
                for future in futures:
                    with contextlib.suppress(errors.ItemRejected):  # cancelled; the checks judge it
                        future.result()


class CommandLines:
    """`lastbit ack` and `lastbit fail`, with ids piped in."""

    most = 80

    def __init__(self, lastbit: CommandLine) -> None:
        self._lastbit = lastbit

    def resolve(self, messages: Messages) -> None:
        with messages.handled():
            for verb, path, items in (
                ("ack", "/v1/acks", messages.to_ack),
                ("fail", "/v1/failures", messages.to_fail),
            ):
                if items:
                    self._lastbit.run([verb, "-"], path, {"items": items}, input="\n".join(items))


class Masks:
    """Sends masks with the code of Spark's executors (`lastbit.spark.posting`), but makes the masks itself, so a short
    run needs no JVM."""

    most = 400

    def __init__(self, url: str) -> None:
        # Imported here because it imports PySpark.
        from lastbit.spark import posting

        self._posting = posting
        self._connection = Connection.named(url, timeout=TIMEOUT, retry=PATIENCE)

    def acked(self, messages: Messages) -> list[str]:
        return messages.to_ack

    def resolve(self, messages: Messages) -> None:
        bits: dict[tuple[int, int], list[int]] = {}
        for verb, items in enumerate((self.acked(messages), messages.to_fail)):
            for item in map(ItemId.parse, items):
                bits.setdefault((item.batch, item.group), [0, 0])[verb] |= 1 << item.index
        masks: list[Mask] = [
            (batch, group, _bytes(acked), _bytes(failed & ~acked), None, (acked | failed).bit_count(), 0, 1)
            for (batch, group), (acked, failed) in sorted(bits.items())
        ]
        # Like a task that is run again: the same content has the same keys.
        posting = self._posting.Posting(self._connection, "masks", REASON, groups=random.choice([1, 8, 512]))
        with messages.handled():
            for result in self._posting.post(masks, posting):
                if result.error is not None:
                    raise result.error


class RepeatingMasks(Masks):
    """Repeats the latest acks of the same batches with each call, as after a crash. So its calls touch many groups,
    including the first ones and the last one."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._sent: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=500))

    def acked(self, messages: Messages) -> list[str]:
        for item in messages.to_ack:
            self._sent[ItemId.parse(item).batch].append(item)
        return [item for batch in {ItemId.parse(item).batch for item in messages.to_ack} for item in self._sent[batch]]


def _bytes(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


class Spark:
    """`lastbit.spark.ack` on a real session. The executors are processes of Spark and aren't recorded. The record has
    the call, with its failures under `failed`, and the report."""

    most = 3000

    def __init__(self, url: str, record: Record) -> None:
        from pyspark.sql import SparkSession

        os.environ["PYSPARK_PYTHON"] = sys.executable
        self._url = url
        self._record = record
        # A session that replaces a killed one uses the same folder.
        folder = f"{tempfile.gettempdir()}/lastbit-chaos-spark"
        builder = SparkSession.builder.master("local[1]").appName("lastbit chaos")
        for name, value in {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.sql.shuffle.partitions": "2",
            "spark.log.level": "OFF",
            "spark.local.dir": folder,
            "spark.sql.warehouse.dir": f"{folder}/warehouse",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        }.items():
            builder = builder.config(name, value)
        self._session = builder.getOrCreate()

    def resolve(self, messages: Messages) -> None:
        from lastbit import spark

        key = uuid.uuid4().hex
        rows = [(item, False) for item in messages.to_ack] + [(item, True) for item in messages.to_fail]
        frame = self._session.createDataFrame(rows, "item_id string, failed boolean")
        body = {"items": messages.to_ack, "failed": messages.to_fail}
        number = self._record.ask("POST", "/v1/acks", key, body)
        with messages.handled():
            try:
                report = spark.ack(
                    frame,
                    url=self._url,
                    failed="failed",
                    reason=REASON,
                    parallel=2,
                    timeout=TIMEOUT,
                    retry=PATIENCE,
                    idempotency_key=key,
                )
            except errors.LastbitError as error:
                self._record.lost(number, str(error))
                raise
            rejected = [{"reason": reason, "count": count} for reason, count in report.rejected.items()]
            completed = [{"batch": batch} for batch in report.completed]
            answer = {"applied": report.applied, "repeated": report.repeated}
            self._record.answered(number, 200, {**answer, "rejected": rejected, "completed": completed})
