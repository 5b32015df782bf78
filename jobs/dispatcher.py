"""`python -m jobs.dispatcher`: send webhooks, until it is told to stop. Logs are JSON lines on standard error.

On MariaDB and MySQL at least one must run; any number may, and they share the work (with `--once` it takes whatever is
due). On SQLite the service does this itself. Each round also pays what ended child batches owe their parents and a
crash left. The rules live in `core.dispatcher`.

On SIGTERM it finishes what is being sent. Exit status: 0 told to stop, or `--once` and nothing is due any more; 1 the
database can't be worked with; 2 wrong use.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading

import structlog

from core import errors, logs
from core.dispatcher import Dispatcher
from core.settings import settings_of
from core.storage import schema
from core.storage.database import Database
from core.ticker import ticking
from core.webhooks.replicas import Replica
from senders.webhooks import WebhookSender

log = structlog.get_logger(__name__)

SOONEST: float = 0.01
"""Seconds between two rounds, at least."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.dispatcher", description="Send webhooks, until told to stop.")
    parser.add_argument("--once", action="store_true", help="end when nothing is due any more")
    parser.add_argument("--database-url", metavar="URL", help="LASTBIT_DATABASE_URL, if not given")
    parser.add_argument(
        "--every",
        dest="dispatcher_every",
        type=float,
        metavar="SECONDS",
        help="between two looks for deliveries (0.5)",
    )
    parser.add_argument(
        "--threads", dest="dispatcher_threads", type=int, metavar="N", help="deliveries that are sent at once (16)"
    )
    given = vars(parser.parse_args(arguments))
    once = given.pop("once")
    settings = settings_of(parser, given)
    logs.configure(settings.log_level)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        with Database(settings.database_url) as database:
            database.read(schema.check)
            dispatcher = Dispatcher(
                database,
                WebhookSender(timeout=settings.webhooks_timeout, allow_private=settings.webhooks_allow_private),
                backoff=settings.backoff,
                lease=settings.lease,
                threads=settings.dispatcher_threads,
                replica=None if once else Replica(database),
            )
            if once:
                while dispatcher.run_once() and not stop.is_set():
                    dispatcher.settle()
            else:
                with ticking("dispatcher", dispatcher.run_once, max(settings.dispatcher_every, SOONEST)):
                    stop.wait()
            log.info("dispatcher_stopping")
            dispatcher.stop()
    except errors.CoreError as error:
        print(f"lastbit dispatcher: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
