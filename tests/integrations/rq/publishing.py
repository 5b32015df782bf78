"""Workers that enqueue jobs at the end of batches, one that forks and one that doesn't."""

from __future__ import annotations

import os
import signal
from typing import Any

from lastbit.integrations import _endings
from lastbit.integrations.rq import LastbitMixin, LastbitSimpleWorker, LastbitWorker
from tests import mutants
from tests.integrations.rq import app

mutants.from_environment()
_endings.TTL = 1.0  # type: ignore[misc]
_endings.LOOK = 0.1  # type: ignore[misc]


class Publishing(LastbitMixin):
    app_name = os.environ["TESTS_APP"]
    endings = {"tests.integrations.rq.app.notes_its_batch": {"result_ttl": 60}}  # noqa: RUF012

    def _acked(self, *args: Any) -> None:
        """With TESTS_DIES, the first ack is the last act of its worker: the service has it."""
        if "TESTS_DIES" in os.environ and app.store.incr("acks") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._acked(*args)

    def _learn(self, *args: Any) -> None:
        if "TESTS_DIES" in os.environ and app.store.incr("acks") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._learn(*args)


class Forking(Publishing, LastbitWorker):
    pass


class Simple(Publishing, LastbitSimpleWorker):
    pass
