"""A producer that may be killed: `python -m tests.integrations.celery.produce BROKER-URL SETTINGS COUNT KEY`."""

from __future__ import annotations

import json
import sys

from celery import Celery

from lastbit.integrations.celery import Lastbit


def main() -> None:
    broker, settings, count, key = sys.argv[1:]
    app = Celery("producer", broker=broker)
    app.conf.update(json.loads(settings))
    task = app.signature("succeed")
    Lastbit(app).fan_out((task for _ in range(int(count))), key=key, idempotency_key=key)


if __name__ == "__main__":
    main()
