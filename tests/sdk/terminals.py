"""Runs the command line on a pseudo terminal of a given width, and types answers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.servers import ROOT

STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Screen:
    """The output of a command on its terminal: with styles (`raw`), and without."""

    code: int
    raw: str

    @property
    def text(self) -> str:
        return STYLE.sub("", self.raw).replace("\r\n", "\n")


def on_terminal(
    url: str, arguments: Sequence[str], *, width: int = 80, typed: str = "", after: str = "[y/N]: ", **variables: str
) -> Screen:
    """Run `lastbit` on a terminal. The lines of `typed` are entered one by one, each when the output ends with
    `after`."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {**os.environ, "LASTBIT_URL": url, "TERM": "xterm-256color", "NO_PROXY": "*"}
    for name in ("COLUMNS", "LINES", "LASTBIT_TOKEN", "NO_COLOR"):
        environment.pop(name, None)
    environment |= variables
    lines = typed.splitlines(keepends=True)
    command = [sys.executable, "-m", "lastbit", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    output = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the process has ended
        while part := _read(leader, process):
            output += part
            if lines and output.decode(errors="replace").endswith(after):
                os.write(leader, lines.pop(0).encode())
    os.close(leader)
    return Screen(process.wait(60), output.decode())


def _read(leader: int, process: subprocess.Popen[bytes]) -> bytes:
    if not select.select([leader], [], [], 60)[0]:
        process.kill()
        raise AssertionError("the command waits for input that the test does not have")
    return os.read(leader, 65536)
