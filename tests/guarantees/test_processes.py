"""Process managers: exactly one command, once all needed events have come, in any order, repeated, despite crashes."""

from __future__ import annotations

import functools
import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed
from core.commits.combiner import Inline
from core.consumer_groups import groups
from core.consumer_groups.leases import Caller
from core.consumer_groups.positions import Fence
from core.janitor import needed
from core.processes import definitions, handling, inbox, outbox, retention, timers, waiting
from core.processes.inbox import Status
from core.processes.instances import Handled, Handling
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from lastbit.streams.partitions import partition_of
from lastbit.streams.snapshot import Snapshot
from tests.guarantees.drivers.rounds import race
from tests.guarantees.models.orders import (
    GROUP,
    NEEDED,
    PARTITIONS,
    PROCESS,
    Outcome,
    Worker,
    append,
    commands,
    everything,
    poisoned,
    ship,
    ship_again_and_again,
    ship_in_time,
)
from tests.guarantees.programs.dying import Mortals, mortals
from tests.mutants import mutant
from tests.support import plans, templates
from tests.support.clocks import Clock
from tests.support.exposition import Change
from tests.support.waits import freeze_before, waits_for_a_lock

ROUNDS = 40


@pytest.fixture(scope="module")
def dying() -> Iterator[Mortals]:
    with mortals() as server:
        yield server


def rows(service: Service, table: sa.Table) -> list[dict[str, Any]]:
    with service.database.engine.connect() as tx:
        return [dict(row._mapping) for row in tx.execute(sa.select(table))]


@mutant("no-inbox", "core.processes.inbox:LockedEvents.status", "status is not None", "False")
def test_events_in_any_order_with_repeats_issue_one_command(service: Service) -> None:
    """Each event twice, in every possible order: the command comes with the last new event, and once."""
    worker = Worker(service)
    orders = sorted(set(itertools.permutations(NEEDED * 2)))[::4]
    assert len({tuple(dict.fromkeys(order)) for order in orders}) == 6
    shipments = []
    for number, order in enumerate(orders):
        events = dict(zip(NEEDED, append(service, *((f"o{number}", type) for type in NEEDED)), strict=True))
        types: set[str] = set()
        for type in order:
            handled = worker.deliver(events[type])
            assert handled.repeated == (type in types)
            assert handled.status is Status.HANDLED
            complete = type not in types and {*types, type} == set(NEEDED)
            assert bool(handled.commands) == complete
            types.add(type)
        shipments.append((f"o{number}", "ship"))
    assert commands(service) == shipments


def test_a_worker_may_die_at_any_point_and_the_event_come_again(service: Service, dying: Mortals) -> None:
    """For each point of the handling of each event: redelivering the event has the same effect as a run without a
    crash."""
    worker = Worker(service)
    orders = itertools.cycle(itertools.permutations(NEEDED))
    url = service.database.url.render_as_string(hide_password=False)
    deaths: Counter[int] = Counter()
    instances = []
    # Every point of the completing event, and every third point of the others.
    for place, step in enumerate((3, 3, 1)):
        for point in itertools.count(place, step):
            instances.append(f"o{place}-{point}")
            events = append(service, *((instances[-1], type) for type in next(orders)))
            for event in events[:place]:
                worker.deliver(event)
            handling = asdict(worker.compute(instances[-1], events[place]))
            death = dying.run(url, {"verb": "deliver", "handling": handling}, point)
            handled = worker.deliver(events[place])
            # An uncommitted handling had no effect; redelivery of a committed one is a repeat.
            assert handled.repeated == (death is None or death.commits > 0)
            for event in [*events[place:], *events[:1]]:
                worker.deliver(event)
            if death is None:
                break
            deaths[place] += 1
    assert deaths[2] > 3
    assert min(deaths.values()) > 1
    assert commands(service) == [(instance, "ship") for instance in instances]


@mutant(
    "command-ids-are-random",
    "core.processes.outbox:command_id",
    "uuid.uuid5(NAMESPACE, json.dumps([process, instance, step]))",
    "uuid.uuid4()",
)
def test_a_step_is_issued_once_though_the_function_issues_it_again(service: Service) -> None:
    """If the function says that once is enough. A command's id consists of its instance and its step."""
    worker = Worker(service, function=ship_again_and_again)
    *first_events, last_event = append(service, *(("o1", type) for type in (*NEEDED, "paid")))
    first = [worker.deliver(event) for event in first_events][-1].commands
    [repeat] = worker.deliver(last_event).commands
    assert [(command.id, command.position, command.repeated) for command in first] == [
        (repeat.id, repeat.position, False)
    ]
    assert repeat.repeated
    assert commands(service) == [("o1", "ship")]


def report(state: Any, event: feed.Event) -> Outcome:
    """Issue one step for each event, though each means another report."""
    commands = [outbox.NewCommand(f"seen-{event.type}", "see"), outbox.NewCommand("report", "report")]
    return Outcome([*(state or []), event.type], commands, [timers.TimerChange(event.type, timedelta(days=1))])


@mutant(
    "a-step-of-another-event-is-a-repeat",
    "core.processes.outbox:Issues.issue",
    "issuer is not None and not command.once and (issuer != event or id in new)",
    "False and (issuer != event or id in new)",
)
@mutant("the-event-that-issues-a-command-is-not-stored", "core.processes.outbox:Issues.write", "event", "None")
@mutant(
    "a-refused-handling-counts-as-handled",
    "core.processes.handling:Handlings._judge",
    "issues = self._outbox.issue(handling.process, handling.instance, handling.event, handling.commands)",
    "self._inbox.record(key, handling.position, inbox.Status.HANDLED)\nissues = self._outbox.issue("
    "handling.process, handling.instance, handling.event, handling.commands)",
)
def test_a_step_that_another_event_issues_again_refuses_the_handling(service: Service) -> None:
    """Its command would be lost as a repeat. The error names both events, and nothing of the handling takes place; the
    event is parked with it. A function that was corrected can handle it."""
    worker = Worker(service, function=report)
    first, second = append(service, ("o1", "charged"), ("o1", "reserved"))
    worker.deliver(first)
    handling = worker.compute("o1", second)
    kept_tables = (tables.processes, tables.inbox, tables.outbox, tables.timers, tables.feed)
    before = [rows(service, table) for table in kept_tables]
    with pytest.raises(errors.StepReused) as refusal:
        service.processes.handle(handling)
    assert [rows(service, table) for table in kept_tables] == before
    assert refusal.value.place == "body.commands[1].step"
    for name in ("'report'", "'o1:charged'", "'o1:reserved'"):
        assert name in str(refusal.value)
    assert worker.deliver(first).repeated, "the event that issued it may come again"

    parked = replace(handling, error=str(refusal.value))
    assert [service.processes.handle(parked).status for _ in range(2)] == [Status.PARKED] * 2
    assert service.processes.retry_parked(PROCESS, "o1") == 1
    [repeat] = [event for event in everything(service) if event.type == f"retry.{PROCESS}"]
    with pytest.raises(errors.StepReused):
        worker.deliver(repeat)
    worker.function = lambda state, event: Outcome(state, [outbox.NewCommand("report", "report", once=True)])
    [command] = worker.deliver(repeat).commands
    assert (command.step, command.repeated) == ("report", True)
    assert worker.deliver(repeat).repeated
    assert commands(service) == [("o1", "see"), ("o1", "report")]


@mutant(
    "two-commands-of-one-event-are-one",
    "core.processes.outbox:Issues.issue",
    "issuer != event or id in new",
    "issuer != event",
)
def test_two_commands_of_one_event_have_steps_of_their_own(service: Service) -> None:
    """Unless once is enough; then the second is a repeat of the first."""
    worker = Worker(service)
    [event] = append(service, ("o1", "charged"))
    twice = [outbox.NewCommand("pay", "pay", "1"), outbox.NewCommand("pay", "pay", "2")]
    worker.function = lambda state, event: Outcome(1, twice)
    with pytest.raises(errors.StepReused, match=r"body.commands\[1\].step: .* event 'o1:charged' issues it twice"):
        worker.deliver(event)
    assert commands(service) == []
    assert not rows(service, tables.processes)
    twice[1] = replace(twice[1], once=True)
    assert [command.repeated for command in worker.deliver(event).commands] == [False, True]
    assert [command.data for command in service.processes.commands(0, 10).commands] == ["1"]


@mutant(
    "steps-of-earlier-releases-are-refused",
    "core.processes.outbox:Issues.issue",
    "issuer is not None",
    "id in {*new, *self._issuers}",
)
def test_a_step_that_an_earlier_release_issued_is_a_repeat(service: Service) -> None:
    """It didn't store the events that issued commands."""
    worker = Worker(service, function=report)
    first, second = append(service, ("o1", "charged"), ("o1", "reserved"))
    worker.deliver(first)
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.outbox).values(event_id=None))
    assert [(command.step, command.repeated) for command in worker.deliver(second).commands] == [
        ("seen-reserved", False),
        ("report", True),
    ]


@mutant(
    "commands-of-one-type-share-a-step",
    "core.processes.outbox:step_of",
    'f"{type} {number} {event}"',
    'f"{type} {event}"',
)
def test_a_command_without_a_step_has_one_of_its_own() -> None:
    """In an instance: whatever the lengths of its type and of its event's id, and whatever these look like."""
    names = ("a", "a:1", "1", "x" * 200)
    steps = [outbox.step_of(type, number, event) for type in names for number in (1, 2, 100) for event in names]
    steps += [outbox.step_of("x" * 200, number, "y" * length) for number in (1, 100) for length in (54, 255)]
    assert len(set(steps)) == len(steps)
    assert max(map(len, steps)) <= outbox.LONGEST_STEP
    assert outbox.step_of("x" * 200, 1, "y" * 255) == outbox.step_of("x" * 200, 1, "y" * 255)


def test_a_restart_from_an_old_floor_changes_nothing(service: Service) -> None:
    """Another worker reads all events again, from the beginning."""
    worker = Worker(service)
    events = append(service, *((f"o{number}", type) for number in range(10) for type in NEEDED))
    for event in events[:-1]:
        worker.deliver(event)
    before = rows(service, tables.processes)
    worker.leave()
    other = Worker(service, "w2")
    assert all(other.deliver(event).repeated for event in events[:-1])
    assert rows(service, tables.processes) == before
    assert not other.deliver(events[-1]).repeated
    assert Counter(commands(service)) == Counter({(f"o{number}", "ship"): 1 for number in range(10)})


@mutant(
    "the-inbox-is-pruned-to-the-highest-floor",
    "core.processes.definitions:floor",
    "sa.func.min(_positions.floor)",
    "sa.func.max(_positions.floor)",
)
@mutant("pruned-events-are-handled-again", "core.processes.inbox:LockedEvents.status", "position <= limit", "False")
def test_a_redelivered_event_that_was_pruned_is_a_repeat(service: Service) -> None:
    """The inbox is pruned up to the lowest floor and no further, and a replay from the beginning changes nothing."""
    worker = Worker(service)
    events = append(service, *((f"o{number}", type) for number in range(20) for type in NEEDED[:2]))
    for event in events:
        worker.deliver(event)
    assert definitions.prune(service.database, keep=0) == 0, "a partition has no floor yet"
    low = events[len(events) // 2].position
    for partition in range(PARTITIONS):
        worker.commit(partition, low if partition == 2 else events[-1].position)
    assert definitions.prune(service.database, keep=10) == low - 10
    assert definitions.prune(service.database, keep=0) == 10
    assert min(row["position"] for row in rows(service, tables.inbox)) == low + 1
    before = rows(service, tables.processes)
    assert all(worker.deliver(event).repeated for event in events)
    assert rows(service, tables.processes) == before
    for event in append(service, *((f"o{number}", NEEDED[2]) for number in range(20))):
        assert not worker.deliver(event).repeated
    assert Counter(commands(service)) == Counter({(f"o{number}", "ship"): 1 for number in range(20)})


@mutant(
    "an-event-that-the-feed-has-lost-is-handled",
    "core.processes.inbox:LockedEvents.status",
    "(position, key[2]) not in self._present",
    "False",
)
@mutant(
    "an-event-is-handled-in-place-of-the-one-at-its-position",
    "core.processes.inbox:LockedEvents.status",
    "(position, key[2]) not in self._present",
    "position not in {place for place, _ in self._present}",
)
def test_an_event_that_the_feed_has_lost_has_no_effect(service: Service) -> None:
    """A failover, or a restore, loses the end of the feed while a worker holds its events. Their positions are beyond
    the end at first, and then those of other events. What is appended again is handled at its new position."""
    worker = Worker(service)
    kept, *lost = append(service, *(("o1", type) for type in NEEDED))
    worker.deliver(kept)
    handlings = [worker.compute("o1", event) for event in lost]
    with service.database.engine.begin() as tx:
        tx.execute(sa.delete(tables.feed).where(tables.feed.c.position > kept.position))
        tx.execute(sa.update(tables.feed_head).values(position=kept.position))
    before = rows(service, tables.processes), rows(service, tables.inbox)

    def assert_refused() -> None:
        for lost_handling in handlings:
            reason = f"'{lost_handling.event}' is not at {lost_handling.position}"
            for outcome in (lost_handling, replace(lost_handling, error="broken")):
                with pytest.raises(errors.InvalidRequest, match=reason):
                    service.processes.handle(outcome)
        assert (rows(service, tables.processes), rows(service, tables.inbox)) == before
        assert commands(service) == []

    assert_refused()
    others = append(service, ("o2", "charged"), ("o3", "charged"))
    assert [event.position for event in others] == [event.position for event in lost]
    assert_refused()
    assert worker.deliver(kept).repeated
    for event in [*others, *append(service, *(("o1", type) for type in NEEDED[1:]))]:
        assert not worker.deliver(event).repeated
    assert commands(service) == [("o1", "ship")]


@mutant("events-are-trimmed-before-they-are-handled", "core.janitor:needed", "definitions.needed(tx)", "None")
def test_a_valid_event_is_not_trimmed_before_it_is_handled(server_database: Database) -> None:
    """The janitor trims all that the floors allow, while the partitions that are ahead of this one move on."""
    service = Service(server_database, combiner=Inline)
    worker = Worker(service)
    events = append(service, *((f"o{number}", "charged") for number in range(ROUNDS)))

    def trim(service_: Service, number: int) -> int:
        place = events[number].position
        for partition in range(PARTITIONS):
            worker_floor = place - 1 if partition == partition_of(f"o{number}", PARTITIONS) else place
            service_.consumer_groups.commit(
                Fence(GROUP, partition, worker.name, worker.epochs[partition]), Snapshot(worker_floor, worker_floor)
            )
        return feed.trim(service_.database, timedelta(0), needed=needed)

    def check(number: int, handled: Handled | errors.CoreError, trimmed: int | errors.CoreError) -> None:
        assert isinstance(handled, Handled), handled
        assert not isinstance(trimmed, errors.CoreError), trimmed

    race(
        service.database,
        ROUNDS,
        lambda service_, number: service_.processes.handle(
            Handling(
                *(PROCESS, f"o{number}", events[number].id, events[number].position, worker.name),
                *(worker.epochs[partition_of(f"o{number}", PARTITIONS)], 0, "1"),
            )
        ),
        trim,
        check=check,
    )
    assert everything(service)[0].position >= events[-1].position - 1, "nothing was trimmed"


@mutant(
    "pruning-is-looked-up-before-the-inbox",
    "core.processes.inbox:LockedEvents.__init__",
    "dialect = dialects.of(tx)",
    """
dialect = dialects.of(tx)
before = pipeline.query("SELECT name, pruned FROM process_definitions")
""",
    (
        "self._statuses: dict[Key, Status] = {}",
        """
self._statuses: dict[Key, Status] = {}
self._limits = before
""",
    ),
)
def test_a_row_that_is_pruned_while_its_event_comes_again_is_not_missed(server_database: Database) -> None:
    """Another session removes the event's row while a replay waits for the row's lock."""
    service = Service(server_database, combiner=Inline)
    worker = Worker(service)
    [event] = append(service, ("o1", "charged"))
    worker.deliver(event)
    handling = worker.compute("o1", event)
    replaying = Service(Database(server_database.url.render_as_string(hide_password=False)), combiner=Inline)
    inbox_rows, definition_rows = tables.inbox, tables.process_definitions
    with ThreadPoolExecutor(1) as threads, service.database.engine.connect() as pruning:
        pruning.execute(sa.select(inbox_rows).with_for_update())
        replay = threads.submit(replaying.processes.handle, handling)
        assert waits_for_a_lock(service.database, replay)
        with service.database.engine.begin() as tx:
            tx.execute(sa.update(definition_rows).values(pruned=event.position))
        pruning.execute(sa.delete(inbox_rows))
        pruning.commit()
        assert replay.result(60).repeated
    replaying.stop()
    assert not rows(service, tables.inbox)


def test_a_stale_worker_in_the_middle_of_its_transaction_is_refused(server_database: Database) -> None:
    """It computes and starts to write; before its fence, another worker takes over its partitions."""
    service = Service(server_database, combiner=Inline)
    stale = Worker(service)
    [event] = append(service, ("o1", "charged"))
    is_frozen, wake = threading.Event(), threading.Event()
    zombie = Service(Database(server_database.url.render_as_string(hide_password=False)), combiner=Inline)
    answers: list[Any] = []

    def freeze(connection: object, cursor: object, text: str, *_: object) -> None:
        if "positions" in text and not is_frozen.is_set():
            is_frozen.set()
            wake.wait(60)

    sa.event.listen(zombie.database.engine, "before_cursor_execute", freeze)
    handling = stale.compute("o1", event)

    def write() -> None:
        try:
            answers.append(zombie.processes.handle(handling))
        except errors.CoreError as error:
            answers.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert is_frozen.wait(60)
    stale.leave()
    successor = Worker(service, "w2")
    wake.set()
    thread.join()
    zombie.stop()
    assert isinstance(answers[0], errors.StaleEpoch)
    assert not rows(service, tables.processes)
    assert not successor.deliver(event).repeated


@mutant(
    "a-fence-is-a-plain-read",
    "core.consumer_groups.positions:lock",
    "f\"SELECT group_name, partition_no, owner, epoch FROM {dialect.by_primary_key('positions')} WHERE "
    "{among(tx, _KEY, part)} ORDER BY {', '.join(_KEY)}{dialect.for_update()}\"",
    "f\"SELECT group_name, partition_no, owner, epoch FROM {dialect.by_primary_key('positions')} WHERE "
    "{among(tx, _KEY, part)} ORDER BY {', '.join(_KEY)}\"",
)
def test_no_worker_takes_over_in_the_middle_of_anothers_transaction(server_database: Database) -> None:
    """After its fence, it holds its partition until its commit; the next owner then sees what it has written."""
    service = Service(server_database, combiner=Inline)
    worker = Worker(service)
    [event] = append(service, ("o1", "charged"))
    slow = Service(Database(server_database.url.render_as_string(hide_password=False)), combiner=Inline)
    is_fenced, wake = freeze_before(slow.database, "INSERT INTO processes")
    handling = worker.compute("o1", event)

    def succeed() -> Worker:
        worker.leave()
        return Worker(service, "w2")

    with ThreadPoolExecutor(2) as threads:
        write = threads.submit(slow.processes.handle, handling)
        assert is_fenced.wait(60)
        takeover = threads.submit(succeed)
        has_waited = waits_for_a_lock(service.database, takeover)
        wake.set()
        assert not write.result(60).repeated
        successor = takeover.result(60)
    slow.stop()
    assert has_waited
    assert successor.deliver(event).repeated


@mutant(
    "a-retry-does-not-hold-its-partition",
    "core.processes.instances:retry",
    "positions.hold(tx, definition.group, partition_of(instance, definition.partitions))",
    "pass",
)
def test_no_event_is_parked_in_the_middle_of_a_retry(server_database: Database) -> None:
    """Otherwise it would miss the retry, although its parking precedes the retry's events in the feed's order."""
    service = Service(server_database, combiner=Inline)
    worker = Worker(service, function=poisoned)
    first, second = append(service, ("o1", "reserved"), ("o1", "charged"))
    assert worker.deliver(first).status is Status.PARKED
    handling = replace(worker.compute("o1", second), error="ValueError('no such account')")
    slow = Service(Database(server_database.url.render_as_string(hide_password=False)), combiner=Inline)
    has_read, wake = freeze_before(slow.database, "UPDATE inbox")
    with ThreadPoolExecutor(2) as threads:
        retry = threads.submit(slow.processes.retry_parked, PROCESS, "o1")
        assert has_read.wait(60)
        parking = threads.submit(service.processes.handle, handling)
        has_waited = waits_for_a_lock(service.database, parking)
        wake.set()
        assert retry.result(60) == 1
        parked = parking.result(60)
        assert (parked.status, parked.repeated) == (Status.PARKED, False)
    slow.stop()
    assert has_waited


@mutant(
    "no-fence",
    "core.processes.handling:Handlings.judge",
    "refusal is not None",
    "False",
)
def test_a_stale_workers_every_write_is_refused(service: Service) -> None:
    """Even if everything else about it is right."""
    stale = Worker(service)
    events = append(service, *(("o1", type) for type in NEEDED))
    stale.leave()
    worker = Worker(service, "w2")
    for event in events:
        with pytest.raises(errors.StaleEpoch):
            stale.deliver(event)
        assert not worker.deliver(event).repeated
        with pytest.raises(errors.StaleEpoch):
            stale.deliver(event)
    assert commands(service) == [("o1", "ship")]


@mutant("versions-are-ignored", "core.processes.handling:Handlings._judge", "handling.version != version", "False")
def test_a_state_that_was_computed_from_an_old_one_is_refused(service: Service) -> None:
    """Both events were computed from the same version; the second would undo the first."""
    worker = Worker(service)
    events = append(service, *(("o1", type) for type in NEEDED))
    worker.deliver(events[0])
    first_handling, other = (worker.compute("o1", event) for event in events[1:])
    service.processes.handle(first_handling)
    with pytest.raises(errors.VersionConflict) as exception:
        service.processes.handle(other)
    assert exception.value.version == 2
    assert worker.deliver(events[2]).commands
    assert commands(service) == [("o1", "ship")]


@mutant("no-tombstone", "core.processes.handling:Handlings._judge", "instance.status is Status.FINISHED", "False")
def test_a_late_event_does_not_restart_a_finished_instance(service: Service) -> None:
    """The tombstone receives events after the end and reports them as late, each time."""
    worker = Worker(service)
    for event in append(service, *(("o1", type) for type in NEEDED)):
        worker.deliver(event)
    before = rows(service, tables.processes)
    repeats = service.feed.append([feed.NewEvent(f"again:{type}", type, "o1") for type in NEEDED])
    late = [event for event in everything(service) if event.position in {repeat.position for repeat in repeats}]
    for event in late:
        assert worker.deliver(event).status is Status.LATE
    assert [worker.deliver(event).repeated for event in late] == [True] * 3
    assert rows(service, tables.processes) == before
    assert commands(service) == [("o1", "ship")]


def test_one_event_goes_to_many_instances_each_once(service: Service) -> None:
    """Each instance decides separately whether the event is a repeat."""
    worker = Worker(service)
    orders = [f"o{number}" for number in range(8)]
    [arrival] = append(service, ("truck", "reserved"))
    for instance in orders[:5]:
        assert not worker.deliver(arrival, instance).repeated
    assert [worker.deliver(arrival, instance).repeated for instance in orders] == [True] * 5 + [False] * 3
    for event in append(service, *((order, type) for order in orders for type in ("charged", "complete"))):
        worker.deliver(event)
    assert Counter(commands(service)) == Counter({(order, "ship"): 1 for order in orders})


def test_a_poisoned_event_is_parked_while_others_go_on_and_then_retried(service: Service) -> None:
    """Its instance handles other events, and so do other instances. With corrected code a retry completes it, though
    the feed no longer has the event and the inbox was pruned."""
    worker = Worker(service, function=poisoned)
    events = append(service, *((order, type) for order in ("o1", "o2") for type in ("reserved", "charged", "complete")))
    assert [worker.deliver(event).status for event in events] == [
        *(Status.PARKED, Status.HANDLED, Status.HANDLED),
        *(Status.PARKED, Status.HANDLED, Status.HANDLED),
    ]
    assert [(worker.deliver(events[0]).status, worker.deliver(events[0]).repeated)] == [(Status.PARKED, True)]
    assert commands(service) == []
    [parked] = [entry for entry in service.processes.instance(PROCESS, "o1").history if entry.status is Status.PARKED]
    assert (parked.event, parked.error) == ("o1:reserved", "ValueError('no such item')")
    for partition in range(PARTITIONS):
        worker.commit(partition, events[-1].position)
    definitions.prune(service.database, keep=0)
    assert feed.trim(service.database, timedelta(0), needed=needed) == len(events)

    assert service.processes.retry_parked(PROCESS, "o1") == 1
    assert service.processes.retry_parked(PROCESS, "o1") == 0
    [repeat] = everything(service)
    assert worker.deliver(repeat).status is Status.PARKED, "it must fail again"
    assert service.processes.retry_parked(PROCESS, "o1", "o1:reserved") == 1
    worker.function = ship
    assert worker.deliver(repeat).commands, "redelivery of the first retry's event serves as the second retry"
    repeat = everything(service)[-2]
    assert repeat.type == f"retry.{PROCESS}"
    assert worker.deliver(repeat).repeated
    with service.database.engine.connect() as tx:
        assert inbox.parked(tx, PROCESS, ["o1", "o2"]) == {"o2": 1}
    assert [command.instance for command in service.processes.commands(0, 10).commands] == ["o1"]


def handle_all(service: Service, worker: Worker) -> None:
    """Handle all events up to the feed's end, in all partitions."""
    events = everything(service)
    for event in events:
        if event.type in NEEDED:
            worker.deliver(event)
    for partition in range(PARTITIONS):
        worker.commit(partition, everything(service)[-1].position)


def trim(service: Service) -> None:
    feed.trim(service.database, timedelta(0), needed=needed)


KEEP = timedelta(days=30)
DAY = 86_400


@mutant(
    "commands-are-forgotten-while-the-feed-has-them",
    "core.processes.retention:_remove",
    "query.where(*has_ended, *scanned, ~unsettled, ~in_the_feed)",
    "query.where(*has_ended, *scanned, ~unsettled)",
)
class Collector:
    """Collects the types of an instance's events; those that are broken fail."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.failures: Counter[str] = Counter()

    def __call__(self, state: Any, event: feed.Event) -> Outcome:
        if event.type in self.broken:
            self.failures[event.type] += 1
            raise ValueError(event.type)
        return Outcome([*(state or []), event.type])


def statuses(service: Service, instance: str) -> list[tuple[str, str | None]]:
    """Status and error of the instance's events, in the feed's order."""
    history = service.processes.instance(PROCESS, instance).history
    return [(entry.status, entry.error) for entry in sorted(history, key=lambda entry: entry.position)]


@mutant("events-overtake", "core.processes.waiting:Waiting.is_behind", "other.position < position", "False")
@mutant(
    "an-event-that-comes-again-blocks-nothing",
    "core.processes.waiting:Waiting.__init__",
    'f"{dialect.literal(Status.PARKED)}, {dialect.literal(Status.RETRYING)}"',
    'f"{dialect.literal(Status.PARKED)}"',
)
@mutant(
    "events-wait-for-ever",
    "core.processes.waiting:Waiting.settle",
    "in_order[:RELEASED]",
    "in_order[:0]",
)
@mutant(
    "events-behind-another-failure-come-again",
    "core.processes.waiting:Waiting.settle",
    "not candidate.waits",
    "False",
)
@mutant(
    "released-events-stay-parked",
    "core.processes.waiting:Waiting.write",
    'self._pipeline.later(f"UPDATE inbox SET status = {status} WHERE {condition}")',
    "None",
)
def test_an_instance_of_a_strict_process_waits_behind_its_parked_event(service: Service) -> None:
    """Later events wait, and come in order once it is over; another failure among them stops those behind it. Other
    instances go on."""
    collector = Collector()
    collector.broken = {"b", "d"}
    worker = Worker(service, function=collector, strict=True)
    events = append(service, *(("o1", type) for type in "abcdef"), ("o2", "a"))
    for event in events:
        worker.deliver(event)
    waits, handled = ("parked", None), ("handled", None)
    failed = {type: ("parked", f"ValueError('{type}')") for type in "bd"}
    assert statuses(service, "o1") == [handled, failed["b"], waits, waits, waits, waits]
    assert statuses(service, "o2") == [handled]
    position = everything(service)[-1].position

    def deliver_the_rest() -> None:
        nonlocal position
        while new := [event for event in everything(service) if event.position > position]:
            for event in new:
                worker.deliver(event)
                position = event.position

    collector.broken.remove("b")
    service.processes.retry_parked(PROCESS, "o1", events[1].id)
    [late] = append(service, ("o1", "g"))  # it is in the feed before those that are released
    deliver_the_rest()
    assert statuses(service, "o1") == [handled, handled, handled, failed["d"], waits, waits, waits]
    service.processes.retry_parked(PROCESS, "o1", late.id)  # nothing overtakes by being retried alone
    deliver_the_rest()
    assert statuses(service, "o1")[-4:] == [failed["d"], waits, waits, waits]
    assert collector.failures["d"] == 2  # behind b, and as b was over: it doesn't come again with those behind it
    collector.broken.clear()
    service.processes.retry_parked(PROCESS, "o1")
    deliver_the_rest()
    assert statuses(service, "o1") == [handled] * 7
    assert json.loads(service.processes.instance(PROCESS, "o1").instance.state or "") == list("abcdefg")


@mutant("a-release-is-unbounded", "core.processes.waiting:Waiting.settle", "in_order[:RELEASED]", "in_order")
def test_many_events_that_wait_come_again_in_parts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of each part releases the next part."""
    monkeypatch.setattr(waiting, "RELEASED", 3)
    collector = Collector()
    collector.broken = {"n0"}
    worker = Worker(service, function=collector, strict=True)
    events = append(service, *(("o1", f"n{number}") for number in range(11)))
    for event in events:
        worker.deliver(event)
    collector.broken.clear()
    position = events[-1].position
    service.processes.retry_parked(PROCESS, "o1", events[0].id)
    parts = []
    while new := [event for event in everything(service) if event.position > position]:
        parts.append(len(new))
        for event in new:
            worker.deliver(event)
        position = new[-1].position
    assert parts == [1, 3, 3, 3, 1]
    assert json.loads(service.processes.instance(PROCESS, "o1").instance.state or "") == [e.type for e in events]


@pytest.mark.parametrize("seed", range(6))
def test_a_strict_process_handles_each_instance_in_the_feeds_order(service: Service, seed: int) -> None:
    """Whatever fails, is retried, all or alone, and comes again."""
    chance = random.Random(seed)
    collector = Collector()
    worker = Worker(service, function=collector, strict=True)
    position = 0
    types: dict[str, list[str]] = {"o1": [], "o2": []}

    def deliver(count: int) -> None:
        nonlocal position
        for event in [event for event in everything(service) if event.position > position][:count]:
            worker.deliver(event)
            position = event.position

    for number in range(30):
        instance = chance.choice(list(types))
        types[instance].append(f"n{number}")
        append(service, (instance, f"n{number}"))
        if chance.random() < 0.3:
            collector.broken.add(f"n{number}")
        deliver(chance.randrange(3))
        if chance.random() < 0.2:
            position = max(0, position - chance.randrange(6))  # the worker reads again from an older floor
        if chance.random() < 0.3:
            collector.broken -= set(chance.sample(sorted(collector.broken), len(collector.broken) // 2))
        if chance.random() < 0.3:
            parked = [row for row in rows(service, tables.inbox) if row["status"] == Status.PARKED]
            if parked:
                row = chance.choice(parked)
                service.processes.retry_parked(PROCESS, row["instance"], chance.choice([None, row["event_id"]]))
    collector.broken.clear()
    deliver(1000)
    while unsettled := [row for row in rows(service, tables.inbox) if row["status"] != Status.HANDLED]:
        deliver(1000)
        service.processes.retry_parked(PROCESS, unsettled[0]["instance"])
    for instance, expected_types in types.items():
        assert json.loads(service.processes.instance(PROCESS, instance).instance.state or "[]") == expected_types


def test_an_instance_that_ended_long_ago_is_removed_with_its_commands(service: Service) -> None:
    """Not before its time; a running instance and its commands stay, and a redelivered event is a repeat."""
    clock = Clock(service.database)
    worker = Worker(service, function=ship_again_and_again)
    handled = append(service, *(("running", type) for type in NEEDED))
    handle_all(service, worker)
    worker.function = ship
    handled += append(service, *((f"o{number}", type) for number in range(3) for type in NEEDED))
    handle_all(service, worker)
    clock.go(30 * DAY)
    assert retention.forget(service.database, KEEP) == 0, "the period isn't over"
    clock.go(1)
    assert retention.forget(service.database, KEEP) == 0, "their commands are still in the feed"
    trim(service)
    assert retention.forget(service.database, KEEP) == 3
    assert [row["instance"] for row in rows(service, tables.processes)] == ["running"]
    assert [row["instance"] for row in rows(service, tables.outbox)] == ["running"]
    for with_pruning in (False, True):
        if with_pruning:
            definitions.prune(service.database, keep=0)
            assert not rows(service, tables.inbox)
        assert all(worker.deliver(event).repeated for event in handled)
    assert [row["instance"] for row in rows(service, tables.processes)] == ["running"]


@mutant(
    "the-janitor-looks-for-one-chunk-among-some-finished-instances",
    "core.processes.retention:forget",
    "database.write_in_chunks(_remove, process.name, ended_by, start, end)",
    "database.write(_remove, process.name, ended_by, start, end)",
)
def test_old_instances_are_found_among_any_number_of_finished_ones(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole scans have none, one and two of them."""
    monkeypatch.setattr(retention, "CHUNK", 1)
    monkeypatch.setattr(retention, "SCAN", 2)
    clock = Clock(service.database)
    worker = Worker(service)
    names = [f"o{number}" for number in range(9)]
    old = {"o2", "o3", "o7", "o8"}
    append(service, *((name, type) for name in names if name in old for type in NEEDED))
    handle_all(service, worker)
    clock.go(31 * DAY)
    append(service, *((name, type) for name in names if name not in old for type in NEEDED))
    handle_all(service, worker)
    trim(service)
    assert retention.forget(service.database, KEEP) == len(old)
    assert {row["instance"] for row in rows(service, tables.processes)} == set(names) - old


@mutant(
    "a-tombstone-goes-before-its-late-events",
    "core.processes.retention:_handled_until",
    "tx.scalar(first) or tx.scalar(sa.select(tables.utc_now()))",
    "tx.scalar(sa.select(tables.utc_now()))",
)
def test_a_tombstone_stays_for_late_events_that_are_not_handled_yet(service: Service) -> None:
    """Even if no worker runs for a long time: an event that came within `keep` of the end is late whenever it is
    handled."""
    clock = Clock(service.database)
    worker = Worker(service)
    append(service, *(("o1", type) for type in NEEDED))
    handle_all(service, worker)
    clock.go(30 * DAY - 1)
    service.feed.append([feed.NewEvent("again", "charged", "o1")])
    late = everything(service)[-1]
    clock.go(300 * DAY)
    trim(service)
    assert retention.forget(service.database, KEEP) == 0
    assert worker.deliver(late).status is Status.LATE
    handle_all(service, worker)
    assert retention.forget(service.database, KEEP) == 1
    assert worker.deliver(late).repeated
    assert not rows(service, tables.processes)


@mutant(
    "the-janitor-reads-the-clock-while-events-are-appended",
    "core.processes.retention:_handled_until",
    "feed.hold(tx)",
    "pass",
)
def test_a_late_event_is_not_appended_while_the_janitor_reads_the_clock(server_database: Database) -> None:
    """Its time would be before the janitor's, but the janitor wouldn't see it."""
    service = Service(server_database, combiner=Inline)
    worker = Worker(service)
    append(service, *(("o1", type) for type in NEEDED))
    handle_all(service, worker)
    with Database(service.database.url.render_as_string(hide_password=False)) as janitor, ThreadPoolExecutor(2) as pool:
        has_looked, wake = freeze_before(janitor, f"SELECT {janitor.dialect.now}")
        removal = pool.submit(retention.forget, janitor, KEEP)
        assert has_looked.wait(60)
        late = pool.submit(append, service, ("o1", "charged"))
        has_waited = waits_for_a_lock(service.database, late)
        wake.set()
        assert removal.result(60) == 0
        assert [event.key for event in late.result(60)] == ["o1"]
    assert has_waited


@mutant(
    "the-janitor-removes-what-it-has-chosen",
    "core.processes.retention:_remove",
    "tx.scalars(locking).all() if candidates else []",
    "candidates",
)
@mutant(
    "the-janitor-locks-what-it-has-chosen-and-does-not-look-again",
    "core.processes.retention:_remove",
    "query.where(_processes.instance.in_(candidates), *has_ended)",
    "query.where(_processes.instance.in_(candidates), _processes.name == name)",
)
def test_two_janitors_spare_an_instance_that_was_started_again(server_database: Database) -> None:
    """One has chosen what to remove; until it goes on, the other removes it, and a late event starts it again."""
    service = Service(server_database, combiner=Inline)
    clock = Clock(service.database)
    worker = Worker(service)
    append(service, *(("o1", type) for type in NEEDED))
    handle_all(service, worker)
    clock.go(31 * DAY)
    trim(service)
    url = service.database.url.render_as_string(hide_password=False)
    with Database(url) as janitor, ThreadPoolExecutor(1) as pool:
        locking = "SELECT processes.instance \nFROM processes \nWHERE processes.instance IN"
        has_chosen, wake = freeze_before(janitor, locking, "DELETE FROM processes")
        removal = pool.submit(retention.forget, janitor, KEEP)
        assert has_chosen.wait(60)
        assert retention.forget(service.database, KEEP) == 1
        worker.function = ship_again_and_again
        service.feed.append([feed.NewEvent(f"late-{type}", type, "o1") for type in NEEDED])
        handle_all(service, worker)
        wake.set()
        assert removal.result(60) == 0
    assert [row["instance"] for row in rows(service, tables.processes)] == ["o1"]
    assert [row["instance"] for row in rows(service, tables.outbox)] == ["o1"]


@mutant(
    "an-instance-is-forgotten-with-its-parked-events",
    "core.processes.retention:_remove",
    "query.where(*has_ended, *scanned, ~unsettled, ~in_the_feed)",
    "query.where(*has_ended, *scanned, ~in_the_feed)",
)
def test_an_instance_with_parked_events_is_not_removed(service: Service) -> None:
    """Until they are handled again; that they are late by then also settles them."""
    clock = Clock(service.database)
    worker = Worker(service, function=poisoned)
    append(service, ("o1", "reserved"), ("o1", "charged"))
    handle_all(service, worker)
    worker.function = lambda state, event: Outcome(state, finish=True)
    append(service, ("o1", "complete"))
    handle_all(service, worker)
    clock.go(31 * DAY)
    trim(service)
    assert retention.forget(service.database, KEEP) == 0
    service.processes.retry_parked(PROCESS, "o1")
    repeat = everything(service)[-1]
    assert worker.deliver(repeat).status is Status.LATE
    handle_all(service, worker)
    assert retention.forget(service.database, KEEP) == 1


@mutant("removed-commands-are-skipped-silently", "core.processes.outbox:read", "0 < after < trimmed", "False")
def test_commands_can_be_pulled_while_the_feed_has_their_events(service: Service) -> None:
    """A reader that was away for longer gets an error; reading from 0 returns all kept commands."""
    worker = Worker(service, function=ship_again_and_again)
    append(service, *((f"o{number}", type) for number in range(2) for type in NEEDED))
    handle_all(service, worker)
    [first, second] = service.processes.commands(0, 10).commands
    trim(service)
    with pytest.raises(errors.PositionTrimmed) as exception:
        service.processes.commands(first.position, 10)
    append(service, *(("o2", type) for type in NEEDED))
    handle_all(service, worker)
    assert exception.value.trimmed == second.position
    for after in (0, second.position):
        assert [command.instance for command in service.processes.commands(after, 10).commands] == ["o2"]


@mutant(
    "timers-fire-again",
    "core.processes.timers:_fire",
    "tx.execute(sa.delete(tables.timers).where(*conditions))",
    "pass",
)
def test_a_time_out_fires_once_when_it_is_due_and_not_before(service: Service) -> None:
    """It fires as an event of the feed, with a stable id; then the instance handles it."""
    clock = Clock(service.database)
    worker = Worker(service, function=ship_in_time)
    [event] = append(service, ("o1", "charged"))
    worker.deliver(event)
    clock.go(59.9)
    assert timers.fire(service.database) == 0
    clock.go(0.1)
    assert timers.fire(service.database) == 1
    assert timers.fire(service.database) == 0
    timer_event = everything(service)[-1]
    assert (timer_event.type, timer_event.key, json.loads(timer_event.data or "")["timer"]) == (
        f"timer.{PROCESS}",
        "o1",
        "payment",
    )
    assert [worker.deliver(timer_event).repeated for _ in range(2)] == [False, True]
    assert commands(service) == [("o1", "cancel")]


@mutant(
    "timers-outlive-their-instance",
    "core.processes.handling:Handlings._judge",
    "self._timers.cancel_all(handling.process, handling.instance)",
    "pass",
)
def test_a_timer_is_replaced_and_cancelled_by_its_name(service: Service) -> None:
    """Only the latest request fires, and nothing fires after the end."""
    clock = Clock(service.database)
    worker = Worker(service)
    timer_lists: list[list[timers.TimerChange]] = [
        [timers.TimerChange("a", timedelta(seconds=10)), timers.TimerChange("b", timedelta(seconds=10), '"kept"')],
        [timers.TimerChange("a", timedelta(seconds=30))],
        [timers.TimerChange("a", None)],
    ]
    worker.function = lambda state, event: Outcome(None, [], timer_lists.pop(0))
    first, second, third = append(service, *(("o1", type) for type in NEEDED))
    worker.deliver(first)
    worker.deliver(second)
    clock.go(10)
    assert timers.fire(service.database) == 1
    assert json.loads(everything(service)[-1].data or "") == {
        "process": PROCESS,
        "instance": "o1",
        "timer": "b",
        "data": "kept",
    }
    worker.deliver(third)
    clock.go(60)
    assert timers.fire(service.database) == 0
    worker.function = ship_in_time
    worker.deliver(append(service, ("o2", "charged"))[0])
    assert [timer.timer for timer in service.processes.instance(PROCESS, "o2").timers] == ["payment"]
    for event in append(service, ("o2", "reserved"), ("o2", "complete")):
        worker.deliver(event)
    assert not rows(service, tables.timers)


def test_either_the_time_out_or_the_completing_event_wins(server_database: Database) -> None:
    """Both at once, in either order: the order is either shipped or cancelled, and the loser is late."""
    service = Service(server_database, combiner=Inline)
    worker = Worker(service, function=ship_in_time)
    events = append(service, *((f"o{number}", type) for number in range(ROUNDS) for type in NEEDED))
    for event in events:
        if event.type != NEEDED[2]:
            worker.deliver(event)
    completing_events = [event for event in events if event.type == NEEDED[2]]
    timer_events: list[feed.Event] = []

    def fire(other: Service) -> None:
        timers.fire(other.database)
        page = other.feed.read(
            timer_events[-1].position if timer_events else events[-1].position, 10, types=[f"timer.{PROCESS}"]
        )
        timer_events.extend(page.events)

    def prepare(number: int) -> None:
        """Make the round's timer due; in every other round it fires at once and only has to be handled."""
        with server_database.engine.begin() as tx:
            condition = tables.timers.c.instance == f"o{number}"
            tx.execute(sa.update(tables.timers).values(due_at=tables.utc_now()).where(condition))
        if number % 2:
            fire(service)

    def as_worker(other: Service) -> Worker:
        twin = object.__new__(Worker)
        twin.__dict__.update(worker.__dict__)
        twin.service = other
        return twin

    def time_out(other: Service, number: int) -> Status | None:
        if not number % 2:
            fire(other)
        return (
            as_worker(other).deliver(timer_events[-1]).status
            if timer_events and timer_events[-1].key == f"o{number}"
            else None
        )

    def complete(other: Service, number: int) -> Status:
        return as_worker(other).deliver(completing_events[number]).status

    outcomes: Counter[str] = Counter()

    def check(number: int, timed_out: Status | None, completed: Status) -> None:
        issued = [
            command.type for command in service.processes.commands(0, 1000).commands if command.instance == f"o{number}"
        ]
        assert len(issued) == 1
        assert completed is (Status.HANDLED if issued == ["ship"] else Status.LATE)
        assert timed_out in (None, Status.HANDLED if issued == ["cancel"] else Status.LATE)
        outcomes[issued[0]] += 1
        prepare(number + 1)

    prepare(0)
    race(server_database, ROUNDS, time_out, complete, check=check)
    assert len(commands(service)) == ROUNDS
    assert len(outcomes) == 2, "only one of them ever won"


@mutant(
    "timers-fire-from-a-plain-look",
    "core.processes.timers:_fire",
    "sa.select(_timers.token, _timers.data).where(*conditions, _timers.due_at <= tables.utc_now("
    ")).with_for_update(skip_locked=True)",
    "sa.select(_timers.token, _timers.data).where(*conditions, _timers.due_at <= tables.utc_now())",
)
def test_two_dispatchers_fire_each_timer_once(server_database: Database) -> None:
    """On separate sessions, at the same time. Neither of them has to begin again because the other has appended the
    event already."""
    conflicts = Change("lastbit_retries_total", cause="conflict")
    service = Service(server_database, combiner=Inline)
    worker = Worker(service)
    worker.function = lambda state, event: Outcome(
        None, [], [timers.TimerChange(f"t{n}", timedelta(0)) for n in range(3)]
    )
    orders = append(service, *((f"o{number}", "charged") for number in range(ROUNDS)))

    def check(number: int, first: int, other: int) -> None:
        assert first + other == (3 if number else 0)
        worker.deliver(orders[number])

    race(
        server_database,
        ROUNDS,
        lambda other, number: timers.fire(other.database),
        lambda other, number: timers.fire(other.database),
        check=check,
    )
    timer_counts = Counter(
        (e.key, json.loads(e.data or "")["timer"]) for e in everything(service) if e.type[:6] == "timer."
    )
    assert set(timer_counts.values()) == {1}
    assert len(timer_counts) == 3 * (ROUNDS - 1)
    assert not conflicts()


def test_commands_have_positions_in_commit_order_whatever_the_writers_do(server_database: Database) -> None:
    """A reader that follows the commands sees each of them, though several sessions issue them concurrently."""
    service = Service(server_database, combiner=Inline)
    worker = Worker(service)
    worker.function = lambda state, event: Outcome(None, [outbox.NewCommand("go", "go")])
    events = append(service, *((f"o{number}", "charged") for number in range(3 * ROUNDS)))
    handlings = [worker.compute(event.key or "", event) for event in events]
    ids: list[str] = []
    after = 0

    def check(number: int, *answers: Any) -> None:
        nonlocal after
        assert not [answer for answer in answers if isinstance(answer, Exception)]
        page = service.processes.commands(after, 1000)
        ids.extend(command.instance for command in page.commands)
        after = page.next

    def follow(other: Service, number: int) -> None:
        nonlocal after
        page = other.processes.commands(after, 1000)
        ids.extend(command.instance for command in page.commands)
        after = page.next

    def issue(place: int) -> Any:
        return lambda other, number: other.processes.handle(handlings[3 * number + place])

    race(server_database, ROUNDS, issue(0), issue(1), issue(2), follow, check=check)
    assert Counter(ids) == Counter({f"o{number}": 1 for number in range(3 * ROUNDS)})


@mutant("an-event-may-not-issue-its-step-again", "core.processes.outbox:Issues.issue", "issuer != event", "True")
def test_a_process_that_is_deleted_and_defined_again_starts_over_and_issues_nothing_twice(service: Service) -> None:
    """Its instances are gone; commands that it had issued stay issued."""
    worker = Worker(service)
    events = append(service, *(("o1", type) for type in NEEDED))
    for event in events:
        worker.deliver(event)
    with pytest.raises(errors.ConsumerGroupInUse):
        service.processes.delete(PROCESS)
    worker.leave()
    service.processes.delete(PROCESS)
    assert not any(rows(service, table) for table in (tables.processes, tables.inbox, tables.timers))
    with pytest.raises(errors.ProcessNotFound):
        service.processes.handle(Handling(PROCESS, "o1", "x", 1, "w1", 1, 0))
    worker = Worker(service)
    handled = [worker.deliver(event) for event in events]
    assert [answer.repeated for answer in handled] == [False] * 3
    assert [command.repeated for command in handled[-1].commands] == [True]
    assert commands(service) == [("o1", "ship")]


@mutant(
    "a-deleted-process-is-removed-in-one-transaction",
    "core.processes.definitions:_remove",
    "sa.select(*key).where(table.c.name == name).order_by(*key).limit(CHUNK)",
    "sa.select(*key).where(table.c.name == name).order_by(*key)",
)
def test_the_rows_of_a_deleted_process_are_removed_in_small_transactions(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them one instance has. The rows of another process with instances of these names stay."""
    monkeypatch.setattr(definitions, "CHUNK", 2)
    service.processes.define("other", partitions=1)
    service.database.write(
        lambda tx: tx.execute(
            sa.insert(tables.inbox),
            [
                {"name": name, "instance": "o1", "event_id": f"e{n}", "position": n, "status": Status.HANDLED}
                | {"handled_at": datetime.now(UTC)}
                for name in (PROCESS, "other")
                for n in range(1, 6)
            ],
        )
    )
    worker = Worker(service)
    worker.leave()
    with plans.executions(service.database) as executions:
        service.processes.delete(PROCESS)
    assert sum(text.startswith("DELETE FROM inbox") for text, _ in executions) == 3
    assert [(row["name"], row["event_id"]) for row in rows(service, tables.inbox)] == [
        ("other", f"e{n}") for n in range(1, 6)
    ]


@mutant(
    "a-sweep-removes-rows-of-a-process-that-was-defined-again",
    "core.processes.definitions:_remove",
    "not _lock(tx, name, deleted=True)",
    "False",
)
def test_a_sweep_that_was_delayed_spares_the_process_that_was_defined_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call deletes the process. Before it removes the rows, another call does, the process is defined again, and it
    handles an event."""
    [event] = append(service, ("o1", "charged"))
    worker = Worker(service)
    worker.deliver(event)
    worker.leave()
    later: list[Worker] = []

    def delayed(remove: Callable[..., int], *args: Any) -> int:
        if not later:
            later.append(Worker(service))
            assert not later[0].deliver(event).repeated
        return remove(*args)

    with Database(service.database.url) as database:
        monkeypatch.setattr(database, "write_in_chunks", functools.partial(delayed, database.write_in_chunks))
        definitions.delete(database, PROCESS)
    assert later[0].deliver(event).repeated
    assert service.processes.instance(PROCESS, "o1").instance.version == 1


@mutant(
    "a-delete-trusts-an-early-look-at-the-process",
    "core.processes.definitions:delete",
    "partitions_of(tx, name) is not None",
    "False",
)
def test_a_delete_that_was_overtaken_spares_the_process_that_was_defined_again(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its statements, another call deletes the process, which is then defined again and has a worker. MariaDB
    locks the row of the deleted group, so that it can't be defined again meanwhile."""
    with Database(postgresql_url) as database, Database(postgresql_url) as slow:
        templates.migrate(database)
        service = Service(database, combiner=Inline)
        [event] = append(service, ("o1", "charged"))
        worker = Worker(service)
        worker.deliver(event)
        worker.leave()
        remove = groups.delete
        later: list[Worker] = []

        def overtaken(tx: Connection, name: str) -> None:
            monkeypatch.undo()
            service.processes.delete(PROCESS)
            try:
                remove(tx, name)
            finally:
                later.append(Worker(service))
                later[0].deliver(event)

        monkeypatch.setattr(groups, "delete", overtaken)
        with pytest.raises(errors.ConsumerGroupInUse):
            definitions.delete(slow, PROCESS)
        assert later[0].deliver(event).repeated


@mutant(
    "a-process-that-was-deleted-meanwhile-can-not-be-defined",
    "core.processes.definitions:define",
    "raise faults.BeginAgain from None",
    "raise",
)
def test_a_process_that_is_deleted_while_it_is_defined_is_defined_anew(
    server_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that starts meanwhile must not hear that there is no such process."""
    service, other = (Service(server_database, combiner=Inline) for _ in range(2))
    service.processes.define(PROCESS, partitions=2)
    put = groups.put

    def overtaken(tx: Connection, *arguments: Any) -> Any:
        monkeypatch.undo()
        other.processes.delete(PROCESS)
        return put(tx, *arguments)

    monkeypatch.setattr(groups, "put", overtaken)
    definition, is_new = service.processes.define(PROCESS, partitions=4)
    assert (definition.partitions, is_new) == (4, True)


@mutant(
    "a-handling-is-refused-by-the-group-of-its-deleted-process",
    "core.processes.handling:Handlings.judge",
    "isinstance(refusal, errors.ConsumerGroupNotFound)",
    "False",
)
def test_an_event_handled_while_its_process_is_deleted_is_of_no_process(
    server_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers know nothing of a process's consumer group."""
    service, other = (Service(server_database, combiner=Inline) for _ in range(2))
    [event] = append(service, ("o1", "charged"))
    worker = Worker(service)
    fences = handling._fences

    def overtaken(pipeline: Any, operations: Any) -> Any:
        found = fences(pipeline, operations)
        if found:
            monkeypatch.undo()
            worker.leave()
            other.processes.delete(PROCESS)
        return found

    monkeypatch.setattr(handling, "_fences", overtaken)
    with pytest.raises(errors.ProcessNotFound):
        worker.deliver(event)


def test_a_retry_needs_no_consumer_group(service: Service) -> None:
    """A client may have deleted it."""
    worker = Worker(service, function=poisoned)
    [event] = append(service, ("o1", "reserved"))
    assert worker.deliver(event).status is Status.PARKED
    worker.leave()
    service.consumer_groups.delete(definitions.group_of(PROCESS))
    assert service.processes.retry_parked(PROCESS, "o1") == 1


@mutant(
    "a-process-that-was-defined-again-is-pruned-like-the-earlier-one",
    "core.processes.definitions:_remove_pruned",
    "inbox.remove_chunk(tx, name, status, row.pruned)",
    "inbox.remove_chunk(tx, name, status, 2**53)",
)
@pytest.mark.parametrize("delay", range(4))
def test_a_pruning_that_was_delayed_spares_the_process_that_was_defined_again(
    service: Service, monkeypatch: pytest.MonkeyPatch, delay: int
) -> None:
    """After any number of transactions of the janitor's pruning the process may be deleted and defined again. Then its
    events are handled again, each once, although the earlier process was past them."""
    events = append(service, *((f"o{number}", "charged") for number in range(5)))
    worker = Worker(service)
    handle_all(service, worker)
    later: list[Worker] = []
    transactions = itertools.count()

    def delayed(transaction: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if next(transactions) == delay:
            worker.leave()
            service.processes.delete(PROCESS)
            later.append(Worker(service))
            assert not later[0].deliver(events[0]).repeated
        return transaction(*args, **options)

    with Database(service.database.url) as janitor:
        for name in ("read", "snapshot", "write"):
            monkeypatch.setattr(janitor, name, functools.partial(delayed, getattr(janitor, name)))
        definitions.prune(janitor, keep=0)
    assert [event.id for event in events if later[0].deliver(event).repeated] == [events[0].id]


@mutant(
    "the-group-of-a-process-is-taken-for-a-clients",
    "core.processes.definitions:_remove_group_of_client",
    "tx.execute(sa.select(_definitions.name).where(_definitions.name == name)).first() is not None",
    "tx.execute(sa.select(_definitions.name).where(_definitions.name == name)).first() is True",
)
def test_a_process_that_is_being_defined_twice_is_defined_once(server_database: Database) -> None:
    """The other one has a worker already; its consumer group is not taken for one that a client has created."""
    service = Service(server_database, combiner=Inline)
    slow = Service(Database(server_database.url.render_as_string(hide_password=False)), combiner=Inline)
    has_looked, wake = freeze_before(slow.database, "SELECT name, partitions FROM consumer_groups")
    with ThreadPoolExecutor(1) as threads:
        definition = threads.submit(slow.processes.define, PROCESS)
        assert has_looked.wait(60)
        worker = Worker(service)
        wake.set()
        (defined, is_new) = definition.result(60)
    slow.stop()
    assert (defined.name, defined.partitions, is_new) == (PROCESS, PARTITIONS, False)
    [event] = append(service, ("o1", "charged"))
    assert not worker.deliver(event).repeated


def test_a_process_whose_consumer_group_was_deleted_can_be_deleted(service: Service) -> None:
    worker = Worker(service)
    worker.leave()
    service.consumer_groups.delete(GROUP)
    service.processes.delete(PROCESS)
    assert service.processes.define(PROCESS)[1], "it is new"


@mutant(
    "a-process-without-its-consumer-group-begins-with-trimmed-events",
    "core.processes.definitions:all_of",
    "max(row.pruned, trimmed)",
    "row.pruned",
)
def test_a_process_whose_consumer_group_was_deleted_continues_above_the_trimmed_events(service: Service) -> None:
    """All of its partitions had handled the trimmed events, so its workers need not read them again."""
    worker = Worker(service)
    append(service, *((f"o{number}", "charged") for number in range(10)))
    handle_all(service, worker)
    trim(service)
    [event] = append(service, ("o1", "reserved"))
    worker.leave()
    service.consumer_groups.delete(GROUP)
    trim(service)
    worker = Worker(service)
    after = service.processes.define(PROCESS)[0].after
    assert [event.id for event in service.feed.read(after, 10).events] == [event.id]
    assert not worker.deliver(event).repeated


@mutant(
    "commands-go-while-their-events-are-kept",
    "core.processes.retention:_gone",
    "trimmed if first is None else min(trimmed, first - 1)",
    "trimmed",
)
@mutant(
    "commands-go-though-their-instances-are-there",
    "core.processes.retention:_remove_orphans",
    "row.instance is None",
    "True",
)
def test_commands_of_a_deleted_process_are_removed_with_their_events(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it can be pulled, and is not issued again. Rows of a current instance stay."""
    monkeypatch.setattr(retention, "CHUNK", 2)

    def issued() -> list[str]:
        return sorted(row["instance"] for row in rows(service, tables.outbox))

    names = [f"o{number}" for number in range(5)]
    worker = Worker(service)
    events = append(service, *((name, type) for name in names for type in NEEDED))
    handle_all(service, worker)
    worker.leave()
    service.processes.delete(PROCESS)
    assert retention.forget_orphans(service.database) == 0
    assert [command.instance for command in service.processes.commands(0, 10).commands] == names

    worker = Worker(service)
    handled = [worker.deliver(event) for event in events if event.key == "o3"]
    assert [command.repeated for command in handled[-1].commands] == [True]
    last = everything(service)[-1].position
    for partition in range(PARTITIONS):
        worker.commit(partition, last)
    with service.database.engine.begin() as tx:  # a trimming pass first records how far it trims
        tx.execute(sa.update(tables.feed_head).values(trimmed=last))
    assert retention.forget_orphans(service.database) == 0
    trim(service)
    assert retention.forget_orphans(service.database) == 4
    assert issued() == ["o3"]
    worker.leave()
    service.processes.delete(PROCESS)
    assert retention.forget_orphans(service.database) == 1
    assert issued() == []


@mutant(
    "the-janitor-removes-commands-that-were-issued-again",
    "core.processes.retention:_remove_orphans",
    "_outbox.position <= rows[-1].position",
    "_outbox.position > 0",
)
def test_two_janitors_spare_a_command_that_was_issued_again(server_database: Database) -> None:
    """One has chosen what to remove; until it goes on, the other removes it, and the process issues it again."""
    service = Service(server_database, combiner=Inline)
    worker = Worker(service)
    append(service, *(("o1", type) for type in NEEDED))
    handle_all(service, worker)
    worker.leave()
    service.processes.delete(PROCESS)
    trim(service)
    url = service.database.url.render_as_string(hide_password=False)
    with Database(url) as janitor, ThreadPoolExecutor(1) as pool:
        has_chosen, wake = freeze_before(janitor, "DELETE FROM outbox")
        removal = pool.submit(retention.forget_orphans, janitor)
        assert has_chosen.wait(60)
        assert retention.forget_orphans(service.database) == 1
        append(service, *(("o1", type) for type in NEEDED))
        handle_all(service, Worker(service))
        wake.set()
        removal.result(60)
    assert [row["instance"] for row in rows(service, tables.outbox)] == ["o1"]


def test_the_feed_keeps_events_that_a_process_has_not_read(service: Service) -> None:
    """However old it is, until all partitions are past it."""
    worker = Worker(service)
    events = append(service, *((f"o{number}", "charged") for number in range(10)))
    assert feed.trim(service.database, timedelta(0), needed=needed) == 0
    for partition in range(PARTITIONS):
        worker.commit(partition, events[3 if partition == 1 else 8].position)
    assert feed.trim(service.database, timedelta(0), needed=needed) == 4
    worker.leave()
    service.processes.delete(PROCESS)
    assert feed.trim(service.database, timedelta(0), needed=needed) == 6


@mutant(
    "a-process-is-past-events-that-do-not-exist-yet",
    "core.consumer_groups.positions:Commits.judge",
    "commit.snapshot.high > end",
    "False",
)
def test_a_worker_that_has_read_lost_events_commits_no_position_beyond_the_feeds_end(service: Service) -> None:
    """The database was restored, or a server took over that lacked the last events. The next worker must handle the
    events that get their positions."""
    worker = Worker(service)
    append(service, *((f"o{number}", "charged") for number in range(4)))
    for partition in range(PARTITIONS):
        worker.commit(partition, 2)
    with service.database.engine.begin() as tx:
        tx.execute(sa.delete(tables.feed).where(tables.feed.c.position > 3))
        tx.execute(sa.update(tables.feed_head).values(position=3))
    worker.commit(0, 3)
    with pytest.raises(errors.InvalidRequest):
        worker.commit(1, 4)
    positions = service.consumer_groups.get(GROUP).positions
    assert [position.floor for position in positions] == [3, 2, 2, 2]


@mutant(
    "a-group-named-like-that-of-a-process-is-one",
    "core.consumer_groups.positions:Commits.judge",
    "feed_ends.get(fence.group)",
    "feed_ends.get(fence.group, 0)",
)
def test_a_group_that_is_only_named_like_that_of_a_process_has_offsets_of_its_own(service: Service) -> None:
    """They are not positions of the feed, and may be beyond its end."""
    group = definitions.group_of("unheard-of")
    service.consumer_groups.put(group, 1)
    [partition] = service.consumer_groups.sync(group, Caller("w1", "session")).assigned
    fence = Fence(group, 0, "w1", partition.epoch)
    assert service.consumer_groups.commit(fence, Snapshot(10_000, 10_000)).floor == 10_000


def test_names_that_differ_in_case_or_blanks_are_different_instances(service: Service) -> None:
    """Names are compared by their bytes."""
    worker = Worker(service)
    names = ["Order", "order", "order ", "ördér", "o/1", "\U0001f69a" * 255]
    for event in append(service, *((name, "charged") for name in names[:4])):
        assert asdict(worker.deliver(event))["instance"]["version"] == 1
    [event] = append(service, ("any", "charged"))
    for name in names[4:]:
        assert worker.deliver(event, name).instance is not None
    assert sorted(instance.instance for instance in service.processes.page(PROCESS, None, None, 10)[0]) == sorted(names)
