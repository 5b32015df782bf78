"""`python -m tests.integrations.rq.produce COUNT KEY`: a producer that may be killed and run again."""

from __future__ import annotations

import sys

from rq import Retry

from lastbit.integrations.rq import fan_out
from tests.integrations.rq import app

if __name__ == "__main__":
    count, key = int(sys.argv[1]), sys.argv[2]
    calls = ((number,) for number in range(count))
    fan_out(app.queue, app.succeeds, calls, options={"retry": Retry(max=9)}, key=key, idempotency_key=key)
