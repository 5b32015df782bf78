"""Runs an example until its proof, an interruption or a time-out, and leaves nothing behind."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rich.console import Console

from examples.processes import ENDING, Failed, Processes
from lastbit import LastbitError


class Interrupted(BaseException):
    """A signal asked the example to end."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    # One signal is enough. Another one must not interrupt the cleanup.
    for signal_number in ENDING:
        signal.signal(signal_number, signal.SIG_IGN)
    raise Interrupted


def listen_for_the_end(longest: int) -> None:
    """From now on raise `Interrupted` on a signal in `ENDING` and, until `signal.alarm(0)`, `Failed` after `longest`
    seconds."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise Failed(f"the example did not end within {longest} seconds")

    for number in ENDING:
        signal.signal(number, _interrupt)
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(longest)


def temporary_folder(name: str) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=f"lastbit-{name}-", ignore_cleanup_errors=True)


def interrupted(name: str) -> int:
    """Report the interruption. Returns the exit status."""
    print(f"\nlastbit {name}: interrupted; nothing is left behind", file=sys.stderr)
    return 130


def prove(name: str, longest: int, run: Callable[[Console, Processes, Path], list[str]]) -> int:
    """Call `run`, which returns the faults, and report them. Returns the exit status."""
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, soft_wrap=True)
    listen_for_the_end(longest)
    start = time.monotonic()
    try:
        with temporary_folder(name) as folder, Processes(Path(folder)) as processes:
            faults = run(console, processes, Path(folder))
    except (Failed, LastbitError, OSError) as error:
        faults = [str(error)]
    except Interrupted:
        return interrupted(name)
    signal.alarm(0)
    if faults:
        console.print("\nThe example failed:", *(f"  {fault}" for fault in faults), sep="\n", markup=False)
        return 1
    console.print(f"\nAll checks passed, in {time.monotonic() - start:.1f} s.")
    return 0
