"""`--jq`: a command's JSON document passes through the program jq, and strings are printed bare."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

import click

from lastbit import errors
from lastbit.cli.output import plain_text

MISSING = "--jq needs the program jq, which is not on the path: install it (https://jqlang.org), or use --json"


class JqFailed(errors.LastbitError):
    """jq has ended with an error, which it has printed itself."""

    def __str__(self) -> str:
        return f"jq ended with exit code {self.args[0]}; what the command did stays done"


@contextmanager
def filtering(expression: str) -> Iterator[IO[str]]:
    """Yields what documents are written to. Raises `click.UsageError` for a malformed expression, before anything is
    done; `JqFailed`; and `BrokenPipeError` if the reader of the output is gone."""
    program = shutil.which("jq")
    if program is None:
        raise click.UsageError(MISSING)
    command = [program, "--raw-output", "--unbuffered", f" {expression}"]  # with a blank, a minus begins no option
    tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)  # noqa: S603  # no shell
    if tried.returncode:
        fault = tried.stderr.strip().splitlines()[0].removeprefix("jq: ")
        raise click.UsageError(f"--jq: {fault}")
    # Bare strings may have characters that act on a terminal.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    output = subprocess.PIPE if is_terminal else None
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, text=True, encoding="utf-8")  # noqa: S603
    assert process.stdin is not None
    printer = threading.Thread(target=_print_all, args=(process.stdout,)) if process.stdout is not None else None
    if printer is not None:
        printer.start()
    try:
        yield process.stdin
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        code = process.wait()
        if printer is not None:
            printer.join()
    if code < 0:
        raise BrokenPipeError
    if code:
        raise JqFailed(code)


def _print_all(lines: IO[str]) -> None:
    for line in lines:
        click.echo(plain_text(line, keep="\n\t"), nl=False)
