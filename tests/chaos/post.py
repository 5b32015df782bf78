"""The receiver of webhooks, which is sometimes down, sometimes fails, and sometimes hangs up."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Mapping

from tests.chaos.worlds import Trouble
from tests.support.receivers import Got, Receiver, raw, receiving, status

FINE = status(204, Content_Length="0")


class Post:
    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._receivers: list[Receiver] = []
        self._secrets: list[str] = []
        self._port = 0
        self._pause = threading.Event()
        self._start()
        self.url = self._receivers[0].url
        self._port = int(self.url.split(":")[2].split("/")[0])

    @property
    def got(self) -> list[Got]:
        """All webhooks that arrived, whatever the answer was."""
        return [webhook for receiver in self._receivers for webhook in receiver.got]

    def know(self, secret: str) -> None:
        self._secrets.append(secret)
        self._receivers[-1].secrets.append(secret)

    def troubles(self) -> Mapping[str, Trouble]:
        return {"receiver down": self._down, "receiver fails": self._fails, "receiver hangs up": self._hangs_up}

    def mend(self) -> None:
        self._receivers[-1].reply = FINE

    def close(self) -> None:
        self._open.close()

    def _start(self) -> None:
        receiver = receiving(port=self._port, secrets=self._secrets)
        self._receivers.append(self._open.enter_context(receiver))

    def _down(self, dice: random.Random) -> None:
        self._open.close()
        self._pause.wait(dice.uniform(0.5, 3))
        self._start()

    def _fails(self, dice: random.Random) -> None:
        self._receivers[-1].reply = status(500)
        self._pause.wait(dice.uniform(0.5, 3))
        self.mend()

    def _hangs_up(self, dice: random.Random) -> None:
        self._receivers[-1].reply = raw(b"")
        self._pause.wait(dice.uniform(0.5, 3))
        self.mend()
