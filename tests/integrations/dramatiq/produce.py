"""`python -m tests.integrations.dramatiq.produce COUNT KEY`: a producer that may be killed and run again."""

from __future__ import annotations

import sys

from lastbit.integrations.dramatiq import fan_out
from tests.integrations.dramatiq import app

if __name__ == "__main__":
    count, key = int(sys.argv[1]), sys.argv[2]
    fan_out((app.succeeds.message(number) for number in range(count)), key=key, idempotency_key=key)
