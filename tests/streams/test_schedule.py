"""The queues of keys: every order of events of a small stream, compared with a plain model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest

from lastbit.streams._schedule import UNORDERED, Entry, Schedule
from tests.mutants import mutant

Function = Any
"""A partial function, whose arguments are part of the state."""


class Model:
    """One execution of a stream of records, whose keys are given. An event is the next record, a free worker that takes
    the first ready key, the end of its work, or a timer; after each the invariants are checked."""

    def __init__(self, keys: tuple[Hashable, ...], workers: int, batch: int, linger: float, failures: int) -> None:
        self.ready: list[Hashable] = []
        self.timers: list[Function] = []
        self.working: list[tuple[Hashable, list[Entry[Any]]]] = []
        self.handled: list[int] = []
        self._keys = keys
        self._added = 0
        self._flushed = False
        self._workers = workers
        self._failures = failures
        self._schedule: Schedule[int] = Schedule(self.ready.append, self._call_later, batch, linger)

    def _call_later(self, seconds: float, function: Function) -> None:
        assert seconds > 0
        self.timers.append(function)

    def events(self) -> Iterator[tuple[str, int]]:
        """What can happen next."""
        if self._added < len(self._keys):
            yield "add", 0
        elif not self._flushed:
            yield "flush", 0
        if self.ready and len(self.working) < self._workers:
            yield "take", 0
        for number in range(len(self.working)):
            yield "finish", number
            if self._failures:
                yield "fail", number
        for number in range(len(self.timers)):
            yield "timer", number

    def happens(self, event: str, number: int) -> None:
        if event == "add":
            self._schedule.add(Entry(self._added, self._added, self._added), self._keys[self._added])
            self._added += 1
        elif event == "flush":
            self._schedule.flush()
            self._flushed = True
        elif event == "take":
            self._take(self.ready.pop(0))
        elif event == "timer":
            self.timers.pop(number)()
        else:
            key, entries = self.working.pop(number)
            if event == "finish":
                self.handled += [entry.position for entry in entries]
                is_last = self._schedule.finished(key, len(entries))
                assert is_last == (len(self.handled) == self._added)
            else:  # the first of its records has failed
                self._failures -= 1
                self.handled += [entry.position for entry in entries[1:]]
                self._schedule.retry(key, [(entries[0], 1.0)], finished=len(entries) - 1)
        assert self._schedule.left == self._added - len(self.handled)

    def state(self) -> Hashable:
        """Equal states have the same future."""
        schedule = self._schedule
        queues = [(key, *(entry.position for entry in queue)) for key, queue in schedule._queues.items()]
        working = [(key, *(entry.position for entry in entries)) for key, entries in self.working]
        timers = [
            (key, argument is schedule._lingering.get(key))
            if not isinstance(argument, list)
            else (key, *(entry.position for entry in argument))
            for key, argument in (function.args for function in self.timers)
        ]
        return (self._added, self._flushed, self._failures, tuple(self.ready), frozenset(self.handled)), *(
            tuple(sorted(part, key=str)) for part in (queues, working, timers)
        )

    def _take(self, key: Hashable) -> None:
        entries = self._schedule.take(key)
        assert entries
        assert {self._keys[entry.position] for entry in entries} == {key}
        if key is not UNORDERED:
            assert key not in [other for other, _ in self.working], "two workers have one key"
            positions = [entry.position for entry in entries]
            expected = [position for position in range(self._added) if self._keys[position] == key]
            rest_of_key = [position for position in expected if position not in self.handled]
            assert positions == rest_of_key[: len(positions)], "out of order"
        self.working.append((key, entries))


def explore(*case: Any) -> int:
    """Run every order of events; orders that lead to the same state go on as one. Returns the number of states."""
    states: set[Hashable] = set()
    paths: list[list[tuple[str, int]]] = [[]]
    while paths:
        path = paths.pop()
        model = Model(*case)
        for event in path:
            model.happens(*event)
        if model.state() in states:
            continue
        states.add(model.state())
        events = list(model.events())
        if not events:
            assert len(model.handled) == len(set(model.handled)) == len(case[0]), f"a record is lost: {path}"
        paths += [[*path, event] for event in events]
    return len(states)


@mutant(
    "a-key-is-ready-while-a-worker-has-it",
    "lastbit.streams._schedule:Schedule.take",
    "key is UNORDERED",
    "True",
    case="ordered",
)
@mutant(
    "a-retry-goes-behind-later-records",
    "lastbit.streams._schedule:Schedule._again",
    "queue.extendleft(reversed(entries))",
    "queue.extend(entries)",
    case="ordered",
)
@mutant(
    "a-key-with-more-records-is-forgotten",
    "lastbit.streams._schedule:Schedule._go_on",
    "self._release(key, queue)",
    "pass",
    case="ordered",
)
@mutant(
    "a-retry-of-records-without-order-is-never-ready",
    "lastbit.streams._schedule:Schedule._again",
    "key is UNORDERED and bool(queue) and self._lingering.pop(key, None) is None",
    "key is UNORDERED",
    case="unordered",
)
@mutant(
    "a-record-waits-for-others-that-never-come",
    "lastbit.streams._schedule:Schedule.flush",
    "self._ready(key)",
    "pass",
    case="lingering",
)
@mutant(
    "an-earlier-wait-ends-a-later-one",
    "lastbit.streams._schedule:Schedule._waited",
    "self._lingering.get(key) is mark",
    "True",
    case="lingering",
)
@pytest.mark.parametrize(
    ("keys", "workers", "batch", "linger", "failures"),
    [
        pytest.param(("a", "b", "a", "b", "b", "a"), 2, 1, 0.0, 2, id="ordered"),
        pytest.param(("a", "a", "b", "a", "b", "b"), 2, 2, 0.0, 1, id="batches"),
        pytest.param((UNORDERED,) * 4, 2, 1, 0.0, 1, id="unordered"),
        pytest.param(("a", UNORDERED, "a", UNORDERED), 2, 1, 0.0, 1, id="mixed"),
        pytest.param(("a", "a", "a", "b"), 2, 2, 1.0, 1, id="lingering"),
        pytest.param((UNORDERED,) * 4, 2, 2, 1.0, 1, id="lingering-unordered"),
    ],
)
def test_in_every_order_of_events_no_record_is_lost_or_overtakes_its_key(
    keys: tuple[Hashable, ...], workers: int, batch: int, linger: float, failures: int
) -> None:
    assert explore(keys, workers, batch, linger, failures) > 1


@mutant(
    "a-full-batch-waits-on",
    "lastbit.streams._schedule:Schedule.add",
    "self._lingering.pop(key, None)",
    "False",
)
def test_a_full_batch_does_not_wait() -> None:
    ready: list[Hashable] = []
    timers: list[Function] = []
    schedule: Schedule[int] = Schedule(ready.append, lambda seconds, function: timers.append(function), 2, 60.0)
    schedule.add(Entry(0, 0, 0), "a")
    assert (ready, len(timers)) == ([], 1)
    schedule.add(Entry(1, 1, 1), "a")
    assert ready == ["a"]
    timers[0]()
    assert ready == ["a"]
    assert [entry.position for entry in schedule.take("a")] == [0, 1]


def test_a_key_that_cannot_be_hashed_is_refused() -> None:
    """And nothing is kept of its record."""
    schedule: Schedule[int] = Schedule(lambda key: None, lambda seconds, function: None)
    with pytest.raises(TypeError):
        schedule.add(Entry(0, 0, 0), [])
    assert schedule.left == 0
