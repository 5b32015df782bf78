"""How a process decides on an event: without side effects, and without raising."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lastbit import InvalidArgument
from lastbit.models import Event
from lastbit.processes import CancelTimer, Command, Finish, Process, Timer, process, timer_of
from lastbit.processes.correlation import Correlation

AT = datetime(2026, 5, 4, tzinfo=UTC)


def event(type: str = "card.charged", data: Any = None, key: str | None = None) -> Event:
    return Event(1, "e1", type, None, key, data, AT)


@process("ship-order", correlate={"card.charged": "order", "batch.completed": "key"})
def ship_order(state: Any, event: Event) -> Any:
    """Ships."""
    return event.data["returns"] if isinstance(event.data, dict) else None


@pytest.mark.parametrize(
    ("occurrence", "instances"),
    [
        (event(data={"order": "o1"}), ["o1"]),
        (event(data={"order": 7}), ["7"]),
        (event(data={"order": ["o1", "o2", "o1", 7]}), ["o1", "o2", "7"]),
        (event(data={"order": []}), []),
        (event(data={"order": True}), []),
        (event(data={"order": None}), []),
        (event(data={"order": 1.5}), []),
        (event(data={"order": ["", "o1", ".", "..", "x" * 256, "a\nb", {}]}), ["o1"]),
        (event(data={}), []),
        (event(data="o1"), []),
        (event(data=None), []),
        (event("batch.completed", key="o1"), ["o1"]),
        (event("batch.completed"), []),
        (event("another", data={"order": "o1"}), []),
        (event("timer.ship-order", data={"instance": "o1", "timer": "t"}), ["o1"]),
        (event("retry.ship-order", data={"instance": "o1", "event": {}}), ["o1"]),
        (event("timer.another", data={"instance": "o1", "timer": "t"}), []),
    ],
)
def test_an_event_belongs_to_its_named_instances(occurrence: Event, instances: list[str]) -> None:
    """By a field of its data or by its key; an invalid name counts as none."""
    assert ship_order.instances_of(occurrence) == instances


ORDER_OF = {"p1": "o1", "p2": "o2"}


@pytest.mark.parametrize(
    ("correlation", "data", "instances"),
    [
        ("payload.order", {"payload": {"order": "o1"}}, ["o1"]),
        ("payload.order", {"payload": {"order": ["o1", 2]}}, ["o1", "2"]),
        ("payload.order", {"payload.order": "o1"}, []),
        ("payload.order", {"payload": "o1"}, []),
        ("payload.order", {}, []),
        ("payload.order", "payload", []),
        (
            "lines.order.id",
            {"lines": [{"order": {"id": "o1"}}, {"order": None}, {"order": {"id": "o2"}}]},
            ["o1", "o2"],
        ),
        ("lines.order", {"lines": [[{"order": "o1"}], {"order": "o1"}]}, ["o1"]),
        (lambda event: ORDER_OF[event.data["payment"]], {"payment": "p2"}, ["o2"]),
        (lambda event: [7, None, "o1"], None, ["7", "o1"]),
        (lambda event: None, None, []),
    ],
    ids=lambda value: "function" if callable(value) else str(value),
)
def test_an_event_names_its_instances_by_a_path_or_through_a_function(
    correlation: Correlation, data: Any, instances: list[str]
) -> None:
    """A list on the path stands for each of its elements."""
    process = Process("p", {"paid": correlation}, lambda state, event: None)
    assert process.instances_of(event("paid", data)) == instances


def test_a_function_that_raises_names_the_event() -> None:
    """The error ends the worker, which must not take the event for nobody's."""
    process = Process("p", {"paid": lambda event: ORDER_OF[event.data["payment"]]}, lambda state, event: None)
    with pytest.raises(KeyError) as raised:
        process.instances_of(event("paid", {"payment": "p3"}))
    assert "for the event 'e1' at position 1" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("type", "correlation", "complaint"),
    [
        ("paid", "", "'payload.order', or a function"),
        ("paid", "a..b", "'payload.order', or a function"),
        ("paid", ".a", "'payload.order', or a function"),
        ("paid", 7, "'payload.order', or a function"),
        ("paid", "key.order", "the key of an event has no fields"),
        ("batch.completed", "order", "begins with one of acked, "),
        ("batch.completed", "items.order", "begins with one of acked, "),
        ("command.ship", "order", "begins with one of command, data, "),
    ],
)
def test_a_path_that_cannot_exist_is_refused(type: str, correlation: Any, complaint: str) -> None:
    """When the process is made, and not by silence once it runs."""
    with pytest.raises(InvalidArgument, match=complaint):
        Process("p", {type: correlation}, lambda state, event: None)


@pytest.mark.parametrize(
    ("type", "correlation"),
    [("batch.completed", "labels.order"), ("batch.cancelled", "ended_by"), ("command.ship", "data.parcel.order")],
)
def test_a_path_in_the_services_own_events_is_accepted(type: str, correlation: str) -> None:
    """If their data may have it."""
    assert Process("p", {type: correlation}, lambda state, event: None).types[0] == type


def decided(result: Any, state: Any = "before") -> dict[str, Any]:
    process = Process("p", {"a": "b"}, lambda state, event: result)
    return process.decide(json.dumps(state), event("a"))


def test_a_functions_result_becomes_the_decision() -> None:
    """The state and the commands, an end, or nothing."""
    no_actions: dict[str, Any] = {"commands": [], "timers": [], "finish": False}
    assert decided(None) == {"state": "before", **no_actions}
    assert decided((None, [])) == {"state": None, **no_actions}
    assert decided(({"n": 1}, [Command("go", 1, "first"), Command("stop", once=True)])) == {
        **no_actions,
        "state": {"n": 1},
        "commands": [
            {"type": "go", "step": "first", "once": False, "data": 1},
            {"type": "stop", "step": None, "once": True, "data": None},
        ],
    }
    timers = [Timer("a", 1.5, "x"), Timer("b", timedelta(minutes=1)), CancelTimer("c")]
    assert decided(("s", timers))["timers"] == [
        {"timer": "a", "after": 1.5, "data": "x"},
        {"timer": "b", "after": 60.0, "data": None},
        {"timer": "c", "after": None},
    ]
    assert decided(Finish()) == {"state": "before", **no_actions, "finish": True}
    assert decided(Finish([Command("go")], None))["state"] is None


def test_a_function_that_fails_parks_its_event() -> None:
    """The fault has the end of the traceback. A function that returns an invalid value parks its event too."""

    def fails(state: Any, event: Event) -> Any:
        raise KeyError("no such item" + "x" * 9000 + "\ud800")

    decision = Process("p", {"a": "b"}, fails).decide("null", event("a"))
    assert set(decision) == {"error"}
    assert len(decision["error"]) == 4000
    decision["error"].encode()
    wrong: Any = Command("go", once="yes")  # type: ignore[arg-type]
    for result in (
        ("state", [wrong]),
        "state",
        ("state",),
        ("state", ["go"]),
        ({1, 2}, []),
        (float("nan"), []),
        ("\ud800", []),
        7,
    ):
        assert set(decided(result)) == {"error"}, result
    assert "returns (state, commands)" in decided("state")["error"]


def test_a_process_can_be_called_like_its_function() -> None:
    """It can be called, and keeps its name and docstring."""
    assert ship_order(None, event(data={"returns": ("s", [])})) == ("s", [])
    assert (ship_order.__name__, ship_order.__doc__, ship_order.name) == ("ship_order", "Ships.", "ship-order")
    assert ship_order.types == ["card.charged", "batch.completed", "timer.ship-order", "retry.ship-order"]
    assert timer_of(event("timer.p", data={"timer": "payment"})) == "payment"
    assert timer_of(event()) is None
    correlate: Any
    for name, correlate in (("", {"a": "b"}), ("p", {}), ("p", {1: "b"}), ("p", "b")):
        with pytest.raises(InvalidArgument):
            process(name, correlate=correlate)(lambda state, event: None)


def test_a_definition_needs_only_the_standard_library() -> None:
    """So a function can be tested without httpx."""
    code = "import sys; from lastbit.processes import Command, Finish, process; print('httpx' in sys.modules)"
    completed_process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed_process.stdout.strip() == "False"


@pytest.mark.parametrize("result", [None, Finish()])
def test_a_state_that_is_changed_in_place_stays_as_it_was(result: Any) -> None:
    """Unless the function returns it."""

    def changes(state: Any, event: Event) -> Any:
        state["n"] += 1
        return result

    assert Process("p", {"a": "b"}, changes).decide('{"n": 1}', event("a"))["state"] == {"n": 1}
