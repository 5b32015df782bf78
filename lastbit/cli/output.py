"""Answers on standard output: for people as text, for scripts as one JSON document."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape

from lastbit.models import Rejected

T = TypeVar("T")

# Where nobody looks, no line is cut to fit a screen.
UNSEEN_WIDTH = 200


class Output:
    """Says things, in the form that was asked for."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, width=UNSEEN_WIDTH)

    def say(self, markup: str) -> None:
        """One line for people, in rich's markup."""
        self.console.print(markup, soft_wrap=True)

    def document(self, value: Any) -> None:
        """One JSON document for scripts."""
        click.echo(json.dumps(value, default=plain, ensure_ascii=False))

    def answer(self, value: Any, *lines: str) -> None:
        """What came of it: a document for scripts, lines for people."""
        if self.as_json:
            self.document(value)
        else:
            for line in lines:
                self.say(line)

    def listing(self, name: str, found: Sequence[T], line: Callable[[T], str], nothing: str) -> None:
        """What was found: a document with the array `name`, or a line for each."""
        self.answer({name: found}, *(map(line, found) if found else [nothing]))

    def stream(self, head: Mapping[str, Any], name: str, values: Iterable[Any]) -> None:
        """One JSON document whose array `name` is written as it comes, in constant memory."""
        out = sys.stdout
        out.write("{")
        for field, value in head.items():
            out.write(f"{json.dumps(field)}: {json.dumps(value, default=plain, ensure_ascii=False)}, ")
        out.write(f"{json.dumps(name)}: [")
        separator = ""
        for value in values:
            out.write(separator + json.dumps(value, default=plain, ensure_ascii=False))
            separator = ", "
        out.write("]}\n")
        out.flush()

    def lines(self, values: Iterable[str]) -> None:
        """Plain lines, as many as there are."""
        out = sys.stdout
        out.writelines(f"{value}\n" for value in values)
        out.flush()


def plain(value: Any) -> Any:
    """An answer as JSON would have it: fields by name, times as RFC 3339 with `Z`."""
    if isinstance(value, Rejected):
        if value.item is not None:
            return {"item": value.item, "reason": value.reason}
        return {"group": value.group, "reason": value.reason, "count": value.count}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    raise TypeError(f"{value!r} has no JSON form")


def safe(text: str) -> str:
    """Text of somebody else's, so that neither markup nor control characters in it act on the terminal."""
    return escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))
