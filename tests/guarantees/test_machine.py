"""Random requests, crashes and retries compared with the model, on each database, with the combiner and without it.

Hypothesis draws the requests: for known and unknown batches, by id and by mask, issued or not, repeated, and with few
Idempotency-Keys so that they collide. After each step the answer and everything that can be read must match the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core import errors
from core.batches import descendants
from core.batches.lifecycle import State
from core.batches.search import Filter
from core.commits.combiner import Combiner, Commit, GroupCommit, Inline
from core.service import Service
from core.storage import statements, tables
from core.storage.database import Database
from core.storage.dialects import Rows
from tests import mutants
from tests.guarantees.drivers import journaled
from tests.guarantees.enlisted.service import EnlistingService
from tests.guarantees.models.service import (
    LONG_AGO,
    Model,
    Request,
    assert_equal,
    assert_equal_batch,
    bits,
    call,
    perform,
)
from tests.guarantees.programs.dying import Written
from tests.mutants import mutant

GROUP = 64
EXAMPLES = 20 * (20 if os.environ.get("LASTBIT_SOAK") == "1" else 1)
STEPS = 50

SETTINGS = hypothesis.settings(
    hypothesis.settings.get_profile("lastbit"), max_examples=EXAMPLES, stateful_step_count=STEPS
)
if mutants.VARIABLE in os.environ:  # a failure is enough then; the smallest example doesn't matter
    SETTINGS = hypothesis.settings(SETTINGS, phases=[hypothesis.Phase.generate])

digests = st.sampled_from([None, "a", "b"])
keys = st.none() | st.sampled_from(["key-1", "key-2", "Key-1", "key-3"])
which = st.sampled_from([0, 0, 0, 1, 1, 2, 3, "any", "none"])
"""The batch: one of the current ones; any that was opened, including deleted ones; or one that never existed."""
numbers = st.one_of(
    st.sets(st.integers(0, 5), max_size=4),
    st.sets(st.integers(GROUP - 2, GROUP + 1), max_size=4),
    st.sets(st.integers(0, 3 * GROUP), max_size=20),
)
spans = st.tuples(st.integers(0, 2 * GROUP), st.integers(0, 2 * GROUP)).map(lambda pair: set(range(*sorted(pair))))
verbs = st.sampled_from(["ack", "ack", "fail", "skip"])
reasons = st.none() | st.sampled_from(["no parser", "zu groß", ""])


def consistent(opening: dict[str, Any]) -> dict[str, Any]:
    """An action needs a tolerance."""
    if not opening.keys() & {"tolerated_failures", "tolerated_failure_percentage"}:
        opening.pop("on_exceeded", None)
    return opening


tolerances = st.just({}) | st.fixed_dictionaries(
    {},
    optional={
        "tolerated_failures": st.sampled_from([0, 1, 2, 5]),
        "tolerated_failure_percentage": st.sampled_from([0, 1, 50, 99, 100]),
        "on_exceeded": st.sampled_from(["continue", "cancel"]),
    },
).map(consistent)
patches = st.fixed_dictionaries(
    {},
    optional={
        "tolerated_failures": st.none() | st.sampled_from([0, 1, 2, 5]),
        "tolerated_failure_percentage": st.none() | st.sampled_from([0, 1, 50, 100]),
        "on_exceeded": st.sampled_from([None, "continue", "cancel"]),
        "deadline": st.sampled_from([None, "2099-01-01T00:00:00+00:00"]),
        "labels": st.none() | st.dictionaries(st.sampled_from(["a", "ä", "b"]), st.none() | st.sampled_from(["", "1"])),
    },
)
"""Also the empty patch, which the contract refuses before the service gets it."""
deadlines = st.sampled_from([{}, {"deadline": None}, {"deadline": "2099-01-01T00:00:00+00:00"}])
openings = st.fixed_dictionaries(
    {"group_size": st.just(GROUP)},
    optional={
        "key": st.sampled_from(["catalog", "Catalog", "catalog "]),
        "items": st.sampled_from([0, 1, 3, GROUP, GROUP + 2, 3 * GROUP]),
        "sealed": st.booleans(),
        "seal_at": st.sampled_from([0, 1, 3, 5, GROUP, 3 * GROUP]),
        "labels": st.sampled_from([{"a": "1"}, {"b": ""}]),
        "callback": st.sampled_from([["https://receiver.example/hook", ["batch.completed"]]]),
    },
)


def possible(opening: dict[str, Any]) -> dict[str, Any]:
    """A batch that seals itself isn't sealed by its open, and doesn't have more items already."""
    if opening.get("sealed") or opening.get("items", 0) > opening.get("seal_at", 0):
        opening.pop("seal_at", None)
    return opening


openings = st.builds(dict.__or__, openings, tolerances).map(possible)
counts = st.sampled_from([0, 1, 2, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP + 3])


WAYS = [
    pytest.param(Service, Inline, True, marks=pytest.mark.slow),
    (Service, Combiner, False),
    (EnlistingService, Inline, True),
]
if os.environ.get("LASTBIT_SOAK") == "1":
    WAYS += [(Service, Inline, False), (Service, Combiner, True), (EnlistingService, Inline, False)]
SEAL: Request = {"verb": "seal"}


class Crash(errors.CoreError):
    """Raised before a COMMIT: to the database it looks as if the process had died."""


class Machine(RuleBasedStateMachine):
    """One example: a service on an emptied database, and the model."""

    service: Service
    crash: list[bool]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.opened: list[int] = []
        self.touched: set[int] = set()

    def teardown(self) -> None:
        self.crash.clear()
        try:
            assert_equal(self.service, self.model, limit=2)
        finally:
            with self.service.database.engine.begin() as tx:
                for table in tables.metadata.sorted_tables:
                    if table not in (tables.feed_head, tables.callback_cursor, tables.schema_support):
                        tx.execute(sa.delete(table))
                tx.execute(sa.update(tables.feed_head).values(position=0, trimmed=0))
                tx.execute(sa.update(tables.callback_cursor).values(position=0))

    # Ways to perform a request.

    def perform(self, request: Request) -> dict[str, Any]:
        answer = perform(self.service, request)
        descendants.sweep(self.service.database)  # as each round of the dispatcher does
        return answer

    def do(self, request: Request) -> dict[str, Any]:
        answer = self.perform(request)
        expected = self.model.perform(request, answer.get("batch"))
        assert answer == expected, request
        self.remember(request, answer)
        return answer

    def remember(self, request: Request, answer: dict[str, Any]) -> None:
        if request["verb"] == "open" and "batch" in answer and answer["batch"] not in self.opened:
            self.opened.append(answer["batch"])
        self.touched |= self.batches_of(request)
        self.touched |= {answer["batch"]} if "batch" in answer else set()

    @staticmethod
    def batches_of(request: Request) -> set[int]:
        positions = [*request.get("items", ()), *request.get("masks", ())]
        return {position[0] for position in positions} | ({request["batch"]} if "batch" in request else set())

    def do_in_some_way(self, request: Request, way: str) -> None:
        """Perform the request `once`; `twice`; after a crash before its COMMIT; or again after its answer was lost."""
        if way == "crashed" and len(self.batches_of(request)) <= 1:
            # A request that dies before the COMMIT must have no effect.
            self.crash.append(True)
            try:
                answer = perform(self.service, request)
            except Crash:
                pass
            else:  # nothing was committed
                expected = self.model.perform(request, answer.get("batch"))
                assert answer == expected
                self.remember(request, answer)
            self.crash.clear()
        elif way == "unanswered" and (request["verb"] != "open" or request.get("key") is not None):
            lost_answer = self.perform(request)
            self.model.perform(request, lost_answer.get("batch"))
        elif way == "twice":
            self.do(request)
        self.do(request)

    ways = st.sampled_from(["once", "once", "once", "twice", "crashed", "unanswered"])

    def batch(self, place: int | str) -> int:
        candidates = self.opened if place == "any" else list(self.model.batches)
        if place == "none" or not candidates:
            return 10**9
        return candidates[-1 - (0 if place == "any" else int(place)) % len(candidates)]

    # Requests.

    @initialize(
        items=st.sampled_from([2, GROUP + 3, 2 * GROUP + 1, 5, GROUP]), sealed=st.booleans(), tolerance=tolerances
    )
    def begin(self, items: int, sealed: bool, tolerance: dict[str, Any]) -> None:
        self.do({"verb": "open", "opening": {"group_size": GROUP, "items": items, "sealed": sealed, **tolerance}})

    @rule(opening=openings, key=keys, way=ways)
    def open(self, opening: dict[str, Any], key: str | None, way: str) -> None:
        self.do_in_some_way({"verb": "open", "opening": opening, "key": key}, way)

    @rule(
        place=which,
        number=st.sampled_from([0, 1, 2, GROUP, GROUP + 1]),
        items=st.sampled_from([0, 1, 2, 3]),
        sealed=st.booleans(),
        tolerance=tolerances,
        key=keys,
        way=ways,
    )
    def nest(
        self,
        place: int | str,
        number: int,
        items: int,
        sealed: bool,
        tolerance: dict[str, Any],
        key: str | None,
        way: str,
    ) -> None:
        """Open a child at any depth, of an item that may be missing, resolved, or the parent of a child already."""
        parent = [self.batch(place), *divmod(number, GROUP)]
        opening = {"group_size": GROUP, "items": items, "sealed": sealed, "parent": parent, **tolerance}
        self.do_in_some_way({"verb": "open", "opening": opening, "key": key}, way)

    @rule(place=which, count=counts, key=keys, digest=digests, way=ways)
    def extend(self, place: int | str, count: int, key: str | None, digest: str | None, way: str) -> None:
        request = {"verb": "extend", "batch": self.batch(place), "count": count, "key": key, "digest": digest}
        self.do_in_some_way(request, way)

    @rule(
        place=which,
        owner=which,
        number=st.sampled_from([0, 1, 2, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP]),
        count=counts,
        key=keys,
        digest=digests,
        way=ways,
    )
    def extend_by_an_item(
        self,
        place: int | str,
        owner: int | str,
        number: int,
        count: int,
        key: str | None,
        digest: str | None,
        way: str,
    ) -> None:
        """On behalf of an item, which may be missing, resolved, held, or of another batch."""
        by = [self.batch(owner), *divmod(number, GROUP)]
        request = {"verb": "extend", "batch": self.batch(place), "count": count, "key": key, "digest": digest}
        self.do_in_some_way(request | {"by": by}, way)

    @precondition(lambda self: any(batch.live and batch.pending for batch in self.model.batches.values()))
    @rule(place=st.integers(0, 3), last=st.booleans(), count=counts, key=keys, way=ways)
    def extend_by_a_pending_item(self, place: int, last: bool, count: int, key: str | None, way: str) -> None:
        candidates = [batch_ for batch_ in self.model.batches.values() if batch_.live and batch_.pending]
        batch = candidates[-1 - place % len(candidates)]
        by = [batch.id, *divmod(max(batch.pending) if last else min(batch.pending), GROUP)]
        self.do_in_some_way({"verb": "extend", "batch": batch.id, "count": count, "key": key, "by": by}, way)

    @rule(place=which, key=keys, way=ways)
    def seal(self, place: int | str, key: str | None, way: str) -> None:
        self.do_in_some_way({"verb": "seal", "batch": self.batch(place), "key": key}, way)

    @rule(place=which, verb=verbs, offsets=numbers | spans, key=keys, reason=reasons, way=ways)
    def resolve(
        self, place: int | str, verb: str, offsets: set[int], key: str | None, reason: str | None, way: str
    ) -> None:
        """Resolve items of one batch, by id."""
        request = {"verb": verb, "items": self.ids(self.batch(place), offsets), "key": key}
        self.do_in_some_way(request | ({"reason": reason} if verb != "ack" else {}), way)

    @rule(
        places=st.lists(st.tuples(which, numbers, spans, st.integers(0, 3)), max_size=3), verb=verbs, key=keys, way=ways
    )
    def resolve_in_several(
        self, places: list[tuple[int | str, set[int], set[int], int]], verb: str, key: str | None, way: str
    ) -> None:
        """Resolve items of several batches, by id and by overlapping masks, with indexes beyond the group's size."""
        items: list[list[int]] = []
        masks: list[list[Any]] = []
        batches = [self.batch(place) for place, *_ in places]
        for batch, (_, by_id, by_mask, group) in zip(batches, places, strict=True):
            # A call for several batches may be several transactions. If one of them ends a child, whether its item in
            # the parent is still held, and whether the parent is cancelled by a failure, depends on their order.
            if self.model.may_change_another(batch, batches):
                continue
            items += self.ids(batch, by_id) + [[batch, group, GROUP + index] for index in range(len(by_id) % 3)]
            masks.append([batch, group, bits({number for number in by_mask if number < GROUP})])
        self.do_in_some_way({"verb": verb, "items": items, "masks": masks, "key": key}, way)

    @precondition(lambda self: any(batch.live and batch.pending for batch in self.model.batches.values()))
    @rule(
        place=st.integers(0, 3),
        verb=verbs,
        key=keys,
        way=ways,
        remaining=st.sampled_from([0, 0, 1, 2]),
        seal=st.sampled_from(["", "before", "after"]),
    )
    def finish(self, place: int, verb: str, key: str | None, way: str, remaining: int, seal: str) -> None:
        """Resolve all but a few pending items, and seal before or after it, so that batches complete."""
        candidates = [batch_ for batch_ in self.model.batches.values() if batch_.live and batch_.pending]
        batch = candidates[-1 - place % len(candidates)]
        pending = sorted(batch.pending)
        resolve: Request = {
            "verb": verb,
            "items": self.ids(batch.id, set(pending[: len(pending) - remaining])),
            "key": key,
        }
        if verb != "ack":
            resolve["reason"] = "no parser"
        requests = {"": [resolve], "before": [SEAL, resolve], "after": [resolve, SEAL]}[seal]
        for request in requests:
            self.do_in_some_way(request | ({"batch": batch.id, "key": key} if request is SEAL else {}), way)

    @precondition(lambda self: any(batch.failed | batch.skipped for batch in self.model.batches.values()))
    @rule(key=keys, way=ways, count=st.sampled_from([1, 1, 2, 100]), verb=verbs, by_mask=st.booleans())
    def override(self, key: str | None, way: str, count: int, verb: str, by_mask: bool) -> None:
        """Ack or skip some or all items that failed or were skipped."""
        batch = next(candidate for candidate in self.model.batches.values() if candidate.failed | candidate.skipped)
        numbers = sorted(batch.failed | batch.skipped)[:count]
        request: Request = {"verb": verb, "key": key}
        if by_mask:
            group = numbers[0] // GROUP
            mask = bits({number % GROUP for number in numbers if number // GROUP == group})
            request["masks"] = [[batch.id, group, mask]]
        else:
            request["items"] = self.ids(batch.id, set(numbers))
        self.do_in_some_way(request, way)

    @rule(place=which, numbers=st.none() | numbers, reason=reasons, key=keys, way=ways)
    def redrive(
        self, place: int | str, numbers: set[int] | None, reason: str | None, key: str | None, way: str
    ) -> None:
        """Ask for failed items: all, some of those named, or those with a reason."""
        batch = self.batch(place)
        request: Request = {"verb": "redrive", "batch": batch, "reason": reason, "key": key}
        if numbers is not None:
            request["items"] = self.ids(batch, numbers)
        self.do_in_some_way(request, way)

    @rule(place=which, unchanged_for=st.sampled_from([0, 0, 3600]), key=keys, way=ways)
    def send_again(self, place: int | str, unchanged_for: int, key: str | None, way: str) -> None:
        """Ask for the pending items."""
        request: Request = {"verb": "redrive", "batch": self.batch(place), "key": key, "pending": True}
        self.do_in_some_way({**request, "unchanged_for": unchanged_for}, way)

    @rule(place=which, patch=patches, key=keys, way=ways)
    def update(self, place: int | str, patch: dict[str, Any], key: str | None, way: str) -> None:
        self.do_in_some_way({"verb": "update", "batch": self.batch(place), "patch": patch, "key": key}, way)

    @precondition(lambda self: any(batch.acked for batch in self.model.batches.values()))
    @rule(verb=verbs, key=keys, janitor=st.booleans())
    def repeat(self, verb: str, key: str | None, janitor: bool) -> None:
        """Repeat acks of a batch that was idle for a long time: it is still idle."""
        batch = next(candidate for candidate in self.model.batches.values() if candidate.acked)
        if janitor:
            self.model.time_passes(self.service, batch.id)
        self.do({"verb": verb, "items": self.ids(batch.id, set(sorted(batch.acked)[:12])), "key": key})
        if janitor:
            self.janitor()

    @rule(batches=st.lists(st.tuples(which, verbs, numbers | spans), min_size=2, max_size=5))
    def resolve_at_once(self, batches: list[tuple[int | str, str, set[int]]]) -> None:
        """Submit several calls before the first is answered; they may be merged, and count in their order."""
        requests = [{"verb": verb, "items": self.ids(self.batch(place), numbers)} for place, verb, numbers in batches]
        batches_named = [self.model.batches.get(batch) for request in requests for batch in self.batches_of(request)]
        if any(batch is not None and batch.parent is not None for batch in batches_named):
            return  # the order of these calls and the parent's payment is undefined
        if any(batch is not None and batch.tolerance != (None, None) for batch in batches_named):
            return  # merged calls are compared with the tolerance together
        futures = [self.service.acks.ack(call(request)) for request in requests]
        for request, future in zip(requests, futures, strict=True):
            answer, expected = future.result(120), self.model.perform(request)
            rejected = [
                [rejection.reason, list(rejection.item or ()), rejection.count] for rejection in answer.rejected
            ]
            assert (answer.applied, answer.repeated) == (expected["applied"], expected["repeated"])
            assert sorted(rejected) == expected["rejected"]
            # A call's answer may include a completion by a later call of the same flush; only that call gets `newly`.
            news = {batch for batch, completion in answer.completed.items() if completion.newly}
            assert news == {batch for batch, completion in expected["completed"].items() if completion["newly"]}
            assert answer.completed.keys() >= expected["completed"].keys()
            self.touched |= self.batches_of(request)

    @precondition(lambda self: len(self.model.batches) > 2)
    @rule(place=which, key=keys, way=ways, children=st.booleans(), reason=reasons)
    def cancel(self, place: int | str, key: str | None, way: str, children: bool, reason: str | None) -> None:
        request = {"verb": "cancel", "batch": self.batch(place), "key": key, "children": children, "reason": reason}
        self.do_in_some_way(request, way)

    @precondition(lambda self: any(not batch.live for batch in self.model.batches.values()))
    @rule(place=which, deadlines=deadlines, key=keys, way=ways, reason=reasons)
    def reopen(
        self, place: int | str, deadlines: dict[str, Any], key: str | None, way: str, reason: str | None
    ) -> None:
        """Mostly of a batch that was cancelled or has expired."""
        ended = [batch.id for batch in self.model.batches.values() if batch.state in (State.CANCELLED, State.EXPIRED)]
        batch = ended[place % len(ended)] if ended and isinstance(place, int) else self.batch(place)
        self.do_in_some_way({"verb": "reopen", "batch": batch, "key": key, "reason": reason, **deadlines}, way)

    @precondition(lambda self: len(self.model.batches) > 2)
    @rule(place=which)
    def delete(self, place: int | str) -> None:
        self.do({"verb": "delete", "batch": self.batch(place)})

    @precondition(lambda self: len(self.model.batches) > 1)
    @rule(places=st.sets(st.integers(1, 4), max_size=2), days=st.sampled_from((40, LONG_AGO)))
    def time_passes(self, places: set[int], days: int) -> None:
        """The janitor expires exactly the batches that are unchanged since then, and deletes those that had ended by
        then. Those with failures it keeps for longer."""
        for place in places:
            self.model.time_passes(self.service, self.batch(place), days)
        self.janitor()

    def janitor(self) -> None:
        answer = self.do({"verb": "janitor"})
        self.touched |= {*answer["expired"], *answer["deleted"]}

    @rule(place=which, days=st.integers(1, 3), other=which, janitor=st.booleans())
    def deadline_passes(self, place: int | str, days: int, other: int | str, janitor: bool) -> None:
        """Batches expire at their deadline, though they were changed just now and have live children."""
        for batch, past in ((self.batch(place), days), (self.batch(other), 2)):
            if batch in self.model.batches:
                self.model.deadline_passes(self.service, batch, past)
        if janitor:
            self.janitor()
        else:
            self.touched |= {*self.do({"verb": "deadlines"})["expired"]}

    @rule(state=st.sampled_from([None, State.OPEN, State.SEALED, State.COMPLETE, State.EXPIRED, State.CANCELLED]))
    def list(self, state: State | None) -> None:
        for key in (None, "catalog", "catalog "):
            page = self.service.batches.page(Filter(state=state, key=key))
            expected = [
                batch.id
                for batch in self.model.batches.values()
                if state in (None, batch.state) and key in (None, batch.key)
            ]
            assert [batch.id for batch in page.batches] == sorted(expected, reverse=True)

    @staticmethod
    def ids(batch: int, numbers: set[int]) -> list[list[int]]:
        return [[batch, *divmod(number, GROUP)] for number in numbers]

    @invariant()
    def all_that_can_be_read_is_the_models(self) -> None:
        for batch in self.touched:
            if batch in self.model.batches:
                assert_equal_batch(self.service, self.model.batches[batch])
            else:
                assert perform(self.service, {"verb": "cancel", "batch": batch}) == {"error": "batch_not_found"}
        self.touched.clear()


@mutant("a-failed-item-stays-failed", "core.bits.bitfield:Group.ack_one", "self.failed[index] = 0", "pass")
@mutant(
    "the-watermark-hint-runs-ahead", "core.acks.completion:_full_prefixes", "resolved < row.group_size", "resolved == 0"
)
@mutant("repeats-keep-a-batch-alive", "core.acks.apply:apply", "not changed", "False")
@mutant(
    "a-completion-makes-no-event",
    "core.acks.completion:_announce",
    "new += batches.events(batch, verdict.transition.events(), trigger=verdict.trigger)",
    "pass",
)
@pytest.mark.parametrize(("kind", "combiner", "some_journaled"), WAYS)
@pytest.mark.timeout(7200)
def test_any_sequence_of_requests_and_crashes_matches_the_model(
    database: Database,
    kind: type[Service],
    combiner: Callable[[Commit], GroupCommit],
    some_journaled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random requests, replays and crashes: the database and every answer match plain sets of numbers."""
    if some_journaled:
        journaled.mix(monkeypatch)
    crashing: list[bool] = []

    @sa.event.listens_for(database.engine, "commit")
    def die(connection: object) -> None:
        if crashing:
            crashing.clear()
            raise Crash

    finish = statements.finish

    def finish_or_die(tx: sa.Connection, *texts: str) -> list[Rows]:
        """A crash comes between the last writes and the COMMIT, so these are not sent together then."""
        return (statements.run if crashing else finish)(tx, *texts)

    monkeypatch.setattr(statements, "finish", finish_or_die)
    service_ = kind(database, combiner=combiner, writes=combiner, sender=Written(Path(os.devnull)))

    class Here(Machine):
        service = service_
        crash = crashing

    try:
        run_state_machine_as_test(Here, settings=SETTINGS)
    finally:
        service_.stop()
