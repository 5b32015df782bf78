"""Item ids from the command line and standard input, one per line, without limit."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator

import click

from lastbit import errors
from lastbit._masks import MOST_ITEMS
from lastbit.cli.faults import StreamFailed
from lastbit.ids import InvalidItemId, ItemId

# Longer than any id, so that a wrong file is not read into memory as one line.
LONGEST_LINE = 1024


class MalformedLine(errors.InvalidArgument):
    """A line of standard input is not an item id."""


def chunks(arguments: tuple[str, ...]) -> Iterator[list[str]]:
    """The ids of the command line. For `-`, or if there are none and input is piped in, also those of standard input.
    Yields at most 10,000 at a time; each chunk is checked as a whole. Raises `MalformedItem`, `MalformedLine`,
    `StreamFailed`, and `click.UsageError` if there are no ids or standard input is closed."""
    on_command_line = [argument for argument in arguments if argument != "-"]
    if not arguments and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("pass item ids as arguments, or pipe them in, one per line")
    is_read = not arguments or len(on_command_line) < len(arguments)
    if is_read and sys.stdin is None:
        raise click.UsageError("standard input is closed")
    for position, item in enumerate(on_command_line):
        try:
            ItemId.parse(item)
        except InvalidItemId as cause:
            raise errors.MalformedItem(item, position) from cause
    for start in range(0, len(on_command_line), MOST_ITEMS):
        yield on_command_line[start : start + MOST_ITEMS]
    if not is_read:
        return
    chunk: list[str] = []
    for line_number, line in enumerate(_lines(), start=1):
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


def _lines() -> Iterator[bytes]:
    try:
        line = sys.stdin.buffer.readline(LONGEST_LINE).removeprefix(codecs.BOM_UTF8)  # editors on Windows write one
        while line:
            yield line
            line = sys.stdin.buffer.readline(LONGEST_LINE)
    except OSError as error:
        raise StreamFailed(error.strerror) from error
