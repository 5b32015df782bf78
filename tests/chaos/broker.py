"""The queue between actors, in the memory of the run's own process, spoken to over TCP in lines of JSON.

What is taken is the taker's until it says `done`. Who dies, or says `back`, has it delivered to somebody else. Until
`calm`, messages come in any order, some twice, and some are lost for a while.
"""

from __future__ import annotations

import json
import random
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.chaos.plans import Plan

PATIENCE = 0.3
"""Seconds that a take waits for something."""


class Broker:
    """With more items waiting than `backlog`, no plan is given away."""

    def __init__(self, plans: Iterator[Plan], dice: random.Random, backlog: int) -> None:
        self.taken: list[Plan] = []
        """Every plan that was ever given away."""
        self.counts: Counter[str] = Counter()
        self._plans: Iterator[Plan] | None = plans
        self._dice = dice
        self._backlog = backlog
        self._again: list[Plan] = []
        self._items: list[Any] = []
        self._aside: list[tuple[float, Any]] = []
        """Lost until then."""
        self._leased: dict[int, tuple[str, Any]] = {}
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
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # who was killed hung up
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def calm(self) -> None:
        """Lose and repeat nothing any more, and give no new plans away."""
        with self._changed:
            self._calm, self._plans = True, None

    def drained(self, seconds: float) -> bool:
        """Wait until each plan and each item is done."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.left, seconds)

    @property
    def left(self) -> int:
        return len(self._again) + len(self._items) + len(self._aside) + len(self._leased)

    def stop(self) -> None:
        """Each actor that asks for something is told to end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: socketserver.StreamRequestHandler) -> None:
        mine: set[int] = set()
        try:
            for line in handler.rfile:
                answer = self._answer(json.loads(line), mine)
                handler.wfile.write(json.dumps(answer).encode() + b"\n")
        except (OSError, ValueError):
            pass  # killed in the middle of it
        finally:
            with self._changed:
                self.counts["redelivered after a death"] += len(mine)
                self._give_back(mine)

    def _answer(self, said: dict[str, Any], mine: set[int]) -> Any:
        with self._changed:
            if "take" in said:
                return self._take(said["take"], said["most"], mine)
            if "put" in said:
                self.counts["published"] += len(said["put"])
                self._items += said["put"]
            done, back = set(said.get("done", ())) & mine, set(said.get("back", ())) & mine
            mine -= done | back
            for tag in done:
                del self._leased[tag]
            self.counts["done"] += len(done)
            self.counts["redelivered after a failure"] += len(back)
            self._give_back(back)
            self._changed.notify_all()
            return {}

    def _give_back(self, tags: set[int]) -> None:
        for tag in tags:
            what, message = self._leased.pop(tag)
            (self._again if what == "plans" else self._items).append(message)
        self._changed.notify_all()

    def _take(self, what: str, most: int, mine: set[int]) -> Any:
        found = self._some(what, most)
        if not found and not self._stopping:
            self._changed.wait(PATIENCE)
            found = self._some(what, most)
        if not found and self._stopping:
            return {"stop": True}
        taken = []
        for message in found:
            self._tags += 1
            self._leased[self._tags] = what, message
            mine.add(self._tags)
            taken.append([self._tags, message.to_json() if isinstance(message, Plan) else message])
        return {"taken": taken}

    def _some(self, what: str, most: int) -> list[Any]:
        if what == "plans":
            return self._some_plans(most)
        return self._some_items(most) if what == "items" else []

    def _some_plans(self, most: int) -> list[Any]:
        found: list[Any] = [self._again.pop() for _ in range(min(most, len(self._again)))]
        if not found and self._plans is not None and len(self._items) < self._backlog:
            found = [next(self._plans) for _ in range(most)]
            self.taken += found
        return found

    def _some_items(self, most: int) -> list[Any]:
        now = time.monotonic()
        self._items += [message for due, message in self._aside if self._calm or due <= now]
        self._aside = [] if self._calm else [each for each in self._aside if each[0] > now]
        found: list[Any] = []
        while self._items and len(found) < most:
            place = self._dice.randrange(len(self._items))
            self._items[place], self._items[-1] = self._items[-1], self._items[place]
            message = self._items.pop()
            chance = 1.0 if self._calm else self._dice.random()
            if chance < 0.02:
                self.counts["lost for a while"] += 1
                self._aside.append((now + self._dice.uniform(0.5, 5), message))
                continue
            if chance < 0.06:
                self.counts["delivered twice"] += 1
                self._aside.append((now + self._dice.uniform(0, 3), message))
            found.append(message)
        return found


class Link:
    """An actor's end."""

    def __init__(self, port: int) -> None:
        self._file = socket.create_connection(("127.0.0.1", port)).makefile("rwb")

    def take(self, what: str, most: int) -> list[tuple[int, Any]] | None:
        """`plans` or `items`, maybe none, after a short wait; of anything else none. None: it is time to end."""
        answer = self._ask({"take": what, "most": most})
        return None if "stop" in answer else [(tag, message) for tag, message in answer["taken"]]

    def put(self, messages: list[Any]) -> None:
        self._ask({"put": messages})

    def done(self, tags: list[int]) -> None:
        self._ask({"done": tags})

    def back(self, tags: list[int]) -> None:
        self._ask({"back": tags})

    def _ask(self, said: dict[str, Any]) -> Any:
        self._file.write(json.dumps(said).encode() + b"\n")
        self._file.flush()
        return json.loads(self._file.readline())
