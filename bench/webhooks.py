"""The number of webhooks a second that one dispatcher delivers to one fast receiver. The receiver is on this machine,
in a separate process, and verifies each signature. Its clock runs from the first to the last new event.

For comparison, a loop signs and posts the same events with the dispatcher's HTTP client, in as many threads as the
dispatcher uses for one receiver: what remains is the cost of claims and records. And the receiver alone gets signed
requests over many connections that stay open.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from standardwebhooks import Webhook

from bench import load, measure, verbs
from bench.measure import Scale
from bench.peer.receiver import Received, Receiver, receiving
from core.feed import Event
from core.webhooks import message
from senders.webhooks import WebhookSender
from tests.support.servers import ROOT

TYPE = "robot.moved"
THREADS = 8
"""Threads of the loop: half of the dispatcher's, as many as it uses for one receiver."""
_ids = (f"event-{number}" for number in itertools.count())
_LOCAL = {"LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true"}


@contextlib.contextmanager
def _dispatcher(url: str) -> Iterator[None]:
    command = [sys.executable, "-m", "jobs.dispatcher", "--database-url", url]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **_LOCAL}, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def _delivered(port: int, receiver: Receiver, secret: str, count: int) -> Received:
    """Append events of the subscribed type, and wait until the receiver has all of them."""
    ids = list(itertools.islice(_ids, count))
    receiver.expect(secret, ids)
    for start in range(0, count, 1000):
        events = [{"id": id, "type": TYPE, "data": {"x": 1}} for id in ids[start : start + 1000]]
        measure.call(port, "POST", "/v1/events", {"events": events})
    return receiver.wait()


def _alone(receiver: Receiver, secret: str, count: int, connections: int) -> Received:
    ids = list(itertools.islice(_ids, count))
    receiver.expect(secret, ids)
    now = datetime.now(UTC)
    requests = []
    for id in ids:
        content = json.dumps({"id": id, "type": TYPE, "data": {"x": 1}}).encode()
        headers = {
            "webhook-id": id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Webhook(secret).sign(id, now, content.decode()),
        }
        requests.append(load.encoded("/hook", content, headers=headers))
    load.drive(receiver.port, requests, connections)
    return receiver.wait()


def _looped(receiver: Receiver, secret: str, count: int) -> Received:
    """Post events in a loop, in threads, without a database."""
    ids = list(itertools.islice(_ids, count))
    receiver.expect(secret, ids)
    sender = WebhookSender(allow_private=True)
    now = datetime.now(UTC)

    def post(id: str) -> None:
        content = message.body(Event(1, id, TYPE, None, None, '{"x":1}', now))
        sender.send(f"http://127.0.0.1:{receiver.port}/hook", message.headers([secret], id, now, content), content)

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(post, ids):
            pass
    return receiver.wait()


def run(scale: Scale) -> None:
    loop_rounds: list[Received] = []
    dispatcher_rounds: list[Received] = []
    receiver_rounds: list[Received] = []
    with (
        receiving() as receiver,
        measure.mariadb() as server,
        measure.lastbit_on(server, **_LOCAL) as service,
        _dispatcher(service.database_url),
    ):
        hook = {"url": f"http://127.0.0.1:{receiver.port}/hook", "types": [TYPE]}
        secret = measure.call(service.port, "POST", "/v1/webhooks", hook)["secret"]
        first = max(scale.requests // 200, 2 * scale.connections)
        count = verbs.calls_of_round(_delivered(service.port, receiver, secret, first).rate, scale)
        for _ in range(scale.rounds):
            receiver_rounds.append(_alone(receiver, secret, scale.requests // 4, scale.connections))
            loop_rounds.append(_looped(receiver, secret, count))
            dispatcher_rounds.append(_delivered(service.port, receiver, secret, count))
    rounds = {"one dispatcher": dispatcher_rounds, "a loop": loop_rounds, "the receiver alone": receiver_rounds}
    rows = [
        [
            name,
            f"{statistics.median(received.rate for received in own):,.0f}",
            f"{statistics.median(a.rate / b.rate for a, b in zip(own, loop_rounds, strict=True)):.2f}",
            f"{sum(received.repeats for received in own)}",
        ]
        for name, own in rounds.items()
    ]
    measure.show(
        f"webhooks: MariaDB (medians of {scale.rounds} rounds of {count})",
        ["", "deliveries/s", "ratio", "repeats"],
        rows,
        f"ratio: to the loop, which posts signed events\nwith the same client in {THREADS} threads, without a database",
    )


if __name__ == "__main__":
    measure.alone(run)
