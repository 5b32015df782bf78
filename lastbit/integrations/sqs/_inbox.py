"""Received messages that no worker has taken yet.

A message that waits here is hidden from other consumers, which may be idle. So receives ask for the number of idle
workers and a few messages more, not for as many as SQS gives.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lastbit.integrations.sqs._queue import MOST_ENTRIES, Message


@dataclass(eq=False, slots=True)
class Run:
    """Messages that one worker handles in order: one message, or on a FIFO queue those of a group that were received
    together. SQS delivers no other messages of the group until all of them are deleted or visible again."""

    messages: list[Message]
    received: float = field(default_factory=time.monotonic)
    _ended: set[int] = field(default_factory=set)
    """The positions of messages whose outcomes are stored."""
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self, position: int) -> list[Message]:
        """The outcome of the message at `position` is stored. Returns the messages that may be deleted now. A message
        waits for its predecessors: if one of them is delivered again, it must be too, or they would be handled out of
        order."""
        deletable: list[Message] = []
        with self._lock:
            self._ended.add(position)
            while self._next in self._ended:
                deletable.append(self.messages[self._next])
                self._next += 1
        return deletable


def runs(messages: Sequence[Message], is_fifo: bool) -> list[Run]:
    """Divide the messages of one receive."""
    if not is_fifo:
        return [Run([message]) for message in messages]
    groups: dict[str, list[Message]] = {}
    for message in messages:
        groups.setdefault(message["Attributes"]["MessageGroupId"], []).append(message)
    return [Run(group) for group in groups.values()]


class Inbox:
    """`prefetch`: the number of messages that may wait although no worker is idle."""

    def __init__(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._runs: deque[Run] = deque()
        self._waiting = 0
        """Messages in `_runs`."""
        self._requested = 0
        """Messages that receives have asked for and not brought yet."""
        self._idle = 0
        """Workers that wait."""
        self._is_closed = False
        lock = threading.Lock()
        self._needed = threading.Condition(lock)
        self._arrived = threading.Condition(lock)

    def request(self) -> int:
        """Wait until messages are needed. Returns the number to ask SQS for; 0 if the inbox is closed."""
        with self._needed:
            self._needed.wait_for(lambda: self._is_closed or self.wanted() > 0)
            if self._is_closed:
                return 0
            count = self.wanted()
            self._requested += count
            return count

    def wanted(self) -> int:
        """The number of messages to ask for now. A receive of one takes as long as one of ten, so none is made for a
        few messages while every worker has one."""
        room = self._idle + self._prefetch - self._waiting - self._requested
        is_starving = self._idle > self._waiting + self._requested
        if is_starving or room >= max(1, min(MOST_ENTRIES, self._prefetch)):
            return min(MOST_ENTRIES, room)
        return 0

    def put(self, count: int, runs: Sequence[Run]) -> bool:
        """The result of a receive that asked for `count` messages. Returns False if the inbox is closed and the
        messages were not accepted."""
        with self._arrived:
            self._requested -= count
            if self._is_closed:
                return False
            self._runs.extend(runs)
            self._waiting += sum(len(run.messages) for run in runs)
            self._arrived.notify(len(runs))
            self._needed.notify()
            return True

    def take(self) -> Run | None:
        """Wait for a run; None if the inbox is closed."""
        with self._arrived:
            self._idle += 1
            self._needed.notify()
            self._arrived.wait_for(lambda: self._runs or self._is_closed)
            self._idle -= 1
            if self._is_closed:
                return None
            run = self._runs.popleft()
            self._waiting -= len(run.messages)
            self._needed.notify()
            return run

    def idle_workers(self) -> int:
        return self._idle

    def close(self) -> list[Run]:
        """Wake all that wait. Returns the runs that no worker has taken."""
        with self._arrived:
            self._is_closed = True
            self._arrived.notify_all()
            self._needed.notify_all()
            runs, self._runs = list(self._runs), deque()
            return runs
