"""The model to compare the database with: plain sets of numbers, one request after the other, no bits, no SQL.

A *request* is a dictionary such as {"verb": "ack", "items": [[7, 0, 1]], …}, so that it can be sent to another process.
`perform` runs one on a service and `Model.perform` runs one on the model; both return answers of the same form.
`assert_equal` compares everything that can be read of the batches.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any

import sqlalchemy as sa

from core import errors, janitor, tallies
from core.acks import parents
from core.acks.call import Call
from core.batches import batch as batches
from core.batches import descendants, expiry
from core.batches.callbacks import Callback
from core.batches.lifecycle import State, Verb
from core.batches.redrive import Wish
from core.batches.tolerance import OnExceeded
from core.batches.update import KEEP, Patch
from core.service import Service
from core.storage import tables
from lastbit.ids import ItemId

Request = dict[str, Any]
Answer = dict[str, Any]

DEFAULTS = {
    "key": None,
    "labels": {},
    "group_size": 8192,
    "items": 0,
    "sealed": False,
    "seal_at": None,
    "expires_in": None,
    "parent": None,
    "tolerated_failures": None,
    "tolerated_failure_percentage": None,
    "on_exceeded": "continue",
    "callback": None,
}
"""The defaults of an opening, so that openings with the same meaning compare equal."""
LONG_AGO = 70
"""Days by which `time_passes` moves a batch into the past: longer than all of the janitor's periods."""
KEPT = 30
KEPT_FAILED = 60
"""Days for which the janitor keeps an ended batch without and with failures."""


def bits(indexes: set[int]) -> str:
    """The mask of the indexes, as hexadecimal digits."""
    width = max(indexes, default=-1) // 8 + 1
    return sum(1 << index for index in indexes).to_bytes(width, "little").hex()


def indexes_of(mask: str) -> set[int]:
    value = int.from_bytes(bytes.fromhex(mask), "little")
    return {index for index in range(value.bit_length()) if value >> index & 1}


def perform(service: Service, request: Request) -> Answer:
    """Run the request on the service. A core error counts as an answer; any other error is raised."""
    try:
        return _perform(service, request)
    except errors.CoreError as error:
        if error.code in ("unavailable", "internal"):
            raise
        return {"error": error.code}


def _perform(service: Service, request: Request) -> Answer:
    verb, key = request["verb"], request.get("key")
    match verb:
        case "open":
            opening = service.batches.open(_opening(request), key)
            return (
                {"batch": opening.batch.id, "state": opening.batch.state}
                | {name: getattr(opening, name) for name in ("start", "count", "newly", "replayed")}
                | {"callback": None if (callback := opening.callback) is None else [callback.url, [*callback.types]]}
            )
        case "extend":
            by = request.get("by")
            extension = service.batches.extend(
                request["batch"], request["count"], key, request.get("digest"), None if by is None else ItemId(*by)
            )
            return {"items": extension.batch.items} | {
                name: getattr(extension, name) for name in ("start", "count", "replayed")
            }
        case "seal":
            sealed = service.batches.seal(request["batch"], key)
            return {"state": sealed.batch.state, "newly": sealed.newly, "newly_succeeded": sealed.newly_succeeded}
        case "update":
            updated = service.batches.update(request["batch"], _patch(request["patch"]), key)
            fields = {"state": updated.batch.state, "exceeded": updated.batch.exceeded, "replayed": updated.replayed}
            return fields | {"labels": dict(updated.batch.labels)}
        case "redrive":
            redrive = service.batches.redrive(request["batch"], _wish(request), key)
            ranges = [(span.start, span.end) for span in redrive.ranges]
            return {"count": redrive.count, "ranges": ranges, "more": redrive.more, "replayed": redrive.replayed}
        case "cancel":
            options = {"reason": request.get("reason"), "children": request.get("children", False)}
            cancelled = service.batches.cancel(request["batch"], key, **options)
            return {"state": cancelled.state, "reason": cancelled.reason}
        case "reopen":
            reopened = service.batches.reopen(
                request["batch"], key, deadline=_deadline(request.get("deadline", KEEP)), reason=request.get("reason")
            )
            facts = {"state": reopened.batch.state, "on_exceeded": reopened.batch.on_exceeded}
            return facts | {"replayed": reopened.replayed}
        case "delete":
            service.batches.delete(request["batch"])
            return {}
        case "janitor":
            report = janitor.run_once(service.database, expiry.Policy())
            return {"expired": sorted(report.expired_open + report.expired_sealed), "deleted": sorted(report.deleted)}
        case "deadlines":
            expired = janitor.expire_overdue(service.database)
            descendants.sweep(service.database)  # as each round of the dispatcher does
            parents.sweep(service.database)
            return {"expired": sorted(expired)}
        case "tally":
            applied = service.tallies.apply(request["tally"], [tally_entry(entry) for entry in request["entries"]])
            return {"applied": applied.applied, "repeated": applied.repeated}
        case "ranges":
            counted = service.tallies.apply_ranges(
                request["tally"], [tallies.Range(*each) for each in request["ranges"]]
            )
            return {"results": [result.status for result in counted]}
    answer = service.acks.ack(call(request)).result(120)
    rejected = [
        [
            rejection.reason,
            list(rejection.item) if rejection.item is not None else list(rejection.group or ()),
            rejection.count,
        ]
        for rejection in answer.rejected
    ]
    completed = {
        batch: {
            "key": completion.key,
            "newly": completion.newly,
            "succeeded": completion.succeeded,
            "newly_succeeded": completion.newly_succeeded,
        }
        for batch, completion in answer.completed.items()
    }
    counts = {"applied": answer.applied, "repeated": answer.repeated}
    return counts | {"rejected": sorted(rejected), "completed": completed}


def _opening(request: Request) -> batches.Opening:
    opening = dict(request["opening"])
    parent = opening.pop("parent", None)
    on_exceeded = OnExceeded(opening.pop("on_exceeded", "continue"))
    url, types = opening.pop("callback", None) or (None, ())
    return batches.Opening(
        **opening,
        parent=None if parent is None else ItemId(*parent),
        on_exceeded=on_exceeded,
        callback=None if url is None else Callback(url, tuple(types)),
    )


def _patch(patch: Mapping[str, Any]) -> Patch:
    named = dict(patch)
    if isinstance(named.get("on_exceeded"), str):
        named["on_exceeded"] = OnExceeded(named["on_exceeded"])
    if "deadline" in named:
        named["deadline"] = _deadline(named["deadline"])
    return Patch(**named)


def _deadline(value: Any) -> Any:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def _wish(request: Request) -> Wish:
    items = request.get("items")
    items = None if items is None else [ItemId(*item) for item in items]
    return Wish(request.get("reason"), items, None, request.get("pending", False), request.get("unchanged_for", 0))


def tally_entry(entry: Mapping[str, Any]) -> tallies.Entry:
    """Convert an entry from the form in which requests carry it."""
    source = entry["source"]
    place = source["topic"], source["partition"], source.get("generation", 0), source["offset"], source.get("child", 0)
    return tallies.Entry(entry["key"], entry["delta"], *place)


def call(request: Request) -> Call:
    """Convert an ack, fail or skip request to a call."""
    return Call.of(
        Verb(request["verb"]),
        [tuple(item) for item in request.get("items", ())],
        [(batch, group, bytes.fromhex(mask)) for batch, group, mask in request.get("masks", ())],
        reason=request.get("reason"),
        idempotency_key=request.get("key"),
    )


@dataclass
class ModelBatch:
    id: int
    key: str | None
    group_size: int
    items: int
    state: State
    acked: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    reasons: dict[int, str] = field(default_factory=dict)
    extends: dict[Any, tuple[int, int, str | None]] = field(default_factory=dict)
    """(start, count, digest) by the key, and the item on whose behalf it was used."""
    completed_by: Any = None
    cancelled_by: Any = None
    """The seal or cancel that cancelled it."""
    succeeded_by: Any = None
    parent: tuple[int, int] | None = None
    """The batch and item number of the parent item that this batch stands for."""
    tolerance: tuple[int | None, int | None] = (None, None)
    """The tolerated failures, as a number and as a percentage."""
    cancels: bool = False
    """Whether it is cancelled when its failures pass its tolerance."""
    exceeded: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    updates: dict[str, Any] = field(default_factory=dict)
    """The patches of updates, by their keys."""
    reopens: dict[str, Any] = field(default_factory=dict)
    """What reopens asked for, by their keys."""
    redrives: dict[str, tuple[Any, Answer]] = field(default_factory=dict)
    """What redrives asked for, and their answers, by their keys."""
    events: list[str] = field(default_factory=list)
    """Its events in the feed."""
    reason: str | None = None
    """Why it was cancelled."""
    ended_by: int | None = None
    """The batch above it whose end cancelled it."""
    days_unchanged: int = 0
    """The days that have passed since its last change."""
    has_callback: bool = False
    """Retention keeps the batch until its callback was sent; here no dispatcher sends it."""
    seal_at: int | None = None
    overdue: int | None = None
    """For how many days its deadline has passed; None if it has not, or if there is none."""

    @property
    def pending(self) -> set[int]:
        return set(range(self.items)) - self.acked - self.failed - self.skipped

    def beyond(self, verb: str) -> set[int]:
        """The items that a call with this verb leaves as they are."""
        levels = {"ack": self.acked, "skip": self.acked | self.skipped, "fail": self.acked | self.skipped | self.failed}
        return levels[verb]

    @property
    def live(self) -> bool:
        return self.state in (State.OPEN, State.SEALED)

    @property
    def passes_tolerance(self) -> bool:
        """Whether more items have failed than each limit allows. A percentage is a limit of a sealed batch."""
        number, percentage = self.tolerance
        limits = [] if number is None else [Fraction(number)]
        if percentage is not None and self.state is not State.OPEN:
            limits.append(Fraction(percentage, 100) * self.items)
        return any(len(self.failed) > limit for limit in limits)

    @property
    def succeeded(self) -> bool:
        if self.state is not State.COMPLETE:
            return False
        return not self.failed if self.tolerance == (None, None) else not self.passes_tolerance

    def end(self, state: State) -> None:
        self.state, self.days_unchanged = state, 0
        self.events.append("completed" if state is State.COMPLETE else str(state))


class Model:
    """The contract of each request, on plain sets."""

    def __init__(self) -> None:
        self.batches: dict[int, ModelBatch] = {}
        self.deleted: dict[int, list[str]] = {}
        """Deleted batches → the events that the feed still has of them."""
        self.opens: dict[str, tuple[int, dict[str, Any]]] = {}
        self.owing: list[ModelBatch] = []
        """Batches that ended during the request, and whose parent's item must be resolved before it returns."""
        self.ending: list[ModelBatch] = []
        """Batches that ended during the request, and whose live descendants a sweep ends."""

    def perform(self, request: Request, batch_id: int | None = None) -> Answer:
        """Apply the request; `batch_id` is the id that the service gave a new batch."""
        answer: Answer = getattr(self, f"_{request['verb']}")(request, batch_id)
        while self.owing:
            self._pay(self.owing.pop(0))
        while self.ending:
            self._end_below(self.ending.pop(0))
        return answer

    def _end_below(self, batch: ModelBatch) -> None:
        """Cancel the live descendants. They owe nothing."""
        for child in self.batches.values():
            if child.parent is not None and child.parent[0] == batch.id:
                if child.live:
                    child.end(State.CANCELLED)
                    child.cancelled_by = None
                    child.reason = batch.reason
                    child.ended_by = batch.id if batch.ended_by is None else batch.ended_by
                self._end_below(child)

    def _ended(self, batch: ModelBatch) -> None:
        if batch.parent is not None:
            self.owing.append(batch)

    def _pay(self, child: ModelBatch) -> None:
        """Resolve the child's item in its parent, by an ordinary ack or failure whose answer is dropped."""
        assert child.parent is not None
        parent = self.batches.get(child.parent[0])
        if parent is None or parent.state in (State.EXPIRED, State.CANCELLED):
            return
        is_acked = child.succeeded
        reason = None if is_acked else _reason_of(child)
        answer: Answer = {"applied": 0, "repeated": 0, "completed": {}}
        request = {"verb": "ack" if is_acked else "fail", "reason": reason}
        self._resolve(parent, {child.parent[1]}, request, object(), answer)

    def may_change_another(self, batch_id: int, others: Collection[int]) -> bool:
        """Whether the batch's end may resolve an item of one of the others."""
        batch = self.batches.get(batch_id)
        while batch is not None and batch.parent is not None:
            batch = self.batches.get(batch.parent[0])
            if batch is not None and batch.id in others:
                return True
        return False

    def _holds(self, batch: ModelBatch, number: int) -> bool:
        """Whether a live child stands for the item."""
        return any(child.parent == (batch.id, number) and child.live for child in self.batches.values())

    def _impossible_parent(self, item: tuple[int, int, int]) -> str | None:
        batch_id, group, index = item
        parent = self.batches.get(batch_id)
        if parent is None:
            return "invalid_request"
        if not parent.live:
            return f"batch_{parent.state}"
        number = group * parent.group_size + index
        if index >= parent.group_size or number not in parent.pending:
            return "invalid_request"
        is_taken = any(batch.parent == (batch_id, number) for batch in self.batches.values())
        return "invalid_request" if is_taken else None

    def _find(self, request: Request) -> ModelBatch | None:
        return self.batches.get(request["batch"])

    def _open(self, request: Request, new_id: int | None) -> Answer:
        key, opening = request.get("key"), DEFAULTS | request["opening"]
        fingerprint = _fingerprint("open", key, str(sorted(opening.items())))
        if key in self.opens:
            batch_id, before = self.opens[key]
            if before != opening:
                return {"error": "idempotency_key_reused"}
            batch = self.batches[batch_id]
            facts = {"batch": batch_id, "state": batch.state, "start": 0, "count": opening["items"]}
            facts |= {"callback": opening["callback"]}
            return facts | {"newly": batch.completed_by == fingerprint, "replayed": True}
        parent = opening["parent"]
        if parent is not None and (impossible := self._impossible_parent(parent)):
            return {"error": impossible}
        assert new_id is not None
        assert new_id not in self.batches
        assert new_id not in self.deleted, "an id was reused"
        items, sealed = opening["items"], opening["sealed"] or opening["items"] == opening["seal_at"]
        state = State.COMPLETE if sealed and not items else State.SEALED if sealed else State.OPEN
        batch = ModelBatch(new_id, opening["key"], opening["group_size"], items, state)
        batch.tolerance = opening["tolerated_failures"], opening["tolerated_failure_percentage"]
        batch.cancels = opening["on_exceeded"] == "cancel"
        batch.labels = dict(opening["labels"])
        batch.seal_at = opening["seal_at"]
        batch.has_callback = opening["callback"] is not None
        batch.events = ["opened", *(["sealed"] if sealed else [])]
        if parent is not None:
            batch.parent = parent[0], parent[1] * self.batches[parent[0]].group_size + parent[2]
        if batch.state is State.COMPLETE:
            batch.completed_by = batch.succeeded_by = fingerprint
            batch.events += ["completed", "succeeded"]
            self._ended(batch)
        self.batches[new_id] = batch
        if key is not None:
            self.opens[key] = new_id, opening
        newly = batch.state is State.COMPLETE
        facts = {"batch": new_id, "state": state, "start": 0, "count": items, "callback": opening["callback"]}
        return facts | {"newly": newly, "replayed": False}

    def _extend(self, request: Request, _: object) -> Answer:
        batch, key, count, digest = self._find(request), request.get("key"), request["count"], request.get("digest")
        by = request.get("by")
        if batch is None:
            return {"error": "batch_not_found"}
        if digest is not None and key is None:
            return {"error": "invalid_request"}
        name = key, None if by is None else tuple(by)
        if name in batch.extends:
            start, count_before, digest_before = batch.extends[name]
            if count_before != count or (digest and digest_before and digest != digest_before):
                return {"error": "idempotency_key_reused"}
            return {"items": batch.items, "start": start, "count": count, "replayed": True}
        if by is not None:
            id, group, index = by
            number = group * batch.group_size + index
            if id != batch.id or index >= batch.group_size or number >= batch.items:
                return {"error": "invalid_request"}
            if number not in batch.pending:
                return {"error": "item_resolved"}
        if not (batch.live if by is not None else batch.state is State.OPEN):
            return {"error": f"batch_{batch.state}"}
        start = batch.items
        if batch.seal_at is not None and start + count > batch.seal_at:
            return {"error": "batch_sealed"}
        batch.items += count
        batch.days_unchanged = 0
        if key is not None:
            batch.extends[name] = start, count, digest
        if batch.state is State.OPEN and batch.items == batch.seal_at:
            batch.state = State.SEALED
            batch.events.append("sealed")
            self._settle(batch, object())
        return {"items": batch.items, "start": start, "count": count, "replayed": False}

    def _seal(self, request: Request, _: object) -> Answer:
        batch = self._find(request)
        if batch is None:
            return {"error": "batch_not_found"}
        fingerprint = _fingerprint("seal", request.get("key"), str(batch.id))
        if batch.state in (State.EXPIRED, State.CANCELLED) and batch.cancelled_by != fingerprint:
            return {"error": f"batch_{batch.state}"}
        if batch.state is State.OPEN:
            batch.state, batch.days_unchanged = State.SEALED, 0
            batch.events.append("sealed")
            self._settle(batch, fingerprint)
            if batch.state is State.CANCELLED:
                batch.cancelled_by = fingerprint
        return {
            "state": batch.state,
            "newly": batch.completed_by == fingerprint,
            "newly_succeeded": batch.succeeded_by == fingerprint,
        }

    def _update(self, request: Request, _: object) -> Answer:
        batch, key, patch = self._find(request), request.get("key"), request["patch"]
        if batch is None:
            return {"error": "batch_not_found"}
        is_replay = key in batch.updates
        if is_replay and batch.updates[key] != patch:
            return {"error": "idempotency_key_reused"}
        if not is_replay:
            if not batch.live:
                return {"error": f"batch_{batch.state}"}
            number, percentage = batch.tolerance
            tolerance = (
                patch.get("tolerated_failures", number),
                patch.get("tolerated_failure_percentage", percentage),
            )
            if patch.get("on_exceeded") is not None and tolerance == (None, None):
                return {"error": "invalid_request"}
            batch.tolerance = tolerance
            if "on_exceeded" in patch:
                batch.cancels = patch["on_exceeded"] == "cancel"
            if "deadline" in patch:
                batch.overdue = None
            if "labels" in patch:
                merged = {} if patch["labels"] is None else {**batch.labels, **patch["labels"]}
                batch.labels = {name: value for name, value in merged.items() if value is not None}
            batch.days_unchanged = 0
            batch.events.append("updated")
            self._settle(batch, object())
            if key is not None:
                batch.updates[key] = patch
        fields = {"state": batch.state, "exceeded": batch.exceeded, "labels": batch.labels}
        return fields | {"replayed": is_replay}

    def _redrive(self, request: Request, _: object) -> Answer:
        batch, key = self._find(request), request.get("key")
        if batch is None:
            return {"error": "batch_not_found"}
        reason, items = request.get("reason"), request.get("items")
        pending, unchanged_for = request.get("pending", False), request.get("unchanged_for", 0)
        failed = set(batch.failed)
        if pending:
            failed = {number for number in batch.pending if not self._holds(batch, number)}
        if items is not None:
            if any(group * batch.group_size + index >= batch.items for _, group, index in items):
                return {"error": "invalid_request"}
            failed &= {group * batch.group_size + index for _, group, index in items}
        if reason is not None:
            failed &= {number for number, given in batch.reasons.items() if given == reason}
        if key in batch.redrives:
            wish, answer = batch.redrives[key]
            is_equal = wish == (reason, items, pending, unchanged_for)
            return answer | {"replayed": True} if is_equal else {"error": "idempotency_key_reused"}
        if batch.state in (State.EXPIRED, State.CANCELLED):
            return {"error": f"batch_{batch.state}"}
        if pending and (not failed or (unchanged_for and not batch.days_unchanged)):
            return {"error": "nothing_pending"}
        if not failed:
            return {"error": "nothing_failed"}
        batch.days_unchanged = 0
        batch.events.append("redrive")
        answer = {"count": len(failed), "ranges": spans(failed), "more": False, "replayed": False}
        if key is not None:
            batch.redrives[key] = (reason, items, pending, unchanged_for), answer
        return answer

    def _cancel(self, request: Request, _: object) -> Answer:
        batch = self._find(request)
        if batch is None:
            return {"error": "batch_not_found"}
        fingerprint = _fingerprint("cancel", request.get("key"), str(batch.id))
        if batch.state is not State.COMPLETE and batch.cancelled_by == fingerprint and batch.live:
            return {"state": batch.state, "reason": None}  # it was reopened since
        if batch.state in (State.COMPLETE, State.EXPIRED):
            return {"error": f"batch_{batch.state}"}
        if batch.state is not State.CANCELLED:
            batch.end(State.CANCELLED)
            batch.cancelled_by = fingerprint
            batch.reason = request.get("reason")
            self._ended(batch)
        if request.get("children"):
            self.ending.append(batch)
        return {"state": State.CANCELLED, "reason": batch.reason}

    def _reopen(self, request: Request, _: object) -> Answer:
        batch, key = self._find(request), request.get("key")
        if batch is None:
            return {"error": "batch_not_found"}
        content = request.get("deadline", KEEP), request.get("reason")
        is_replay = key in batch.reopens
        if is_replay and batch.reopens[key] != content:
            return {"error": "idempotency_key_reused"}
        if not is_replay:
            if batch.live or batch.state is State.COMPLETE:
                return {"error": "batch_live" if batch.live else "batch_complete"}
            if batch.overdue is not None and "deadline" not in request:
                return {"error": "invalid_request"}
            batch.overdue = None
            self._revive(batch)
            if key is not None:
                batch.reopens[key] = content
            if not batch.live:  # by what it has collected
                return {"state": State.SEALED if "sealed" in batch.events else State.OPEN} | _policy(batch, is_replay)
        return {"state": batch.state} | _policy(batch, is_replay)

    def _revive(self, batch: ModelBatch) -> None:
        """The children that ended with a batch above them are live again; the others that have ended resolve their
        items, all at once."""
        batch.state = State.SEALED if "sealed" in batch.events else State.OPEN
        batch.reason = batch.ended_by = None
        batch.cancels = batch.cancels and not batch.passes_tolerance
        batch.days_unchanged = 0
        batch.events.append("reopened")
        for child in self.batches.values():
            if child.parent is not None and child.parent[0] == batch.id and not child.live:
                number = child.parent[1]
                if child.ended_by is not None and child.overdue is None:
                    self._revive(child)
                elif number in batch.pending and child.succeeded:
                    batch.acked.add(number)
                elif number in batch.pending:
                    batch.failed.add(number)
                    batch.reasons[number] = _reason_of(child)
        self._settle(batch, object())

    def _delete(self, request: Request, _: object) -> Answer:
        batch = self._find(request)
        if batch is None:
            return {"error": "batch_not_found"}
        if batch.live:
            batch.end(State.CANCELLED)
            if batch.parent is not None:
                self._pay(batch)
        self._forget(batch)
        return {}

    def _forget(self, batch: ModelBatch) -> None:
        del self.batches[batch.id]
        self.deleted[batch.id] = batch.events
        self.opens = {key: value for key, value in self.opens.items() if value[0] != batch.id}

    def _janitor(self, _: Request, __: object) -> Answer:
        expired = []
        # Idle ones come first, in ascending order in each state, and each batch pays its parent at once: whether a
        # parent is idle depends on its children.
        for state in (State.OPEN, State.SEALED):
            for batch in sorted(self.batches.values(), key=lambda batch: batch.id):
                is_idle = batch.overdue is None and batch.days_unchanged > 0 and not self._has_live_children(batch)
                if batch.state is state and is_idle:
                    batch.end(State.EXPIRED)
                    batch.cancelled_by = None
                    expired.append(batch.id)
                    self._end_below(batch)
                    self._ended(batch)
                    while self.owing:
                        self._pay(self.owing.pop(0))
        expired += self._deadlines(_, __)["expired"]
        ended = [batch for batch in self.batches.values() if not batch.live]
        unchanged = [batch for batch in ended if batch.days_unchanged > (KEPT_FAILED if batch.failed else KEPT)]
        deletions = [batch for batch in unchanged if not batch.has_callback]
        for batch in deletions:
            self._forget(batch)
        return {"expired": sorted(expired), "deleted": sorted(batch.id for batch in deletions)}

    def _deadlines(self, _: Request, __: object) -> Answer:
        """The earliest deadline comes first. Live children don't delay it; they end too."""
        overdue = sorted(
            (batch for batch in self.batches.values() if batch.live and batch.overdue is not None),
            key=lambda batch: (-(batch.overdue or 0), batch.id),
        )
        expired = []
        for batch in overdue:
            if batch.live:  # a payment before, or the end of a batch above it, may have cancelled it
                batch.end(State.EXPIRED)
                batch.cancelled_by = None
                expired.append(batch.id)
                self._end_below(batch)
                self._ended(batch)
                while self.owing:
                    self._pay(self.owing.pop(0))
        return {"expired": sorted(expired)}

    def _has_live_children(self, batch: ModelBatch) -> bool:
        return any(child.live and child.parent and child.parent[0] == batch.id for child in self.batches.values())

    def _ack(self, request: Request, _: object) -> Answer:
        masks: dict[tuple[int, int], set[int]] = {}
        for batch_id, group, mask in request.get("masks", ()):
            masks.setdefault((batch_id, group), set()).update(indexes_of(mask))
        ids = {tuple(item) for item in request.get("items", ())}
        ids -= {(batch_id, group, index) for (batch_id, group), indexes in masks.items() for index in indexes}
        content = (
            request.get("reason"),
            sorted(ids),
            sorted((*position, *sorted(indexes)) for position, indexes in masks.items()),
        )
        fingerprint = _fingerprint(request["verb"], request.get("key"), str(content))
        rejected: list[list[Any]] = []
        numbers_by_batch: dict[int, set[int]] = {}
        for batch_id, group, index in ids:
            reason = self._why_not(request["verb"], batch_id, group, index)
            if reason:
                rejected.append([reason, [batch_id, group, index], 1])
            if reason in (None, "held"):  # an issued item: the answer tells if the batch is complete
                numbers_by_batch.setdefault(batch_id, set())
            if not reason:
                numbers_by_batch[batch_id].add(group * self.batches[batch_id].group_size + index)
        for (batch_id, group), indexes in masks.items():
            reasons = {index: self._why_not(request["verb"], batch_id, group, index) for index in indexes}
            for reason in {reason_ for reason_ in reasons.values() if reason_}:
                rejected.append([reason, [batch_id, group], list(reasons.values()).count(reason)])
            good = {index for index, reason in reasons.items() if not reason}
            if good or "held" in reasons.values():
                size = self.batches[batch_id].group_size
                numbers_by_batch.setdefault(batch_id, set()).update(group * size + index for index in good)
        answer: Answer = {"applied": 0, "repeated": 0, "rejected": sorted(rejected), "completed": {}}
        for batch_id, numbers in numbers_by_batch.items():
            self._resolve(self.batches[batch_id], numbers, request, fingerprint, answer)
        return answer

    _fail = _ack
    _skip = _ack

    def _why_not(self, verb: str, batch_id: int, group: int, index: int) -> str | None:
        batch = self.batches.get(batch_id)
        if batch is None:
            return "unknown_batch"
        if batch.state in (State.EXPIRED, State.CANCELLED):
            settled = batch.beyond(verb)
            is_repeat = index < batch.group_size and group * batch.group_size + index in settled
            return None if is_repeat else str(batch.state)
        if index >= batch.group_size or group * batch.group_size + index >= batch.items:
            return "unknown_item"
        number = group * batch.group_size + index
        return "held" if number not in batch.acked and self._holds(batch, number) else None

    def _resolve(
        self, batch: ModelBatch, numbers: set[int], request: Request, fingerprint: Any, answer: Answer
    ) -> None:
        verb = request["verb"]
        news = numbers - batch.beyond(verb)
        for items in (batch.failed, batch.skipped):
            items -= news
        {"ack": batch.acked, "skip": batch.skipped, "fail": batch.failed}[verb].update(news)
        for number in news:
            batch.reasons.pop(number, None)
        if verb != "ack" and request.get("reason") is not None:
            batch.reasons |= dict.fromkeys(news, request["reason"])
        if news:
            batch.days_unchanged = 0
            self._settle(batch, fingerprint)
        answer["applied"] += len(news)
        answer["repeated"] += len(numbers) - len(news)
        if batch.state is State.COMPLETE:
            answer["completed"][batch.id] = {
                "key": batch.key,
                "newly": batch.completed_by == fingerprint,
                "succeeded": batch.succeeded,
                "newly_succeeded": batch.succeeded_by == fingerprint,
            }

    def _settle(self, batch: ModelBatch, fingerprint: Any) -> None:
        """Complete the batch if the last change allows it, and compare its failures with its tolerance."""
        is_done = batch.state is State.SEALED and not batch.pending
        if batch.live and batch.passes_tolerance:
            if not batch.exceeded:
                batch.exceeded = True
                batch.events.append("failures_exceeded")
            if batch.cancels and not is_done:
                batch.end(State.CANCELLED)
                self.ending.append(batch)
                self._ended(batch)
        if is_done:
            batch.end(State.COMPLETE)
            batch.completed_by = fingerprint
            self._ended(batch)
        if batch.succeeded and batch.succeeded_by is None:
            batch.succeeded_by = fingerprint
            batch.events.append("succeeded")
            self._ended(batch)

    def time_passes(self, service: Service, batch_id: int, days: int = LONG_AGO) -> None:
        """Move a batch into the past, in the model and in the database."""
        self.batches[batch_id].days_unchanged += days
        columns = tables.batches.c
        with service.database.engine.begin() as tx:
            times = sa.select(columns.updated_at, columns.seen_updated_at, columns.ended_at)
            row = tx.execute(times.where(columns.id == batch_id)).one()
            past = {name: value - timedelta(days=days) for name, value in row._mapping.items() if value is not None}
            tx.execute(sa.update(tables.batches).where(columns.id == batch_id).values(past))

    def deadline_passes(self, service: Service, batch_id: int, days: int = 1) -> None:
        """Move a batch's deadline into the past, in the model and in the database."""
        self.batches[batch_id].overdue = days
        with service.database.engine.begin() as tx:
            deadline = tables.clock(tx).replace(microsecond=0, second=0, minute=0, hour=0) - timedelta(days=days)
            tx.execute(sa.update(tables.batches).where(tables.batches.c.id == batch_id).values(deadline=deadline))


def _reason_of(child: ModelBatch) -> str:
    """Why the item of a child that didn't succeed has failed."""
    outcome = "completed with failures" if child.state is State.COMPLETE else str(child.state)
    return f"batch {child.id}, which stands for this item, {outcome}"


def _policy(batch: ModelBatch, is_replay: bool) -> Answer:
    return {"on_exceeded": "cancel" if batch.cancels else "continue", "replayed": is_replay}


def _fingerprint(verb: str, key: str | None, content: str) -> Any:
    """The identity of a request; a request without a key equals only itself."""
    return object() if key is None else (verb, key, content)


def spans(numbers: set[int]) -> list[tuple[int, int]]:
    """The maximal half-open ranges of a set of numbers."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


def assert_equal(service: Service, model: Model, *, limit: int = 1000) -> None:
    """Everything that can be read of each batch matches the model; ranges are read in pages of `limit`."""
    for batch_id in model.deleted:
        with_error = perform(service, {"verb": "seal", "batch": batch_id})
        assert with_error == {"error": "batch_not_found"}
        assert events_of(service, batch_id) == model.deleted[batch_id]
    for batch in model.batches.values():
        assert_equal_batch(service, batch, limit=limit)


_OF_REQUESTS = (":updated", ":redrive", ":reopened")
"""Events whose ids also have the digests of their request."""
_REQUEST = ":[0-9a-f]{32}:[0-9a-f]{32}"


def events_of(service: Service, batch_id: int) -> list[str]:
    """The events of a batch in the feed, in order."""
    events = service.feed.read(0, 1000, batch=batch_id).events
    generation = 0
    for event in events:
        id = f"batch:{batch_id}:{event.type.removeprefix('batch.')}"
        generation += id.endswith((":reopened", ":repaired"))
        suffix = f":{generation}" if generation else ""
        ids = [id + _REQUEST] if id.endswith(_OF_REQUESTS) else [id + suffix]
        ids += [id + suffix] if id.endswith(":reopened") else []
        assert any(re.fullmatch(expected, event.id) for expected in ids)
    return [event.type.removeprefix("batch.") for event in events]


def assert_equal_batch(service: Service, batch: ModelBatch, *, limit: int = 1000) -> None:
    stored_batch = service.batches.get(batch.id)
    facts = (
        stored_batch.key,
        stored_batch.state,
        stored_batch.items,
        stored_batch.acked,
        stored_batch.failed,
        stored_batch.skipped,
        stored_batch.pending,
        stored_batch.complete,
        stored_batch.succeeded,
        stored_batch.exceeded,
        stored_batch.tolerance,
        stored_batch.labels,
        stored_batch.seal_at,
    )
    assert events_of(service, batch.id) == batch.events
    assert stored_batch.parent_due is stored_batch.children_due is None
    assert (stored_batch.reason, stored_batch.ended_by) == (batch.reason, batch.ended_by)
    parent = (stored_batch.parent_batch, stored_batch.parent_number) if stored_batch.parent is not None else None
    assert parent == batch.parent
    complete = batch.state is State.COMPLETE
    counts = len(batch.acked), len(batch.failed), len(batch.skipped), len(batch.pending)
    assert facts == (
        batch.key,
        batch.state,
        batch.items,
        *counts,
        complete,
        batch.succeeded,
        batch.exceeded,
        batch.tolerance,
        batch.labels,
        batch.seal_at,
    )
    items = {"pending": batch.pending, "failed": batch.failed, "skipped": batch.skipped}
    ranges: dict[str, list[tuple[int, int]]] = {kind: [] for kind in items}
    reasons: dict[int, str] = {}
    for kind in ranges:
        start: int | None = 0
        while start is not None:
            page = service.batches.ranges(batch.id, kind, start, limit)[1]  # type: ignore[arg-type]
            ranges[kind] += [(span.start, span.end) for span in page.ranges]
            for span in page.ranges:
                reasons |= span.reasons
            start = page.next
    assert ranges == {kind: spans(numbers) for kind, numbers in items.items()}
    assert reasons == batch.reasons
    for table, numbers in ((tables.failures, batch.failed), (tables.skips, batch.skipped)):
        stored_reasons = sa.select(table.c.number, table.c.reason).where(table.c.batch_id == batch.id)
        rows = service.database.read(lambda tx, query=stored_reasons: tx.execute(query).all())  # type: ignore[misc]
        assert dict(map(tuple, rows)) == {number: batch.reasons[number] for number in numbers & batch.reasons.keys()}
    assert service.batches.watermark(batch.id)[1] == min(batch.pending, default=batch.items)
    verification = service.batches.verify(batch.id)
    assert verification.ok, verification.faults
    counted = verification.counted_acked, verification.counted_failed, verification.counted_skipped
    assert counted == counts[:3]
