"""A producer that may be killed: `python -m tests.integrations.celery.produce BROKER-URL SETTINGS TASK COUNT KEY`."""

from __future__ import annotations

import json
import sys

from celery import Celery

from lastbit.integrations.celery import Lastbit
from tests.integrations import crawling


def main() -> None:
    broker, settings, task, count, key = sys.argv[1:]
    app = Celery("producer", broker=broker)
    app.conf.update(json.loads(settings))
    signatures = (app.signature(task, [page]) for page in crawling.roots(int(count)))
    Lastbit(app).fan_out(signatures, key=key, idempotency_key=key)


if __name__ == "__main__":
    main()
