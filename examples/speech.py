"""The reports of the examples' processes: one JSON object per line on standard output."""

from __future__ import annotations

import json
import sys
import threading

_one_at_a_time = threading.Lock()


def say(**facts: object) -> None:
    with _one_at_a_time:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
