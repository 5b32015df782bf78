"""The dispatcher, as `python -m jobs.dispatcher`, but it exits between an answer and its record."""

from __future__ import annotations

import os
import sys
from typing import Any

from core.webhooks import deliveries
from jobs.dispatcher import main


def _exit(*_: Any) -> Any:
    os._exit(9)


if __name__ == "__main__":
    deliveries.record = _exit
    sys.exit(main())
