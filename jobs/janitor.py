"""`python -m jobs.janitor`: one pass over orphaned and ended batches, for cron. Prints a JSON report.

It resolves the items of parents whose children ended before a crash, expires idle batches (a batch's own `expires_in`
overrides these defaults), deletes batches that ended long ago, and trims the feed. It is safe to run it twice at once,
to kill it anywhere and to run it again. The rules are in `core.janitor`.

A clock that is wrong by days would make everything look old. So it does nothing if the database's clock and this
machine's differ by more than an hour.

Exit status: 0 done, 1 the database or its clock is not usable, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Final

from core import errors, programs
from core.batches.expiry import Policy
from core.janitor import Report, run_once
from core.settings import settings_of
from core.storage import checks
from core.storage.opening import check_privileges
from jobs.databases import opened
from lastbit import durations

CLOCKS: Final = 3600
"""The largest allowed difference, in seconds, between the database's clock and this machine's."""


def duration(text: str) -> timedelta:
    """The duration in a text such as `90s`, `30m`, `12h`, `7d` or `2w`."""
    try:
        length = timedelta(seconds=durations.seconds(text))
        datetime.now(UTC) - 2 * length  # raises OverflowError if there is no such date; the longest is twice `--keep`
        return length
    except OverflowError:
        raise argparse.ArgumentTypeError(f"{text!r} is too long") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def shown(report: Report) -> dict[str, object]:
    """The report for printing: counts, and the ids of the batches."""
    return {
        "dry_run": report.dry_run,
        "expired": {"open": len(report.expired_open), "sealed": len(report.expired_sealed)},
        "deleted": len(report.deleted),
        "parents": report.parents,
        "children": report.children,
        "events": report.events,
        "inbox": report.inbox,
        "instances": report.instances,
        "commands": report.commands,
        "batches": {
            "expired": sorted(report.expired_open + report.expired_sealed),
            "deleted": sorted(report.deleted),
            "locked": sorted(report.locked),
        },
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=programs.command("jobs.janitor"),
        description="Expire idle batches, delete ended ones. One pass, for cron.",
        epilog=programs.examples(
            programs.command("jobs.janitor", "--dry-run"),
            programs.command("jobs.janitor", "--open-idle", "12h", "--keep", "14d"),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = Policy()
    parser.add_argument(
        "--open-idle",
        type=duration,
        default=defaults.open_idle,
        metavar="7d",
        help="expire open batches that were idle for this time (7d)",
    )
    parser.add_argument(
        "--sealed-idle",
        type=duration,
        default=defaults.sealed_idle,
        metavar="30d",
        help="expire sealed batches that were idle for this time (30d)",
    )
    parser.add_argument(
        "--keep",
        type=duration,
        default=defaults.keep,
        metavar="30d",
        help="delete what ended and has not changed for this time (30d)",
    )
    parser.add_argument(
        "--keep-failed",
        type=duration,
        metavar="60d",
        help="the same for batches with failures (twice --keep)",
    )
    parser.add_argument(
        "--keep-events",
        type=duration,
        default=defaults.keep_events,
        metavar="30d",
        help="remove older events from the feed (30d)",
    )
    parser.add_argument("--dry-run", action="store_true", help="report what would be done, and do nothing")
    parser.add_argument("--database-url", metavar="URL", help="default: LASTBIT_DATABASE_URL")
    parser.add_argument("--database-schema", metavar="NAME", help="default: LASTBIT_DATABASE_SCHEMA")
    options = parser.parse_args(arguments)
    settings = settings_of(parser, {"database_url": options.database_url, "database_schema": options.database_schema})
    try:
        with opened(settings) as database:
            if not options.dry_run:
                check_privileges(database)
            clock_difference = database.read(checks.clock_ahead)
            if abs(clock_difference) > CLOCKS:
                raise errors.Misconfigured(
                    f"the database's clock differs from this machine's by {abs(clock_difference):,.0f} s: one is "
                    "wrong, and nothing is expired or deleted until it is correct"
                )
            policy = Policy(
                options.open_idle, options.sealed_idle, options.keep, options.keep_events, options.keep_failed
            )
            report = run_once(database, policy, dry_run=options.dry_run)
    except errors.CoreError as error:
        print(f"lastbit janitor: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(shown(report)))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
