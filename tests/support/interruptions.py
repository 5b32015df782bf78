"""Exceptions of signal handlers at every place of a call where Python may raise them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType


class Interruption(BaseException):
    """What a signal handler raises: a KeyboardInterrupt, or the time limit of a task queue."""


class Interrupter:
    """Interrupts a call at its n-th place."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.place: str | None = None
        """Where it was; None while it was nowhere."""

    def run(self, call: Callable[[], object]) -> None:
        """Raises nothing. Python calls signal handlers when a function of Python begins, and when one of C has ended,
        such as `list.append`. A profiler is called at the same places."""
        left = self.n

        def profile(frame: FrameType, event: str, function: object) -> None:
            nonlocal left
            if event not in ("call", "c_return"):
                return
            left -= 1
            if not left:
                sys.setprofile(None)
                ended = getattr(function, "__qualname__", "its beginning")
                self.place = f"{frame.f_code.co_qualname}, line {frame.f_lineno}, after {ended}"
                raise Interruption

        sys.setprofile(profile)
        try:
            call()
        except Interruption:
            pass
        except RuntimeError as error:  # when `Condition.wait` is interrupted before it has its lock again
            if not isinstance(error.__context__, Interruption):
                raise
        finally:
            sys.setprofile(None)


def interrupters() -> Iterator[Interrupter]:
    """One for each place, until a call ends without having been interrupted."""
    n = 0
    while True:
        n += 1
        interrupter = Interrupter(n)
        yield interrupter
        if interrupter.place is None:
            assert n > 1
            return
