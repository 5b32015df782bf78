"""The service, as `python -m api`, but it exits between a commit and its answer: after the first ack (LASTBIT_DIE_AFTER
is `ack`) or seal (`seal`) that completed a batch."""

from __future__ import annotations

import os
import sys
from typing import Any

from api.__main__ import main
from core.service.acks import AckService
from core.service.batches import BatchService


def _exit_when_complete(verb: str) -> None:
    commit, seal = AckService._commit, BatchService.seal

    def dying_commit(self: AckService, units: Any, *, lock_waits: int) -> Any:
        outcomes = commit(self, units, lock_waits=lock_waits)
        if any(outcome.completed is not None and outcome.completed.newly for outcome in outcomes):
            os._exit(9)
        return outcomes

    def dying_seal(self: BatchService, batch: int, idempotency_key: str | None = None) -> Any:
        sealed = seal(self, batch, idempotency_key)
        if sealed.newly:
            os._exit(9)
        return sealed

    if verb == "ack":
        AckService._commit = dying_commit  # type: ignore[method-assign]
    else:
        BatchService.seal = dying_seal  # type: ignore[method-assign]


if __name__ == "__main__":
    _exit_when_complete(os.environ["LASTBIT_DIE_AFTER"])
    sys.exit(main())
