"""The offsets that were outstanding when a window was restored, and that the source should deliver again."""

from __future__ import annotations

import logging
from collections import deque

from lastbit.streams.window import AckWindow

log = logging.getLogger("lastbit.streams")


class Awaited:
    """If the source skips such an offset, retention or compaction has removed it from the log. It is acked, so that it
    doesn't hold the floor forever."""

    def __init__(self, window: AckWindow) -> None:
        self._window = window
        self._offsets = deque(window.outstanding)

    def pass_to(self, offset: int) -> None:
        """The source delivers this offset now. Raises `WindowClosed`."""
        while self._offsets and self._offsets[0] <= offset:
            vanished = self._offsets.popleft()
            if vanished < offset and self._window.ack(vanished):
                log.warning("the source skipped offset %d, which was outstanding: its log no longer has it", vanished)
