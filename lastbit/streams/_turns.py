"""The workers of several streams: the streams with ready keys take turns, so that a busy one delays no other."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any, Protocol


class HasKeys(Protocol):
    """A stream. `work` returns an awaitable if tasks do the work."""

    def work(self, key: Hashable) -> Any: ...


class Turns:
    """For the workers, it is one stream. `put` is theirs."""

    def __init__(self, put: Callable[[Turns, None], object]) -> None:
        self._put = put
        self._ready: OrderedDict[HasKeys, deque[Hashable]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, stream: HasKeys, key: Hashable) -> None:
        """A key of this stream is ready."""
        with self._lock:
            self._ready.setdefault(stream, deque()).append(key)
        self._put(self, None)

    def work(self, _key: Hashable) -> Any:
        """Let the next stream handle its next key. Called once for each `put`."""
        with self._lock:
            stream, keys = self._ready.popitem(last=False)
            key = keys.popleft()
            if keys:
                self._ready[stream] = keys
        return stream.work(key)
