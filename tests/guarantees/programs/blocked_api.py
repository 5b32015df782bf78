"""`python -m api` whose event loop is blocked for two seconds by each SIGUSR1: a handler runs in the loop's thread."""

from __future__ import annotations

import signal
import sys
import time

from api.__main__ import main

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(2))
    sys.exit(main())
