"""The pauses between the tries of a record that fails."""

from __future__ import annotations

from dataclasses import dataclass

from lastbit.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Backoff:
    """`retry` of `run_ordered`: `tries` tries in all. The pause after the first one is `first` seconds. Each further
    pause is `factor` times the one before, but at most `longest` seconds."""

    first: float = 1.0
    factor: float = 2.0
    longest: float = 60.0
    tries: int = 8

    def __post_init__(self) -> None:
        for name, value, least in (("first", self.first, 0), ("factor", self.factor, 1), ("longest", self.longest, 0)):
            if not value >= least:
                raise InvalidArgument(f"{name} must be at least {least}, not {value!r}")
        if self.tries < 1:
            raise InvalidArgument(f"tries must be at least 1, not {self.tries!r}")

    def __call__(self, error: Exception, tries: int) -> float | None:
        """The pause in seconds after `tries` tries, of which the last one raised `error`; None: give up."""
        if tries >= self.tries:
            return None
        try:
            return min(self.longest, self.first * self.factor ** (tries - 1))
        except OverflowError:
            return self.longest
