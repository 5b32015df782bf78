"""Workers of a process with a real service: sharing, killed, restarted; and the calls for processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

import pytest

from lastbit import (
    AsyncClient,
    Client,
    ConsumerGroupInUse,
    InstanceNotFound,
    InvalidArgument,
    InvalidRequest,
    ProcessNotFound,
)
from lastbit._protocol import Answer, Failure, Request
from lastbit.models import Event
from lastbit.processes import (
    Command,
    Finish,
    Process,
    ProcessSummary,
    ProcessWorker,
    Timer,
    process,
    run,
    timer_of,
)
from lastbit.processes import worker as worker_module
from lastbit.processes._unnamed import UnnamedEvents
from lastbit.processes.calls import Processes
from lastbit.processes.correlation import FIELDS
from lastbit.streams import ConsumerGroup, partition_of
from tests.mutants import mutant
from tests.support.exposition import eventually
from tests.support.servers import ROOT, run_module, running_service, sqlite_file
from tests.support.threads import no_more_threads, no_thread_left

NEEDED = ("charged", "complete", "reserved")


def correlate(name: str) -> dict[str, str]:
    """Separate event types for each process, as all share a feed."""
    return {f"{name}.{type}": "order" for type in NEEDED}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with sqlite_file() as database, running_service(database, LASTBIT_DISPATCHER_EVERY="0.05") as running:
        yield running.url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


def ship(state: Any, event: Event) -> Any:
    types = sorted({*(state or []), event.type})
    return Finish([Command("ship", {"seen": len(types)})], types) if len(types) == 3 else (types, [])


@contextlib.contextmanager
def working(url: str, process: Process, *names: str, **options: Any) -> Iterator[list[ProcessWorker]]:
    """Workers in threads, each with its own client; an error of one is raised here."""
    workers: list[ProcessWorker] = []
    errors: list[BaseException] = []

    def work(name: str, ready: threading.Event) -> None:
        with Client(url) as client:
            workers.append(
                ProcessWorker(process, client, name, **{"partitions": 4, "ttl": 2.0, "every": 0.05, **options})
            )
            ready.set()
            try:
                workers[-1].run()
            except BaseException as error:  # noqa: BLE001  # raised again in the test
                errors.append(error)

    with Client(url) as client:
        # Defined here, so that it can be read at once.
        client.processes.define(process.name, partitions=options.get("partitions", 4))
    threads = []
    for name in names:
        ready = threading.Event()
        threads.append(threading.Thread(target=work, args=(name, ready)))
        threads[-1].start()
        ready.wait(60)
    try:
        yield workers
    finally:
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join(60)
    if errors:
        raise errors[0]


def append(client: Client, name: str, orders: range, types: Sequence[str] = NEEDED) -> int:
    """Append events of these orders, one after the other; return the feed's last position."""
    new = [
        {"id": f"{name}:{order}:{type}", "type": f"{name}.{type}", "data": {"order": f"{name}-{order}"}}
        for type in types
        for order in orders
    ]
    return max(receipt.position for receipt in client.append(new))


def issued(client: Client, process: Process, count: int) -> list[str]:
    """The instances of the issued commands, once there are `count` of them."""
    after, instances = 0, []
    while len(instances) < count:
        page = client.processes.commands(after=after, process=process.name, wait=30)
        instances += [command.instance for command in page.commands]
        after = page.next
    return instances


def test_two_workers_share_the_instances_and_each_order_ships_once(url: str, client: Client) -> None:
    """Each worker has several lanes; floors are kept when they leave."""
    process = Process("shared", correlate("shared"), ship)
    append(client, "shared", range(10))
    with working(url, process, "w1", "w2"):
        last = append(client, "shared", range(10, 40))
        assert Counter(issued(client, process, 40)) == Counter(f"shared-{order}" for order in range(40))
        while len(client.groups.get("process.shared").workers) < 2:
            pass  # one of them may have done all the work before the other has joined
    assert min(position.floor or 0 for position in client.groups.get("process.shared").positions) >= last
    [summary] = [position for position in client.processes.list() if position.name == "shared"]
    assert (summary.finished, summary.running, summary.parked) == (40, 0, 0)


def test_a_later_worker_continues_where_the_others_stopped(url: str, client: Client) -> None:
    """It handles the events that arrived in between and repeats none."""
    calls: Counter[str] = Counter()

    def counted(state: Any, event: Event) -> Any:
        calls[event.id] += 1
        return ship(state, event)

    process = Process("later", correlate("later"), counted)
    append(client, "later", range(20), ["charged", "reserved"])
    with working(url, process, "w1"):
        while sum(instance.version == 2 for instance in client.processes.instances("later")) < 20:
            pass
    append(client, "later", range(20), ["complete"])
    assert set(calls.values()) == {1}
    with working(url, process, "w2"):
        assert Counter(issued(client, process, 20)) == Counter(f"later-{order}" for order in range(20))
    # The second worker did not know the instances' states: it started without a state, was refused, and read the state.
    assert {calls[f"later:{order}:charged"] for order in range(20)} == {1}


def test_a_poisoned_event_is_parked_and_can_be_retried(url: str, client: Client) -> None:
    """The error can be read; with corrected code the instance continues."""
    failing = threading.Event()
    failing.set()

    def fragile(state: Any, event: Event) -> Any:
        if failing.is_set() and event.id == "fragile:3:reserved":
            raise ValueError("no such item")
        return ship(state, event)

    process = Process("fragile", correlate("fragile"), fragile)
    with working(url, process, "w1"):
        append(client, "fragile", range(6))
        assert Counter(issued(client, process, 5)) == Counter(f"fragile-{order}" for order in range(6) if order != 3)
        while not (parked := list(client.processes.instances("fragile", status="parked"))):
            pass
        assert [(instance.instance, instance.parked) for instance in parked] == [("fragile-3", 1)]
        [entry] = [e for e in client.processes.get("fragile", "fragile-3").history if e.status == "parked"]
        assert "ValueError: no such item" in (entry.error or "")
        failing.clear()
        assert client.processes.retry("fragile", "fragile-3", event=entry.event) == 1
        assert issued(client, process, 6)[-1] == "fragile-3"


def test_a_handling_that_the_service_refuses_is_parked(url: str, client: Client) -> None:
    """An invalid command is the function's fault, and stops no one else. The same with a state that is nested too
    deeply."""

    def broken(state: Any, event: Event) -> tuple[Any, list[Command]]:
        nested: Any = 1
        for _ in range(300):
            nested = [nested]
        return (1, [Command("no blanks here")]) if event.data["order"] == "refused-0" else (nested, [])

    process = Process("refused", correlate("refused"), broken)
    with working(url, process, "w1"):
        append(client, "refused", range(2), ["charged"])
        while len(list(client.processes.instances("refused", status="parked"))) < 2:
            pass
    assert "commands[0].type" in (client.processes.get("refused", "refused-0").history[0].error or "")
    assert "body.state: expected JSON of at most 100 levels" in (
        client.processes.get("refused", "refused-1").history[0].error or ""
    )


@mutant(
    "a-worker-swallows-commands",
    "lastbit.processes.definition:_decided",
    '{"type": action.type, "step": action.step, "once": action.once, "data": action.data}',
    '{"type": action.type, "step": action.step, "once": True, "data": action.data}',
)
def test_each_event_gets_its_command(url: str, client: Client) -> None:
    """By default. Or only the first one, if the function says that one is enough."""

    def tell(state: Any, event: Event) -> tuple[Any, list[Command]]:
        return [*(state or []), event.type], [
            Command("tell", {"about": event.type}),
            Command("tell", {"about": "again"}),
            Command("open", once=True),
        ]

    process = Process("telling", correlate("telling"), tell)
    with working(url, process, "w1"):
        append(client, "telling", range(1))
        eventually(lambda: [each.version for each in client.processes.instances("telling")], [3])
    found = client.processes.commands(process="telling").commands
    assert Counter((command.type, (command.data or {}).get("about")) for command in found) == {
        **{("tell", f"telling.{type}"): 1 for type in NEEDED},
        ("tell", "again"): 3,
        ("open", None): 1,
    }
    assert client.processes.get("telling", "telling-0").parked == 0


def test_an_event_that_issues_a_step_of_another_event_is_parked(url: str, client: Client) -> None:
    """With a text that names both events. The instance goes on, and the event can be handled by corrected code."""
    steps = {"report": "report"}

    def collect(state: Any, event: Event) -> tuple[Any, list[Command]]:
        kind = event.type.rpartition(".")[2]
        return [*(state or []), kind], [Command("report", kind, step=steps.get("report", kind))]

    process = Process("collecting", correlate("collecting"), collect)
    with working(url, process, "w1"):
        append(client, "collecting", range(1))
        eventually(lambda: [each.parked for each in client.processes.instances("collecting", status="parked")], [2])
        details = client.processes.get("collecting", "collecting-0")
        assert details.state == ["charged"]
        for entry in details.history[:2]:
            assert "'collecting:0:charged'" in (entry.error or "")
            assert f"'{entry.event}'" in (entry.error or "")
        assert "'collecting:0:charged'" in lastbit(url, "processes", "show", "collecting", "collecting-0")
        steps.clear()
        assert client.processes.retry("collecting", "collecting-0") == 2
        issued(client, process, 3)
        eventually(lambda: client.processes.get("collecting", "collecting-0").parked, 0)
    found = client.processes.commands(process="collecting").commands
    assert [(command.step, command.data) for command in found] == [
        *(("report", "charged"), ("complete", "complete"), ("reserved", "reserved"))
    ]


@mutant(
    "a-worker-parks-events-because-the-service-is-older",
    "lastbit.processes._lane:Lane._send",
    "BEYOND.fullmatch(place)",
    "place == 'body.event'",
)
def test_a_worker_parks_nothing_because_the_service_is_older(url: str) -> None:
    """It doesn't know whether a command is issued once. The worker ends with its error, which names the field."""
    process = Process("newer", correlate("newer"), ship)
    calls: list[Any] = []

    def older(send: Callable[[Request], Answer | Failure], request: Request) -> Answer | Failure:
        if not request.url.endswith("/handle"):
            return send(request)
        results = []
        for entry in json.loads(request.body or b"")["handlings"]:
            calls.append(entry)
            fault = {"place": "body.commands[0].once", "expected": "no such field here"}
            problem = {"status": 422, "code": "invalid_request", "detail": "body.commands[0].once", "errors": [fault]}
            results.append({"handled": None, "problem": problem})
        return Answer(200, {"content-type": "application/json"}, json.dumps({"results": results}).encode())

    with Client(url) as client:
        client.driver._send = partial(older, client.driver._send)
        append(client, "newer", range(1))
        with pytest.raises(InvalidRequest, match="once"):
            run(process, client, "w1", partitions=2, every=0.05)
    assert not [entry for entry in calls if "error" in entry]


def test_events_of_many_instances_share_calls_and_those_of_one_keep_their_order(url: str, client: Client) -> None:
    """One lane. The first state of an instance lists all its events in the feed's order; no event is handled twice."""

    def listed(state: Any, event: Event) -> Any:
        numbers = [*(state or []), event.data["number"]]
        return Finish([Command("done")], numbers) if len(numbers) == 5 else (numbers, [])

    process = Process("listed", {"listed.happened": "order"}, listed)
    client.processes.define("listed", partitions=4)
    client.append(
        {
            "id": f"listed:{number}:{order}",
            "type": "listed.happened",
            "data": {"order": f"listed-{order % 40}", "number": number},
        }
        for number in range(5)
        for order in range(40)
    )
    calls = Counter[str]()
    original = Processes.handle_many

    def counted(self: Processes, name: str, handlings: Sequence[Any]) -> Any:
        instances = [handling["instance"] for handling in handlings]
        assert len(set(instances)) == len(instances)
        calls["calls"] += 1
        return original(self, name, handlings)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Processes, "handle_many", counted)
        with working(url, process, "w1", lanes=1):
            assert Counter(issued(client, process, 40)) == Counter(f"listed-{order}" for order in range(40))
    assert calls["calls"] < 100
    for order in range(40):
        details = client.processes.get("listed", f"listed-{order}")
        assert (details.state, details.version) == ([0, 1, 2, 3, 4], 5)


@mutant(
    "an-event-is-acked-though-its-entry-was-refused",
    "lastbit.processes._lane:Lane._handle",
    "task.is_over",
    "setattr(task, 'is_handled', True) is None",
)
def test_a_refused_entry_of_a_shared_call_does_not_delay_the_others(url: str, client: Client) -> None:
    """Old instances are read again, and the others are done. No event is acked before it is handled."""
    process = Process("mixed", correlate("mixed"), ship)
    append(client, "mixed", range(20), ["charged", "reserved"])
    with working(url, process, "w1", lanes=1):
        while sum(instance.version == 2 for instance in client.processes.instances("mixed")) < 20:
            pass
    # The next worker knows no states, so the entries for the old instances are refused first.
    append(client, "mixed", range(40), ["complete"])
    last = append(client, "mixed", range(20, 40), ["charged", "reserved"])
    with working(url, process, "w2", lanes=1):
        while min(position.floor or 0 for position in client.groups.get("process.mixed").positions) < last:
            pass
    commands = client.processes.commands(process="mixed", limit=100).commands
    assert Counter(command.instance for command in commands) == Counter(f"mixed-{order}" for order in range(40))


class Busy:
    """Refuses each event once, as an overloaded service does: the entry is not applied, and its result is a 503. All
    else is sent to the real service."""

    PROBLEM: ClassVar = {"status": 503, "code": "unavailable", "detail": "more writes arrive than can be committed"}

    def __init__(self, send: Callable[[Request], Answer | Failure]) -> None:
        self._send = send
        self.refused: set[tuple[str, str]] = set()

    def __call__(self, request: Request) -> Answer | Failure:
        if not request.url.endswith("/handle"):
            return self._send(request)
        entries = json.loads(request.body or b"")["handlings"]
        keys = [(entry["instance"], entry["event"]["id"]) for entry in entries]
        # An event of every second instance, so that calls are refused in part.
        now = {key for key in keys if key not in self.refused and int(key[0].rpartition("-")[2]) % 2}
        self.refused |= now
        rest = [entry for key, entry in zip(keys, entries, strict=True) if key not in now]
        results: Iterator[Any] = iter(())
        if rest:
            answer = self._send(replace(request, body=json.dumps({"handlings": rest}).encode()))
            if isinstance(answer, Failure) or answer.status != 200:
                return answer
            results = iter(json.loads(answer.body)["results"])
        body = [{"handled": None, "problem": self.PROBLEM} if key in now else next(results) for key in keys]
        return Answer(200, {"content-type": "application/json"}, json.dumps({"results": body}).encode())


@mutant(
    "an-entry-that-is-refused-for-now-is-not-tried-again",
    "lastbit.processes._lane:Lane._send",
    "must_pause = True",
    "task.is_over = True",
)
def test_an_entry_that_is_refused_for_now_is_tried_again(url: str, client: Client) -> None:
    """Each event is handled once, and those of an instance in their order; the other entries are not sent again."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(state: Any, event: Event) -> Any:
        assert isinstance(event.data, dict)
        calls[event.data["order"], event.type] += 1
        return [*(state or []), event.type.rpartition(".")[2]], []

    process = Process("busy", correlate("busy"), note)
    client.processes.define("busy", partitions=4)
    append(client, "busy", range(8))
    with Client(url) as worker_client:
        busy = Busy(worker_client.driver._send)
        worker_client.driver._send = busy
        worker = ProcessWorker(process, worker_client, "w1", lanes=2, every=0.05)
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            eventually(
                lambda: {
                    instance.instance: (instance.version, instance.state)
                    for instance in client.processes.instances("busy")
                },
                {f"busy-{order}": (3, list(NEEDED)) for order in range(8)},
            )
        finally:
            worker.stop()
            thread.join(60)
    assert len(busy.refused) == 4 * len(NEEDED)
    for (order, _), count in calls.items():
        assert count == 1 + int(order.rpartition("-")[2]) % 2
    assert [instance.parked for instance in client.processes.instances("busy")] == [0] * 8


@pytest.mark.parametrize("started", range(5))
def test_a_worker_that_may_start_too_few_threads_ends(url: str, started: int) -> None:
    process = Process("short_of_threads", correlate("short_of_threads"), ship)
    with (
        Client(url) as client,
        no_thread_left(),
        pytest.raises(RuntimeError, match="can't start new thread"),
        no_more_threads(after=started),
    ):
        ProcessWorker(process, client, "w1", partitions=2, lanes=2).run()


def test_a_time_out_arrives_as_an_event(url: str, client: Client) -> None:
    """Only the instance that requested it gets it."""

    @process("timed", correlate=correlate("timed"))
    def timed(state: Any, event: Event) -> Any:
        if timer_of(event) == "stock":
            return Finish([Command("cancel", event.data["data"])])
        return "waiting", [Timer("stock", 0.05, {"order": event.data["order"]})]

    with working(url, timed, "w1"):
        append(client, "timed", range(3), ["charged"])
        assert Counter(issued(client, timed, 3)) == Counter(f"timed-{order}" for order in range(3))
        assert client.processes.get("timed", "timed-1").commands[0].data == {"order": "timed-1"}


def test_an_event_can_go_to_many_instances(url: str, client: Client) -> None:
    """The naming field holds a list."""
    process = Process("many", correlate("many"), ship)
    with working(url, process, "w1", "w2"):
        orders = [f"many-{order}" for order in range(12)]
        for type in NEEDED:
            client.append_event(id=f"many:{type}", type=f"many.{type}", data={"order": orders})
        assert Counter(issued(client, process, 12)) == Counter(orders)


def test_events_that_name_their_instance_in_four_ways_are_joined(url: str, client: Client) -> None:
    """By a field, a path, the key, and another id through a function; in every order, each event twice."""
    kinds = ("ordered", "paid", "packed", "called")
    orders = {f"join-{number}": order for number, order in enumerate(itertools.permutations(kinds))}
    order_of = {f"call-{order}": order for order in orders}

    def join(state: Any, event: Event) -> Any:
        types = sorted({*(state or []), event.type})
        return Finish([Command("ship")]) if len(types) == len(kinds) else (types, [])

    def data_of(kind: str, order: str) -> dict[str, Any]:
        return {
            "ordered": {"data": {"order": order}},
            "paid": {"data": {"payload": {"order": order}}},
            "packed": {"key": order},
            "called": {"data": {"call": f"call-{order}"}},
        }[kind]

    correlations = {
        "join.ordered": "order",
        "join.paid": "payload.order",
        "join.packed": "key",
        "join.called": lambda event: order_of[event.data["call"]],
    }
    process = Process("join", correlations, join)
    for order, sequence in orders.items():
        client.append(
            [
                {"id": f"{order}:{kind}:{copy}", "type": f"join.{kind}", **data_of(kind, order)}
                for kind in sequence
                for copy in range(2)
            ]
        )
    with working(url, process, "w1", "w2"):
        assert Counter(issued(client, process, 24)) == Counter(orders.keys())
        assert {page.instance for page in client.processes.instances("join", status="finished")} == set(orders)


def test_the_fields_of_the_services_own_events_can_be_correlated(url: str, client: Client) -> None:
    """Each field that one of its events has is accepted in a path."""
    batch = client.open(items=2, labels={"order": "o1"})
    batch.update(labels={"order": "o2"})
    client.fail(batch.ids[:1], reason="broken")
    batch.redrive()
    batch.cancel(reason="test")
    batch.reopen()
    batch.seal()
    client.ack(batch.ids)
    with working(url, Process("fields", correlate("fields"), ship), "w1"):
        append(client, "fields", range(1))
        issued(client, Process("fields", correlate("fields"), ship), 1)
    seen = {event.type: event for event in client.events(limit=1000).events if event.type.split(".")[0] in FIELDS}
    assert {"batch.updated", "batch.redrive", "batch.cancelled", "batch.reopened", "command.ship"} <= seen.keys()
    for event in seen.values():
        for field in event.data:
            Process("p", {event.type: field}, ship)


def test_a_strict_process_goes_on_in_order_after_a_retry(url: str, client: Client) -> None:
    """With real workers: what waits comes by itself, and other instances don't wait."""
    is_mended = threading.Event()

    def collect(state: Any, event: Event) -> Any:
        if event.data["broken"] and not is_mended.is_set():
            raise ValueError("broken")
        numbers = [*(state or []), event.data["number"]]
        return Finish([Command("done")], numbers) if len(numbers) == 20 else (numbers, [])

    process = Process("strict", {"strict.charged": "order"}, collect, strict=True)
    for number in range(20):
        for order in ("a", "b"):
            broken = order == "a" and number == 3
            data = {"order": order, "number": number, "broken": broken}
            client.append_event(id=f"strict:{order}:{number}", type="strict.charged", data=data)
    with working(url, process, "w1", "w2"):
        assert issued(client, process, 1) == ["b"]
        eventually(
            lambda: {instance.instance: instance.parked for instance in client.processes.instances("strict")},
            {"a": 17, "b": 0},
        )
        errors = [received.error for received in client.processes.get("strict", "a").history]
        assert sum(error is not None for error in errors) == 1
        is_mended.set()
        client.processes.retry("strict", "a", event="strict:a:3")
        assert issued(client, process, 2) == ["b", "a"]
    assert client.processes.get("strict", "a").state == list(range(20))


@mutant(
    "each-worker-counts-the-events-without-an-instance",
    "lastbit.processes.worker:ProcessWorker._feed",
    "partition.assignment.partition == 0",
    "True",
)
def test_events_without_an_instance_are_counted_once_and_logged_once(
    url: str, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever workers come and go, and read them again."""
    process = Process("unnamed", correlate("unnamed"), ship)
    count = 0
    for round in range(4):
        client.append([{"id": f"unnamed:{round}:{n}", "type": "unnamed.charged", "data": n} for n in range(7)])
        append(client, "unnamed", range(round, round + 1))
        count += 7
        with working(url, process, f"w{round}", f"v{round}", every=0.05 if round % 2 else 60.0):
            issued(client, process, round + 1)
            # In the other rounds no commit is due: the worker reports the events when it ends.
            if round % 2:
                eventually(lambda: summary_of(client, "unnamed").unnamed, count)
        assert summary_of(client, "unnamed").unnamed == count
    logged = [record.getMessage() for record in caplog.records if "names no instance" in record.getMessage()]
    # Each owner of partition 0 logs the first: at least one in each round, at most both workers.
    assert 4 <= len(logged) <= 8, logged
    assert "event unnamed:0:0 (unnamed.charged) at position" in logged[0]


@mutant(
    "a-new-owner-counts-events-again",
    "lastbit.processes._unnamed:UnnamedEvents.add",
    "event.position > self._upto",
    "True",
)
def test_events_without_an_instance_that_another_worker_reads_too_count_once(client: Client) -> None:
    """Of two workers that both believe that partition 0 is theirs, and one that begins again at an older position."""
    process = Process("unnamed-twice", correlate("unnamed-twice"), ship)
    client.processes.define(process.name)
    early, late = (UnnamedEvents(process, Processes(client.driver)) for _ in range(2))
    for counted in (early, late):
        counted.begin(0)

    def read(counted: UnnamedEvents, *positions: int) -> int:
        for position in positions:
            counted.add(Event(position, f"e{position}", "paid", None, None, None, datetime.now(UTC)))
        counted.report()
        return summary_of(client, process.name).unnamed

    assert read(early, 3, 5) == 2
    assert read(late, 3, 5, 8) == 3
    assert read(early, 8, 9) == 4
    late.begin(summary_of(client, process.name).unnamed_upto)
    assert read(late, 5, 8, 9, 12) == 5
    assert read(early) == 5


def test_the_reader_and_new_partitions_do_not_wait_while_events_are_reported(client: Client) -> None:
    """The service may be away for long. What was begun anew meanwhile is kept."""
    process = Process("unnamed-slowly", correlate("unnamed-slowly"), ship)
    client.processes.define(process.name)
    is_asked, may_answer = threading.Event(), threading.Event()

    class Slow(Processes):
        def count_unnamed(self, *arguments: Any) -> Any:
            is_asked.set()
            assert may_answer.wait(60)
            return super().count_unnamed(*arguments)

    unnamed = UnnamedEvents(process, Slow(client.driver))
    unnamed.add(Event(3, "e3", "paid", None, None, None, datetime.now(UTC)))
    reporter = threading.Thread(target=unnamed.report)
    reporter.start()
    assert is_asked.wait(60)

    def go_on() -> None:
        unnamed.begin(4)
        unnamed.add(Event(5, "e5", "paid", None, None, None, datetime.now(UTC)))

    others = threading.Thread(target=go_on, daemon=True)
    others.start()
    others.join(10)
    is_waiting = others.is_alive()
    may_answer.set()
    reporter.join(60)
    assert not is_waiting
    assert summary_of(client, process.name).unnamed == 2


def summary_of(client: Client, name: str) -> ProcessSummary:
    (summary,) = (summary for summary in client.processes.list() if summary.name == name)
    return summary


def test_other_events_never_hold_the_floor(url: str, client: Client) -> None:
    """Of other types, or without an instance's name."""
    process = Process("others", correlate("others"), ship)
    append(client, "others", range(2))
    client.append([{"id": f"nobody:{n}", "type": "others.charged", "data": n} for n in range(5)])
    last = client.append([{"id": f"other:{n}", "type": "other"} for n in range(700)])[-1].position
    with working(url, process, "w1"):
        issued(client, process, 2)
        # A late timer of another test's process may append an event, and so take the floors beyond `last`.
        eventually(
            lambda: [(position.floor or 0) >= last for position in client.groups.get("process.others").positions],
            [True] * 4,
        )


@mutant(
    "a-full-window-ends-the-worker",
    "lastbit.processes._partition:Partition.pass_over",
    "suppress(WindowClosed, WindowFull)",
    "suppress(WindowClosed)",
)
def test_a_full_window_does_not_end_the_worker(url: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One event takes long. Meanwhile the worker reads more pages without events of the partition than the partition's
    window has places."""
    monkeypatch.setattr(worker_module, "ConsumerGroup", partial(ConsumerGroup, window_capacity=2))
    monkeypatch.setattr(worker_module, "PAGE", 1)
    may_end = threading.Event()

    def slow(state: Any, event: Event) -> Any:
        assert may_end.wait(60)
        return ship(state, event)

    process = Process("slow", {**correlate("slow"), "slow.other": "order"}, slow)
    append(client, "slow", range(1), NEEDED[:1])
    last = client.append([{"id": f"slow:{n}", "type": "slow.other"} for n in range(10)])[-1].position
    with working(url, process, "w1", partitions=4) as [running]:
        eventually(lambda: [partition.reached >= last for partition in running._ours.values()], [True] * 4)
        may_end.set()
        append(client, "slow", range(1), NEEDED[1:])
        issued(client, process, 1)


def test_another_worker_takes_over_from_a_killed_process(url: str, client: Client) -> None:
    """With SIGKILL, in the middle of its work; the other worker finishes it, and nothing ships twice."""
    code = (
        "import sys; from lastbit import Client; from lastbit.processes import Process, run\n"
        "from tests.sdk.test_processes import correlate, ship\n"
        "made = Process('killed', correlate('killed'), ship)\n"
        "run(made, Client(sys.argv[1]), sys.argv[2], partitions=4, ttl=1.0, every=0.1)\n"
    )
    command = [sys.executable, "-c", code, url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = Process("killed", correlate("killed"), ship)
    first = subprocess.Popen([*command, "w1"], cwd=ROOT, env=environment)
    try:
        append(client, "killed", range(60))
        issued(client, process, 1)
    finally:
        first.kill()
        first.wait(60)
    with working(url, process, "w2", ttl=1.0):
        append(client, "killed", range(60, 70))
        assert Counter(issued(client, process, 70)) == Counter(f"killed-{order}" for order in range(70))


@mutant(
    "a-worker-keeps-the-definition-of-an-earlier-process",
    "lastbit.processes.worker:ProcessWorker._defined_after",
    "self._defined is None or self._defined_since <= assigned",
    "self._defined is None",
)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("moment", ["starting", "working"])
def test_a_worker_skips_no_event_of_a_process_that_was_defined_again(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """With more partitions, and from an earlier position. This happens after the worker has defined the process, and
    before its first partition is assigned; or while it works, as if it were suspended for longer than its lease."""
    name = f"again-{moment}"
    process = Process(name, correlate(name), ship)
    before = client.events(limit=1).last
    client.processes.define(name, partitions=2, after=append(client, name, range(10)))
    define = Processes.define
    calls: list[str] = []

    def define_again() -> None:
        client.processes.delete(name)
        define(client.processes, name, partitions=8, after=before)

    def defined_before(processes: Processes, *arguments: Any, **options: Any) -> Any:
        definition = define(processes, *arguments, **options)
        calls.append(name)
        if moment == "starting" and len(calls) == 1:
            define_again()
        return definition

    def removed_and_defined_again() -> bool:
        calls.clear()  # an attempt that comes too late has made the worker join again, and read the definition
        client.groups.leave(f"process.{name}", "w1")
        with contextlib.suppress(ConsumerGroupInUse):  # the worker has just joined again
            define_again()
            return True
        return False

    with Client(url) as other, monkeypatch.context() as patches:
        patches.setattr(Processes, "define", defined_before)
        worker = ProcessWorker(process, other, "w1", ttl=2.0, every=0.05)
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            if moment == "working":
                eventually(lambda: [each.owner for each in client.groups.get(f"process.{name}").positions], ["w1"] * 2)
                eventually(removed_and_defined_again, True)
            assert Counter(issued(client, process, 10)) == Counter(f"{name}-{order}" for order in range(10))
        finally:
            worker.stop()
            thread.join(60)
    assert len(calls) < 8, "partitions that are assigned at the same time share a read of the definition"


@mutant(
    "a-worker-goes-on-though-its-position-is-refused",
    "lastbit.processes.worker:ProcessWorker._keep_floors",
    "not error.is_temporary",
    "False",
)
@pytest.mark.timeout(60)
def test_a_worker_ends_when_its_position_is_refused(url: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not seem to work: here the feed ends before the position, as after a failover that lost its end."""
    process = Process("beyond", correlate("beyond"), ship)
    client.processes.define("beyond", partitions=2)
    append(client, "beyond", range(2))
    commit = ConsumerGroup.commit

    def commit_beyond(group: ConsumerGroup, assignments: Any, **options: Any) -> None:
        all_assignments = list(assignments)
        for assignment in all_assignments:
            assignment.window.track(10_000_000)
            assignment.window.ack(10_000_000)
        commit(group, all_assignments, **options)

    monkeypatch.setattr(ConsumerGroup, "commit", commit_beyond)
    with Client(url) as other, pytest.raises(InvalidRequest, match="the feed, which ends at"):
        run(process, other, "w1", partitions=2, every=0.05)


@mutant(
    "a-worker-parks-an-event-that-the-feed-has-lost",
    "lastbit.processes._lane:Lane._send",
    "BEYOND.fullmatch(place)",
    "False",
)
@pytest.mark.timeout(60)
def test_a_worker_ends_when_the_feed_has_lost_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here another event has its position by now, as after a failover. Nothing is handled or parked in its place, and a
    worker that starts again handles the other one, which is for the same partition."""
    same_partition = partition_of("lost-1", 4)
    other = next(number for number in range(2, 100) if partition_of(f"lost-{number}", 4) == same_partition)
    calls: list[list[tuple[str, bool]]] = []
    has_begun, gate = threading.Event(), threading.Event()
    handle_many = Processes.handle_many

    def slowly(state: Any, event: Event) -> Any:
        has_begun.set()
        gate.wait(60)
        return state, [Command("ship")]

    def recorded(processes: Processes, name: str, handlings: Sequence[Any]) -> Any:
        calls.append([(entry["instance"], "error" in entry) for entry in handlings])
        return handle_many(processes, name, handlings)

    monkeypatch.setattr(Processes, "handle_many", recorded)
    process = Process("lost", correlate("lost"), slowly)
    with sqlite_file() as database, running_service(database) as service, Client(service.url) as client:

        def lose() -> None:
            with working(service.url, process, "w1") as (worker,):
                position = append(client, "lost", range(1, 2), ["charged"])
                assert has_begun.wait(60)
                with contextlib.closing(sqlite3.connect(database.removeprefix("sqlite:///"))) as file, file:
                    file.execute(
                        "UPDATE feed SET event_id = ?, data = replace(data, 'lost-1', ?) WHERE position = ?",
                        (f"lost:{other}:charged", f"lost-{other}", position),
                    )
                gate.set()
                assert worker._stopping.wait(60)

        with pytest.raises(InvalidRequest, match="expected an event of the feed: 'lost:1:charged' is not at"):
            lose()
        assert calls == [[("lost-1", False)]]
        with working(service.url, process, "w1"):
            assert issued(client, process, 1) == [f"lost-{other}"]
        assert [instance.instance for instance in client.processes.instances("lost")] == [f"lost-{other}"]


def test_a_state_from_an_earlier_ownership_is_not_used() -> None:
    """A partition moves to another worker and back. Meanwhile its instance has ended, was removed and has started
    again, so its version is the one that the first worker remembers."""

    def listed(state: Any, event: Event) -> Any:
        events = [*(state or []), event.id]
        return Finish(state=events) if event.id == "last" else (events, [])

    process = Process("moved", {"moved": "key"}, listed)
    instance = next(name for name in map(str, range(100)) if partition_of(name, 2) == 1)

    with sqlite_file() as database, running_service(database) as service, Client(service.url) as client:

        def handle(event: str, version: int) -> None:
            client.append_event(id=event, type="moved", key=instance)
            eventually(lambda: [each.version for each in client.processes.instances("moved")], [version])

        def owner() -> str | None:
            return client.groups.get("process.moved").positions[1].owner

        options = {"partitions": 2, "release": 5.0}
        with working(service.url, process, "w1", **options):
            handle("first", 1)
            with working(service.url, process, "w2", **options):
                eventually(owner, "w2")
                handle("last", 2)
                eventually(lambda: client.processes.list()[0].floor, 2)
                janitor = run_module("jobs.janitor", "--keep", "0s", "--database-url", database)
                assert json.loads(janitor.stdout)["instances"] == 1
                handle("again", 1)
            eventually(owner, "w1")
            handle("after", 2)
        assert client.processes.get("moved", instance).state == ["again", "after"]


def test_the_calls_for_processes(url: str, client: Client) -> None:
    """Defined, listed, deleted; and refused."""
    definition = client.processes.define("calls", partitions=2, ttl=5, after=0)
    assert (definition.name, definition.group, definition.partitions, definition.after) == (
        "calls",
        "process.calls",
        2,
        0,
    )
    assert client.processes.define("calls") == definition
    with pytest.raises(InstanceNotFound):
        client.processes.get("calls", "o1")
    with pytest.raises(ProcessNotFound):
        list(client.processes.instances("nobody"))
    with pytest.raises(InvalidArgument):
        client.processes.get("calls", "")
    answer = client.groups.sync(definition.group, "w1", "s1")
    epochs = {item.partition: item.epoch for item in answer.assigned}
    assert set(epochs) == {0, 1}
    with pytest.raises(ConsumerGroupInUse):
        client.processes.delete("calls")
    client.groups.leave(definition.group, "w1")
    client.processes.delete("calls")
    assert "calls" not in {item.name for item in client.processes.list()}
    for wrong in (
        lambda: ProcessWorker(ship, client, "w1"),
        lambda: run(Process("p", correlate("p"), ship), client, "w", lanes=0),
    ):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            wrong()


def test_the_async_calls_for_processes(url: str, client: Client) -> None:
    """Same names, same answers."""

    async def look() -> None:
        async with AsyncClient(url) as async_client:
            definition = await async_client.processes.define("awaited", partitions=1)
            assert definition == client.processes.define("awaited")
            answer = await async_client.groups.sync(definition.group, "w1", "s1")
            position = (await async_client.append_event(id="awaited:1", type="card.charged")).position
            handled = await async_client.processes.handle(
                *("awaited", "o1"),
                event="awaited:1",
                position=position,
                worker="w1",
                epoch=answer.assigned[0].epoch,
                version=0,
                outcome={"state": 1, "commands": [{"type": "go"}]},
            )
            assert [item.step for item in handled.commands] == ["go"]
            assert await async_client.processes.get("awaited", "o1") == client.processes.get("awaited", "o1")
            assert [item.instance async for item in async_client.processes.instances("awaited")] == ["o1"]
            page = await async_client.processes.commands(process="awaited")
            assert page.commands == client.processes.commands(process="awaited").commands
            async for command in async_client.processes.follow(process="awaited"):
                assert command == page.commands[0]
                break
            assert await async_client.processes.retry("awaited", "o1") == 0
            assert await async_client.processes.list() == client.processes.list()
            await async_client.groups.leave(definition.group, "w1")
            await async_client.processes.delete("awaited")

    asyncio.run(look())


def lastbit(url: str, *arguments: str) -> str:
    result = run_module("lastbit", *arguments, "--url", url)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_command_line_shows_and_retries(url: str, client: Client) -> None:
    """As text and as JSON."""
    failing = [True]

    def fragile(state: Any, event: Event) -> Any:
        if failing[0] and event.type == "shown.reserved":
            raise ValueError("no such item")
        return ship(state, event)

    process = Process("shown", correlate("shown"), fragile)
    with working(url, process, "w1"):
        append(client, "shown", range(1))
        while not list(client.processes.instances("shown", status="parked")):
            pass
        assert "shown" in lastbit(url, "processes", "list")
        assert "1 parked event" in lastbit(url, "processes", "instances", "shown", "--status", "parked")
        text = lastbit(url, "processes", "show", "shown", "shown-0")
        assert "ValueError: no such item" in text.splitlines()
        assert "parked" in text
        failing[0] = False
        assert json.loads(lastbit(url, "processes", "retry", "shown", "shown-0", "--json")) == {"retrying": 1}
        issued(client, process, 1)
    [command] = json.loads(lastbit(url, "commands", "--process", "shown", "--json"))["commands"]
    assert (command["type"], command["instance"]) == ("ship", "shown-0")
    assert "ship" in lastbit(url, "commands", "--type", "ship", "--follow", "--limit", "1")
    assert "finished" in lastbit(url, "processes", "instances", "shown")
    assert "deleted" in lastbit(url, "processes", "delete", "shown")


def test_a_retry_of_one_event_can_be_repeated(url: str, client: Client) -> None:
    """If its response was lost, the repeat finds the event retried or handled. An event that the instance doesn't have
    is wrong use, as a webhook refuses to redeliver one."""
    failing = [True]

    def fragile(state: Any, event: Event) -> Any:
        if failing[0]:
            raise ValueError("no such item")
        return ship(state, event)

    process = Process("again", correlate("again"), fragile)
    with working(url, process, "w1"):
        append(client, "again", range(1), ["reserved"])
        while not list(client.processes.instances("again", status="parked")):
            pass
    retry = ("processes", "retry", "again", "again-0", "--event")
    assert client.processes.retry("again", "again-0", event="again:0:reserved") == 1
    assert lastbit(url, *retry, "again:0:reserved") == "the event is not parked: it is retrying\n"
    failing[0] = False
    with working(url, process, "w1"):
        while client.processes.get("again", "again-0").history[0].status != "handled":
            pass
    assert json.loads(lastbit(url, *retry, "again:0:reserved", "--json")) == {"retrying": 0, "status": "handled"}
    result = run_module("lastbit", *retry, "nosuch", "--url", url)
    assert (result.returncode, result.stdout) == (2, "")
    assert "--event: 'again-0' has no parked event with the id 'nosuch'" in result.stderr
