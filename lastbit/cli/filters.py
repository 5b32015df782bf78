"""The options that select batches, which the service applies."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar, get_args

import click

from lastbit.cli.arguments import DURATION, LABEL, MOMENT, labels
from lastbit.search import Filters, Outcome

F = TypeVar("F", bound=Callable[..., Any])


def state_option(command: F) -> F:
    """Adds `--state` to a command."""
    states = ["open", "sealed", "complete", "expired", "cancelled"]
    return click.option("--state", type=click.Choice(states), help="Only batches in this state.")(command)


def filter_options(command: F) -> F:
    """Adds the options to a command, and passes them as `filters`."""

    @click.option("--key", help="Only batches with this key.")
    @click.option("--key-prefix", metavar="TEXT", help="Only batches whose key begins with this.")
    @click.option(
        "--label",
        "label_pairs",
        type=LABEL,
        multiple=True,
        help="Only batches with this label; repeat to require several labels.",
    )
    @click.option(
        "--since", type=MOMENT, help="Only batches opened since then: 2h or 7d (ago), or a date and time in UTC."
    )
    @click.option("--until", type=MOMENT, help="Only batches opened before then; a time as in --since.")
    @click.option(
        "--outcome",
        type=click.Choice(get_args(Outcome)),
        help="Only complete batches that succeeded or failed; or batches whose failures exceeded their tolerance.",
    )
    @click.option(
        "--parent", metavar="NUMBER|ITEM", help="Only batches that resolve items of this batch, or this item."
    )
    @click.option(
        "--unchanged-for",
        type=DURATION,
        help="Only open and sealed batches that have not changed for this time: seconds, or 15m, 12h, 7d, 2w.",
    )
    @click.option("--failed", is_flag=True, help="Only batches with failed items, in any state.")
    @wraps(command)
    def with_filters(
        *arguments: Any,
        key: str | None,
        key_prefix: str | None,
        label_pairs: tuple[tuple[str, str], ...],
        since: datetime | None,
        until: datetime | None,
        outcome: Outcome | None,
        parent: str | None,
        unchanged_for: int | None,
        failed: bool,
        **options: Any,
    ) -> Any:
        filters = Filters(
            key=key,
            key_prefix=key_prefix,
            labels=labels(label_pairs),
            opened_after=since,
            opened_before=until,
            outcome=outcome,
            parent=parent,
            unchanged_for=unchanged_for,
            failed=failed or None,
        )
        return command(*arguments, filters=filters, **options)

    return with_filters  # type: ignore[return-value]  # click replaces the signature
