"""`python -m jobs.janitor`: one pass over orphaned and ended batches, for cron. A JSON report on standard output.

Tells the parents of nested batches what a crash kept from them, expires what is idle for too long (a batch's own
`expires_in` comes before these defaults), deletes what ended long ago, and trims the feed. Safe to run twice at once,
to kill anywhere and to run again; the rules live in `core.janitor`.

A clock that is wrong by days would make everything look old. So where the database's and this machine's differ by more
than an hour, one of them is, and nothing is done.

Exit status: 0 done, 1 the database or its clock can't be worked with, 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Final

from core import errors
from core.janitor import Policy, Report, run_once
from core.settings import settings_of
from core.storage import checks, schema
from core.storage.database import Database

CLOCKS: Final = 3600
"""Seconds that the database's clock and this machine's may differ."""
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def duration(text: str) -> timedelta:
    """`90s`, `30m`, `12h`, `7d`, `2w`."""
    match = re.fullmatch("([0-9]{1,9})([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no duration; expected a number and a unit: 90s, 30m, 12h, 7d, 2w"
        )
    try:
        given = timedelta(**{_UNITS[match[2]]: int(match[1])})
        datetime.now(UTC) - given  # what is that long ago has no date
        return given
    except OverflowError:
        raise argparse.ArgumentTypeError(f"{text!r} is too long a duration") from None


def shown(report: Report) -> dict[str, object]:
    """The report as it is printed: counts, and the ids behind them."""
    return {
        "dry_run": report.dry_run,
        "expired": {"open": len(report.expired_open), "sealed": len(report.expired_sealed)},
        "deleted": len(report.deleted),
        "parents": report.parents,
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
        prog="python -m jobs.janitor", description="Expire idle batches, delete ended ones. One pass, for cron."
    )
    defaults = Policy()
    parser.add_argument(
        "--open-idle",
        type=duration,
        default=defaults.open_idle,
        metavar="7d",
        help="expire open batches that were idle for so long (7d)",
    )
    parser.add_argument(
        "--sealed-idle",
        type=duration,
        default=defaults.sealed_idle,
        metavar="30d",
        help="expire sealed batches that were idle for so long (30d)",
    )
    parser.add_argument(
        "--keep",
        type=duration,
        default=defaults.keep,
        metavar="30d",
        help="delete batches, and instances of processes, that ended so long ago (30d)",
    )
    parser.add_argument(
        "--keep-events",
        type=duration,
        default=defaults.keep_events,
        metavar="30d",
        help="remove events from the feed that are so old (30d)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--database-url", metavar="URL", help="LASTBIT_DATABASE_URL, if not given")
    given = parser.parse_args(arguments)
    settings = settings_of(parser, {"database_url": given.database_url})
    try:
        with Database(settings.database_url) as database:
            database.read(schema.check)
            ahead = database.read(checks.clock_ahead)
            if abs(ahead) > CLOCKS:
                raise errors.Misconfigured(
                    f"the database's clock differs from this machine's by {abs(ahead):,.0f} s: one is wrong, and "
                    "nothing can be said to be old until it is set right"
                )
            policy = Policy(given.open_idle, given.sealed_idle, given.keep, given.keep_events)
            report = run_once(database, policy, dry_run=given.dry_run)
    except errors.CoreError as error:
        print(f"lastbit janitor: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(shown(report)))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
