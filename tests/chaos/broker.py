"""The queue between actors. It lives in the memory of the run's process and speaks JSON lines over TCP.

A message belongs to the connection that took it until that connection sends `done`. If the connection sends `back` or
closes, the message is delivered again. Until `calm`, messages come in any order, some twice, and some are lost for a
while.

A lane is a queue with its own plans, producers and consumers, which work on the same batches.
"""

from __future__ import annotations

import json
import random
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tests.chaos.plans import Plan

PATIENCE = 0.3
"""Seconds that a take waits for a message."""


class Lane:
    """No new plan is handed out while more than `backlog` items are waiting. `lost_share` is the share of items that
    are lost for a while. With `fresh`, half of the items handed out are among the newest."""

    def __init__(self, plans: Iterator[Plan], backlog: int, lost_share: float = 0.02, *, fresh: bool = False) -> None:
        self.lost = lost_share
        self.fresh = fresh
        self.plans: Iterator[Plan] | None = plans
        self.backlog = backlog
        self.again: list[Plan] = []
        self.items: list[Any] = []
        self.aside: list[tuple[float, Any]] = []
        """Items that are lost until the given time."""

    @property
    def left(self) -> int:
        return len(self.again) + len(self.items) + len(self.aside)

    def give_back(self, message: Any) -> None:
        (self.again if isinstance(message, Plan) else self.items).append(message)


class Broker:
    """All lanes, by name."""

    def __init__(self, lanes: Mapping[str, Lane], dice: random.Random) -> None:
        self.taken: list[Plan] = []
        """Every plan that was handed out."""
        self.counts: Counter[str] = Counter()
        self._lanes = lanes
        self._dice = dice
        self._leased: dict[int, tuple[Lane, Any]] = {}
        self._tags = 0
        self._stopping = False
        self._changed = threading.Condition()
        self._calm = False
        broker = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                broker._serve(self)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a killed actor hangs up
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def calm(self) -> None:
        """Stop losing and repeating messages, and hand out no new plans."""
        with self._changed:
            self._calm = True
            for lane in self._lanes.values():
                lane.plans = None

    def drained(self, seconds: float) -> bool:
        """Wait until each plan and each item is done."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.left, seconds)

    @property
    def left(self) -> int:
        return sum(lane.left for lane in self._lanes.values()) + len(self._leased)

    def stop(self) -> None:
        """Make each actor end at its next request."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: socketserver.StreamRequestHandler) -> None:
        leases: set[int] = set()
        try:
            for line in handler.rfile:
                answer = self._answer(json.loads(line), leases)
                handler.wfile.write(json.dumps(answer).encode() + b"\n")
        except (OSError, ValueError):
            pass  # killed while it was sending
        finally:
            with self._changed:
                self.counts["redelivered after a death"] += len(leases)
                self._give_back(leases)

    def _answer(self, request: dict[str, Any], leases: set[int]) -> Any:
        lane = self._lanes[request["lane"]]
        with self._changed:
            if "take" in request:
                return self._take(lane, request["take"], request["most"], leases)
            if "put" in request:
                self.counts["published"] += len(request["put"])
                lane.items += request["put"]
            done_tags, returned_tags = set(request.get("done", ())) & leases, set(request.get("back", ())) & leases
            leases -= done_tags | returned_tags
            for tag in done_tags:
                del self._leased[tag]
            self.counts["done"] += len(done_tags)
            self.counts["redelivered after a failure"] += len(returned_tags)
            self._give_back(returned_tags)
            self._changed.notify_all()
            return {}

    def _give_back(self, tags: set[int]) -> None:
        for tag in tags:
            lane, message = self._leased.pop(tag)
            lane.give_back(message)
        self._changed.notify_all()

    def _take(self, lane: Lane, kind: str, limit: int, leases: set[int]) -> Any:
        messages = self._some(lane, kind, limit)
        if not messages and not self._stopping:
            self._changed.wait(PATIENCE)
            messages = self._some(lane, kind, limit)
        if not messages and self._stopping:
            return {"stop": True}
        deliveries = []
        for message in messages:
            self._tags += 1
            self._leased[self._tags] = lane, message
            leases.add(self._tags)
            deliveries.append([self._tags, message.to_json() if isinstance(message, Plan) else message])
        return {"taken": deliveries}

    def _some(self, lane: Lane, kind: str, limit: int) -> list[Any]:
        if kind == "plans":
            return self._some_plans(lane, limit)
        return self._some_items(lane, limit) if kind == "items" else []

    def _some_plans(self, lane: Lane, limit: int) -> list[Any]:
        plans: list[Any] = [lane.again.pop() for _ in range(min(limit, len(lane.again)))]
        if not plans and lane.plans is not None and len(lane.items) < lane.backlog:
            plans = [next(lane.plans) for _ in range(limit)]
            self.taken += plans
        return plans

    def _some_items(self, lane: Lane, limit: int) -> list[Any]:
        now = time.monotonic()
        lane.items += [message for due, message in lane.aside if self._calm or due <= now]
        lane.aside = [] if self._calm else [entry for entry in lane.aside if entry[0] > now]
        items: list[Any] = []
        while lane.items and len(items) < limit:
            first = max(0, len(lane.items) - 10) if lane.fresh and self._dice.random() < 0.5 else 0
            place = self._dice.randrange(first, len(lane.items))
            lane.items[place], lane.items[-1] = lane.items[-1], lane.items[place]
            message = lane.items.pop()
            chance = 1.0 if self._calm else self._dice.random()
            if chance < lane.lost:
                self.counts["lost for a while"] += 1
                lane.aside.append((now + self._dice.uniform(0.5, 5), message))
                continue
            if chance < lane.lost + 0.04:
                self.counts["delivered twice"] += 1
                lane.aside.append((now + self._dice.uniform(0, 3), message))
            items.append(message)
        return items


class Link:
    """An actor's client of the broker."""

    def __init__(self, port: int, lane: str) -> None:
        self._lane = lane
        self._file = socket.create_connection(("127.0.0.1", port)).makefile("rwb")

    def take(self, kind: str, limit: int) -> list[tuple[int, Any]] | None:
        """Take `plans` or `items`; the list may be empty after a short wait. None means that the actor must end."""
        answer = self._ask({"take": kind, "most": limit})
        return None if "stop" in answer else [(tag, message) for tag, message in answer["taken"]]

    def put(self, messages: list[Any]) -> None:
        self._ask({"put": messages})

    def done(self, tags: list[int]) -> None:
        self._ask({"done": tags})

    def back(self, tags: list[int]) -> None:
        self._ask({"back": tags})

    def _ask(self, request: dict[str, Any]) -> Any:
        self._file.write(json.dumps({**request, "lane": self._lane}).encode() + b"\n")
        self._file.flush()
        return json.loads(self._file.readline())
