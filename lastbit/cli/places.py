"""Places in a request, such as `body.group_size`, as what the user typed: `--group-size`.

The service names the fields of its contract, which a user of the command line doesn't know. Most parameters have the
name of their field, so the command itself is the table; `_OTHER_NAMES` has the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import click

_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "callback.types": ("callback_types",),
    "callback.url": ("callback",),
    "group": ("name",),
    "header Idempotency-Key": ("idempotency_key",),
    "items": ("ids",),
    "label": ("label_pairs",),
    "labels": ("label_pairs",),
    "opened_after": ("since",),
    "opened_before": ("until",),
    "overlap_seconds": ("overlap",),
    "path.id": ("batch", "webhook"),
    "tally": ("name",),
    "type": ("types",),
    "url": ("target",),
}
"""By field: the parameters that have another name, each in some of the commands."""


def in_options(command: click.Command, place: str) -> str | None:
    """The option or argument of `command` that sets this place; None if there is none."""
    path = re.sub(r"\[\d+\]", "", place)
    fields = path.split(".")[1:]
    whole = ".".join(fields)
    by_name = {param.name: param for param in command.params}
    # From the most specific name: `callback.types` is not the field `types` of another command.
    for field in dict.fromkeys((path, whole, *fields[-1:], *fields[:1])):
        for name in (*_OTHER_NAMES.get(field, ()), field):
            if name in by_name:
                rest = whole.removeprefix("labels.") if whole.startswith("labels.") else ""
                return f"{_typed(by_name[name])} {rest}".rstrip()
    return None


def worded(command: click.Command, text: str) -> str:
    """`text`, in which fields that have an option are named by it, as in `it needs tolerated_failures`. A field of one
    word can't be told from the word."""

    def option(match: re.Match[str]) -> str:
        return in_options(command, f"body.{match[0]}") or match[0]

    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", option, text)


def _typed(param: click.Parameter) -> str:
    """The parameter as it is typed: `--key`, `BATCH`."""
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return re.sub(r"[^A-Z_]", "", param.human_readable_name)
