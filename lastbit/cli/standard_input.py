"""Item ids from standard input, any number of them, a line each."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from lastbit import errors
from lastbit._masks import MOST_ITEMS
from lastbit.ids import InvalidItemId, ItemId

# Longer than any id; a file of something else must not be read into memory as one line.
LONGEST_LINE = 1024


class MalformedLine(errors.InvalidArgument):
    """A line of standard input is no item id."""


def chunks(arguments: tuple[str, ...]) -> Iterator[list[str]]:
    """The ids of the command line and, for `-` or where there are none and something is piped in, of standard input,
    at most 10,000 at a time. Each chunk is checked as a whole. Raises `MalformedItem`, `MalformedLine`, and
    `click.UsageError` where there are no ids at all to come."""
    named = [argument for argument in arguments if argument != "-"]
    if not arguments and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("name item ids, or pipe them in, one a line")
    chunk: list[str] = []
    for position, item in enumerate(named):
        try:
            ItemId.parse(item)
        except InvalidItemId as cause:
            raise errors.MalformedItem(item, position) from cause
    for start in range(0, len(named), MOST_ITEMS):
        yield named[start : start + MOST_ITEMS]
    if len(named) == len(arguments) and arguments:
        return
    if sys.stdin is None:
        raise click.UsageError("standard input is closed")
    stream = sys.stdin.buffer
    line_number = 0
    while line := stream.readline(LONGEST_LINE):
        line_number += 1
        item = line.decode("ascii", "backslashreplace").strip(" \t\r\n")
        if not item:
            continue
        try:
            ItemId.parse(item)
        except InvalidItemId as cause:
            raise MalformedLine(f"line {line_number} of standard input: {cause}") from cause
        chunk.append(item)
        if len(chunk) == MOST_ITEMS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
