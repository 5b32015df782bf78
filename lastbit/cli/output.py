"""Results on standard output: text for people, one JSON document for scripts."""

from __future__ import annotations

import codecs
import dataclasses
import errno
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from typing import IO, Any, TextIO, TypeVar

import click
from rich.console import Console, RenderableType
from rich.text import Text

from lastbit import progress
from lastbit.models import Rejected

T = TypeVar("T")

# Wider than any text, because output that is not on a terminal must not be cut to fit a screen.
UNSEEN_WIDTH = 100_000
DANGEROUS = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode categories that can affect a terminal: control characters, surrogates, line and paragraph breaks."""
REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder their neighbors, so that a text can look like another."""

# Stand-ins for the two characters that mean something in rich's markup. rich's own escaping doubles a backslash at the
# end of a text. Unicode never assigns these code points.
_BRACKET, _BACKSLASH = "\ufdd0", "\ufdd1"
_HIDDEN = str.maketrans({"[": _BRACKET, "\\": _BACKSLASH})
_SHOWN = str.maketrans({_BRACKET: "[", _BACKSLASH: "\\"})
_OUTSIDE_ASCII = re.compile(r"[^\x20-\x7e]")


def _ignore(number: int) -> None:
    pass


class Output:
    """Prints results in the requested form."""

    def __init__(self, as_json: bool, documents: IO[str] | None = None) -> None:
        """`documents`: what JSON is written to; by default standard output."""
        self.as_json = as_json
        self._documents = documents
        self._encoded = partial(encoded, as_ascii=not holds_unicode(sys.stdout))
        self.console = Console(highlight=False, emoji=False)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, emoji=False, width=UNSEEN_WIDTH)

    def counter(self, noun: str, *, is_shown: bool = True) -> AbstractContextManager[Callable[[int], None]]:
        """Shows a growing number on standard error. With --json nothing but errors is written there."""
        return progress.counter(noun) if is_shown and not self.as_json else nullcontext(_ignore)

    def say(self, markup: str) -> None:
        """Print one line for people, in rich's markup."""
        text = styled(markup)
        if self.console.is_terminal:
            self.console.print(text, soft_wrap=True)
        else:
            click.echo(text.plain)  # unchanged: rich would replace tabs

    def show(self, renderable: RenderableType) -> None:
        """Print a table or several lines for people. Off a terminal, without the blanks that rich adds at the edges."""
        if self.console.is_terminal:
            self.console.print(renderable)
            return
        with self.console.capture() as capture:
            self.console.print(renderable)
        lines = [line.rstrip(" ") for line in capture.get().split("\n")]
        click.echo("\n".join(lines).strip("\n"))

    def document(self, value: Any) -> None:
        """Print one JSON document for scripts."""
        click.echo(self._encoded(value), file=self._documents or _standard_output())

    def answer(self, value: Any, *lines: str) -> None:
        """Print a result: a document for scripts, lines for people."""
        if self.as_json:
            self.document(value)
        else:
            for line in lines:
                self.say(line)

    def listing(self, name: str, elements: Sequence[T], line: Callable[[T], str], empty_text: str) -> None:
        """Print a list: a document with the array `name`, or a line for each element; `nothing` if there are none."""
        self.answer({name: elements}, *(map(line, elements) if elements else [empty_text]))

    def stream(
        self, head: Mapping[str, Any], name: str, values: Iterable[Any], tail: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        """Print one JSON document whose array `name` is written incrementally, in constant memory. `tail` returns the
        fields after it."""
        stdout = self._documents or _standard_output()
        stdout.write("{")
        for field, value in head.items():
            stdout.write(f"{self._encoded(field)}: {self._encoded(value)}, ")
        stdout.write(f"{self._encoded(name)}: [")
        separator = ""
        for value in values:
            stdout.write(separator + self._encoded(value))
            separator = ", "
        stdout.write("]")
        for field, value in tail().items():
            stdout.write(f", {self._encoded(field)}: {self._encoded(value)}")
        stdout.write("}\n")
        stdout.flush()

    def lines(self, values: Iterable[str]) -> None:
        """Print plain lines."""
        stdout = _standard_output()
        stdout.writelines(f"{value}\n" for value in values)
        stdout.flush()


def _standard_output() -> TextIO:
    """Raises `OSError` if it is closed: what these commands print must not get lost without an error."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    return sys.stdout


def plain(value: Any) -> Any:
    """Convert a result to JSON types: fields by name, times as RFC 3339 with `Z`."""
    if isinstance(value, Rejected):
        if value.item is not None:
            return {"item": value.item, "reason": value.reason}
        return {"group": value.group, "reason": value.reason, "count": value.count}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    raise TypeError(f"{value!r} has no JSON form")


def holds_unicode(stream: TextIO | None) -> bool:
    """Whether the stream can hold each character. Others replace some by a question mark."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return codecs.lookup(encoding).name.startswith("utf")


def encoded(value: Any, *, as_ascii: bool = False) -> str:
    """The value as JSON, in which characters that act on a terminal are escaped, or all but those of ASCII."""
    text = json.dumps(value, default=plain, ensure_ascii=as_ascii)
    return _OUTSIDE_ASCII.sub(lambda match: json.dumps(match[0])[1:-1] if _acts(match[0]) else match[0], text)


def safe(text: str, *, keep: str = "") -> str:
    """Untrusted text for use in markup: its own markup and control characters do not affect the terminal."""
    return plain_text(text, keep=keep).translate(_HIDDEN)


def styled(markup: str) -> Text:
    """Markup as text with styles."""
    text = Text.from_markup(markup, emoji=False)
    text.plain = text.plain.translate(_SHOWN)
    return text


def plain_text(text: str, *, keep: str = "") -> str:
    """Untrusted text with control characters escaped, `\\x1b` for the escape character. Characters in `keep` stay, as
    line breaks do where there is room for several lines."""
    return "".join(
        char.encode("unicode_escape").decode("ascii") if _acts(char) and char not in keep else char for char in text
    )


def _acts(char: str) -> bool:
    return unicodedata.category(char) in DANGEROUS or char in REORDERING or char in (_BRACKET, _BACKSLASH)
