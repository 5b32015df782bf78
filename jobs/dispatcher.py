"""`python -m jobs.dispatcher`: send webhooks, and expire batches at their deadlines,
until stopped. Logs are JSON lines on standard error.

On MariaDB and MySQL at least one must run. Several share the work; with `--once` it claims everything that is due. On
SQLite the service does this itself. Each round also resolves the items of parents whose children ended before a crash.
The rules are in `core.dispatcher`.

On SIGTERM it finishes the deliveries in progress. Exit status: 0 stopped, or `--once` and nothing is due; 1 the
database is not usable, or the system allows no threads; 2 wrong usage."""

from __future__ import annotations

import argparse
import functools
import signal
import sys
import threading

import structlog

from core import errors, janitor, logs, programs
from core.dispatcher import Dispatcher
from core.settings import settings_of
from core.storage.job_runs import JobRuns
from core.storage.opening import check_privileges, check_promises
from core.ticker import ticking
from core.webhooks.replicas import Replica
from jobs.databases import opened
from senders.webhooks import WebhookSender

log = structlog.get_logger(__name__)

SOONEST: float = 0.01
"""The minimum seconds between two rounds."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=programs.command("jobs.dispatcher"),
        description="Send webhooks until stopped.",
        epilog=programs.examples(programs.command("jobs.dispatcher"), programs.command("jobs.dispatcher", "--once")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--once", action="store_true", help="end when nothing is due")
    parser.add_argument("--database-url", metavar="URL", help="default: LASTBIT_DATABASE_URL")
    parser.add_argument("--database-schema", metavar="NAME", help="default: LASTBIT_DATABASE_SCHEMA")
    parser.add_argument(
        "--every",
        dest="dispatcher_every",
        type=float,
        metavar="SECONDS",
        help="time between two searches for deliveries (0.5)",
    )
    parser.add_argument(
        "--threads",
        dest="dispatcher_threads",
        type=int,
        metavar="N",
        help="maximum number of deliveries at a time (16)",
    )
    options = vars(parser.parse_args(arguments))
    single_pass = options.pop("once")
    settings = settings_of(parser, options)
    logs.configure(settings.log_level)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        with opened(settings) as database:
            check_privileges(database)
            check_promises(database)
            dispatcher = Dispatcher(
                database,
                WebhookSender(timeout=settings.webhooks_timeout, allow_private=settings.webhooks_allow_private),
                backoff=settings.backoff,
                lease=settings.lease,
                threads=settings.dispatcher_threads,
                replica=None if single_pass else Replica(database),
            )
            overdue = JobRuns(database, "deadlines").noting(functools.partial(janitor.expire_overdue, database))
            try:
                if single_pass:
                    overdue()
                    dispatcher.run_until_idle(stop)
                else:
                    with (
                        ticking("dispatcher", dispatcher.run_once, max(settings.dispatcher_every, SOONEST)),
                        ticking("deadlines", overdue, janitor.DEADLINES_EVERY),
                    ):
                        stop.wait()
            finally:
                log.info("dispatcher_stopping")
                dispatcher.stop()
    except errors.CoreError as error:
        print(f"lastbit dispatcher: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
