"""`python -m api`, except that it exits between a commit and its answer: after the first ack (if LASTBIT_DIE_AFTER is
`ack`) or seal (if it is `seal`) that completed a batch."""

from __future__ import annotations

import os
import sys
from typing import Any

from api.__main__ import main
from core.batches.batch import Sealed
from core.service.acks import AckService
from core.service.writes import WriteService


def _exit_when_complete(verb: str) -> None:
    commit, commit_writes = AckService._commit, WriteService._commit

    def dying_commit(self: AckService, units: Any, *, lock_waits: int) -> Any:
        outcomes = commit(self, units, lock_waits=lock_waits)
        if any(outcome.completed is not None and outcome.completed.newly for outcome in outcomes):
            os._exit(9)
        return outcomes

    def dying_commit_of_writes(self: WriteService, operations: Any, *, lock_waits: int) -> Any:
        outcomes = commit_writes(self, operations, lock_waits=lock_waits)
        if any(isinstance(outcome.value, Sealed) and outcome.value.newly for outcome in outcomes):
            os._exit(9)
        return outcomes

    if verb == "ack":
        AckService._commit = dying_commit  # type: ignore[method-assign]
    else:
        WriteService._commit = dying_commit_of_writes  # type: ignore[method-assign]


if __name__ == "__main__":
    _exit_when_complete(os.environ["LASTBIT_DIE_AFTER"])
    sys.exit(main())
