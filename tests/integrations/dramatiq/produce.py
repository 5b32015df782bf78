"""`python -m tests.integrations.dramatiq.produce ACTOR COUNT KEY`: a producer that may be killed and run again."""

from __future__ import annotations

import sys

from lastbit.integrations.dramatiq import fan_out
from tests.integrations import crawling
from tests.integrations.dramatiq import app

if __name__ == "__main__":
    actor, count, key = getattr(app, sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    fan_out(map(actor.message, crawling.roots(count)), key=key, idempotency_key=key)
