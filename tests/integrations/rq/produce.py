"""`python -m tests.integrations.rq.produce FUNCTION COUNT KEY`: a producer that may be killed and run again."""

from __future__ import annotations

import sys

from rq import Retry

from lastbit.integrations.rq import fan_out
from tests.integrations import crawling
from tests.integrations.rq import app

if __name__ == "__main__":
    function, count, key = getattr(app, sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    calls = ((page,) for page in crawling.roots(count))
    fan_out(app.queue, function, calls, options={"retry": Retry(max=9)}, key=key, idempotency_key=key)
