"""Compares the answers with the stored state and with each other.

A batch's `History` holds the times of requests and answers. An item is *requested* from the first request that names
it, and *answered* from the first 2xx that accepted it; in between its state is unknown. All times come from one clock,
taken before the request is sent and after the answer was read, so each comparison gives the service the benefit of the
doubt.
"""

from __future__ import annotations

import functools
import re
from base64 import b64decode
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.batches.tolerance import OnExceeded
from lastbit.ids import ItemId
from tests.chaos.consumers import STRANGER
from tests.chaos.evidence import Ask, Evidence, Stored
from tests.chaos.plans import Fate

NEVER = float("inf")
BATCH = re.compile(r"/v1/batches/(\d+)(?:/(items|seal|cancel|verify))?$")


@dataclass
class Violation:
    message: str
    batch: int | None = None
    item: str | None = None
    asks: list[Ask] = field(default_factory=list)
    """The requests that show it; if empty, all requests that name the item or the batch."""


@dataclass
class Wanted:
    """The items that a request wants to resolve."""

    acked: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Item numbers by batch."""
    failed: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    strangers: set[str] = field(default_factory=set)

    @property
    def batches(self) -> set[int]:
        return {*self.acked, *self.failed}

    @property
    def size(self) -> int:
        return sum(map(len, [*self.acked.values(), *self.failed.values()])) + len(self.strangers)

    def without(self, batches: Iterable[int]) -> Wanted:
        return self.only(self.batches - set(batches))

    def only(self, batches: Iterable[int]) -> Wanted:
        subset = Wanted()
        remaining = set(batches)
        subset.acked.update({batch: numbers for batch, numbers in self.acked.items() if batch in remaining})
        subset.failed.update({batch: numbers for batch, numbers in self.failed.items() if batch in remaining})
        return subset

    def pending_in(self, stored: Stored) -> int:
        """How many of the items are pending in the end."""
        items = [(batch, number) for part in (self.acked, self.failed) for batch in part for number in part[batch]]
        return sum(stored.state(batch, number) == "pending" for batch, number in items)


@dataclass
class History:
    """When each request about a batch was first sent, and first answered."""

    ack_asked: dict[int, float] = field(default_factory=dict)
    fail_asked: dict[int, float] = field(default_factory=dict)
    ack_answered: dict[int, float] = field(default_factory=dict)
    answered: dict[int, float] = field(default_factory=dict)
    """The first answer to an ack or a failure."""
    enlisted: dict[int, float] = field(default_factory=dict)
    """When a call in a caller's transaction first asked; the item is counted some time after its commit."""
    seal_asked: float = NEVER
    seal_answered: float = NEVER
    cancel_asked: float = NEVER
    """Also by its failures."""
    shown: dict[str, float] = field(default_factory=dict)
    """When an answer first showed each state, or `succeeded`."""
    issued: list[tuple[float, int]] = field(default_factory=list)
    """When an answer showed that the numbers below the second value were issued."""
    asked_times: list[float] = field(default_factory=list)
    answered_times: list[float] = field(default_factory=list)
    may_complete: float = NEVER
    """The earliest time at which an answer can have shown it complete."""
    may_succeed: float = NEVER
    end_answered: float = NEVER
    """When the request that ended it was answered: the one that got `newly`, or else all that it took."""

    @property
    def complete_shown(self) -> float:
        return self.shown.get("complete", NEVER)

    @property
    def ended_shown(self) -> float:
        return min(self.complete_shown, self.shown.get("cancelled", NEVER))

    def note(self, state: str, time: float) -> None:
        self.shown[state] = min(self.shown.get(state, NEVER), time)

    def asked(self, number: int) -> float:
        return min(self.ack_asked.get(number, NEVER), self.fail_asked.get(number, NEVER))

    def settle(self, row: Any) -> None:
        """Derive the sums, once all requests and answers are in."""
        numbers = range(row.items)
        if row.on_exceeded == OnExceeded.CANCEL:
            self.cancel_asked = min(self.cancel_asked, _at(self.fail_asked, row.tolerated_failures))
            self.end_answered = _at(self.answered, row.tolerated_failures)
        else:
            all_answered = max((self.answered.get(number, NEVER) for number in numbers), default=0.0)
            self.end_answered = min(self.end_answered, max(all_answered, self.seal_answered))
        self.asked_times = sorted(map(self.asked, {*self.ack_asked, *self.fail_asked}))
        self.answered_times = sorted(
            time for number, time in self.answered.items() if time < self.enlisted.get(number, NEVER)
        )
        self.may_complete = max(map(self.asked, numbers), default=0.0)
        self.may_complete = max(self.may_complete, self.seal_asked)
        self.may_succeed = max((self.ack_asked.get(number, NEVER) for number in numbers), default=0.0)
        self.may_succeed = max(self.may_succeed, self.seal_asked)


def _at(times: Mapping[int, float], place: int) -> float:
    """The time at this place of the order."""
    return sorted(times.values())[place] if place < len(times) else NEVER


def _first(times: dict[int, float], numbers: Iterable[int], time: float) -> None:
    for number in numbers:
        if time < times.get(number, NEVER):
            times[number] = time


class Checks:
    """Runs all checks when created; `violations` and the counts in `checked` are the results."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.stored = evidence.stored
        self.checked: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.histories: dict[int, History] = {batch: History() for batch in self.stored.batches}
        self.wanted: list[tuple[Ask, Wanted]] = []
        self.checked["batches that were journaled"] = sum(
            bool(row.journal_next) for row in self.stored.batches.values()
        )
        self._learn()
        for check in (
            self._ran,
            self._statuses,
            self._issued,
            self._bits,
            self._fates,
            self._last_words,
            self._batches_answered,
            self._payments,
            self._acks_answered,
            self._rejections,
            self._effects,
            self._sums,
            self._transitions,
            self._feed,
            self._pages,
            self._webhooks,
        ):
            self.violations += check()

    # Collecting the histories.

    def _learn(self) -> None:
        for ask in self.evidence.asks:
            if (match := BATCH.match(ask.path)) and match[2] in ("seal", "cancel"):
                history = self.histories.get(int(match[1]), History())
                name = f"{match[2]}_asked"
                setattr(history, name, min(getattr(history, name), ask.at))
                if match[2] == "seal" and ask.good:
                    history.seal_answered = min(history.seal_answered, ask.answered_at)
            if ask.good:
                for batch, entry in _completions(ask):
                    if entry.get("newly"):
                        history = self.histories.get(batch, History())
                        history.end_answered = min(history.end_answered, ask.answered_at)
                for batch, state in _states(ask):
                    self.histories.get(batch, History()).note(state, ask.answered_at)
                if issued := _issued(ask):
                    batch, end = issued
                    self.histories.get(batch, History()).issued.append((ask.answered_at, end))
        for ask in self.evidence.asks:  # needs the times of all cancellations
            if ask.path in ("/v1/acks", "/v1/failures"):
                request = self._parsed(ask)
                self.wanted.append((ask, request))
                self._learn_items(ask, request)
        for batch in sorted(self.histories, reverse=True):  # nested batches are newer than their parents
            self._settle(batch)

    def _settle(self, batch: int) -> None:
        """Settle the history of this batch. A nested one resolves its parent's item: this is requested once it may end,
        and done before its end is answered."""
        row, history = self.stored.batches[batch], self.histories[batch]
        history.settle(row)
        if row.parent_batch is None or row.state not in ("complete", "cancelled"):
            return
        parent, items = self.histories[row.parent_batch], [row.parent_number]
        may_end = history.may_complete if row.state == "complete" else history.cancel_asked
        _first(parent.ack_asked if _succeeded(row) else parent.fail_asked, items, may_end)
        if batch not in self.evidence.left_to_the_sweep:
            _first(parent.answered, items, history.end_answered)
            if _succeeded(row):
                _first(parent.ack_answered, items, history.end_answered)

    def _parsed(self, ask: Ask) -> Wanted:
        request = Wanted()
        target = request.acked if ask.path == "/v1/acks" else request.failed
        for numbers, ids in ((target, ask.body.get("items", ())), (request.failed, ask.body.get("failed", ()))):
            for text in ids:
                item = ItemId.parse(text)
                if item.group == STRANGER:
                    request.strangers.add(text)
                else:
                    size = self.stored.batches[item.batch].group_size
                    numbers[item.batch].add(item.group * size + item.index)
        for mask in ask.body.get("groups", ()):
            bits = int.from_bytes(b64decode(mask["bits"]), "little")
            first = mask["group"] * self.stored.batches[mask["batch"]].group_size
            target[mask["batch"]].update(first + index for index in range(bits.bit_length()) if bits >> index & 1)
        for batch, acked in request.acked.items():
            if batch in request.failed:
                request.failed[batch] -= acked
        return request

    def _learn_items(self, ask: Ask, request: Wanted) -> None:
        accepted_items = request.without(self._refused(ask, request)[1]) if ask.good else Wanted()
        for part in (request.acked, request.failed) if ask.enlisted else ():
            for batch, numbers in part.items():
                _first(self.histories[batch].enlisted, numbers, ask.at)
        for batch, numbers in request.acked.items():
            _first(self.histories[batch].ack_asked, numbers, ask.at)
        for batch, numbers in request.failed.items():
            _first(self.histories[batch].fail_asked, numbers, ask.at)
        for batch, numbers in accepted_items.acked.items():
            _first(self.histories[batch].ack_answered, numbers, ask.answered_at)
            _first(self.histories[batch].answered, numbers, ask.answered_at)
        for batch, numbers in accepted_items.failed.items():
            _first(self.histories[batch].answered, numbers, ask.answered_at)

    def _refused(self, ask: Ask, request: Wanted) -> tuple[set[int], set[int]]:
        """The batches whose items the answer certainly rejects, and all those whose items it may reject. A batch that
        rejects one item has ended, so it applied nothing of the call."""
        surely, possibly = set[int](), set[int]()
        for rejection in ask.answer["rejected"]:
            name = _named(rejection)
            if name is None:
                certain, possible = self._cancelled(ask, request)
                surely |= certain
                possibly |= possible
            elif name not in request.strangers:
                surely.add(int(name.partition(":")[0]))
        return surely, surely | possibly

    def _cancelled(self, ask: Ask, request: Wanted) -> tuple[set[int], set[int]]:
        """The batches of a request that were certainly cancelled before it, and those that may have been cancelled
        before its answer."""
        cancelled_batches = {batch for batch in request.batches if self.stored.batches[batch].state == "cancelled"}
        return (
            {batch for batch in cancelled_batches if self.histories[batch].shown.get("cancelled", NEVER) < ask.at},
            {batch for batch in cancelled_batches if self.histories[batch].cancel_asked < ask.answered_at},
        )

    @functools.cached_property
    def _nested(self) -> Counter[int]:
        """How many batches stand for items of each batch."""
        return Counter(row.parent_batch for row in self.stored.batches.values() if row.parent_batch is not None)

    # The checks.

    def _ran(self) -> Iterator[Violation]:
        if self.evidence.left:
            yield Violation(f"{self.evidence.left} messages and plans were unfinished at the end")
        if self.evidence.waiting:
            yield Violation(f"{self.evidence.waiting} rows of the outboxes were not moved")
        if self.evidence.recounted:
            yield Violation(f"a recount: {self.evidence.recounted}")
        verification = self.evidence.verified
        if not verification["ok"] or verification["batches"] != len(self.stored.batches):
            yield Violation(f"lastbit verify --all: {verification}")
        self.checked["batches verified"] = verification["batches"]
        for message in self.evidence.differences:
            yield Violation(f"the database's servers hold different data: {message}")
        for message in self.evidence.crashed:
            yield Violation(message)

    def _statuses(self) -> Iterator[Violation]:
        for ask in self.evidence.asks:
            if ask.status is None or ask.good or ask.status == 503:
                continue
            self.checked["refusals"] += 1
            match = BATCH.match(ask.path)
            code = ask.answer.get("code") if isinstance(ask.answer, dict) else None
            batch = int(match[1]) if match else None
            history = self.histories.get(batch, History()) if batch is not None else History()
            is_justified = match is not None and (
                (code == "batch_cancelled" and match[2] == "seal" and history.cancel_asked < ask.answered_at)
                or (code == "batch_complete" and match[2] == "cancel" and history.may_complete < ask.answered_at)
            )
            if not is_justified:
                yield Violation(f"nothing justifies {ask.status} {code}", batch, asks=[ask])

    def _issued(self) -> Iterator[Violation]:
        """Each number was issued once, and to one key only."""
        batches: dict[str, int] = {}
        extents: dict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
        for ask in self.evidence.asks:
            match = BATCH.match(ask.path)
            issues = ask.path == "/v1/batches" or (match is not None and match[2] == "items")
            if ask.method != "POST" or not ask.good or not issues:
                continue
            assert ask.key is not None
            answer = ask.answer
            batch = answer["id"] if ask.path == "/v1/batches" else answer["batch"]
            self.checked["opens and extends"] += 1
            if ask.path == "/v1/batches" and batches.setdefault(ask.key, batch) != batch:
                yield Violation(f"{ask.key} has opened batch {batches[ask.key]} too", batch, asks=[ask])
            extent = answer["start"], answer["count"]
            if extents[batch].setdefault(ask.key, extent) != extent:
                yield Violation(f"{ask.key} was issued {extents[batch][ask.key]} before", batch, asks=[ask])
        for batch, row in self.stored.batches.items():
            end = 0
            for start, count in sorted(extents[batch].values()):
                if start != end and count:
                    yield Violation(f"numbers from {start} on were issued, but the earlier ones end at {end}", batch)
                end = max(end, start + count)
            if end != row.items:
                yield Violation(f"{end} items were issued, {row.items} are stored", batch)

    def _bits(self) -> Iterator[Violation]:
        """Each item has the state that was answered. An item without an answer may have the requested state, or be
        pending. An item that no request named is pending."""
        for batch, history in self.histories.items():
            row = self.stored.batches[batch]
            for number in range(row.items):
                self.checked["items"] += 1
                state = self.stored.state(batch, number)
                if state == "acked":
                    fits = number in history.ack_asked
                elif state == "failed":
                    fits = number in history.fail_asked and number not in history.ack_answered
                else:
                    fits = number not in history.answered
                if not fits:
                    item = str(ItemId(batch, *divmod(number, row.group_size)))
                    outcome = "acked" if number in history.ack_answered else "resolved"
                    history_text = f"answered {outcome}" if number in history.answered else "never requested"
                    yield Violation(f"it is {state}, and was {history_text}", batch, item)

    def _fates(self) -> Iterator[Violation]:
        """Each plan has one batch, which reached its end."""
        by_key = {row.batch_key: batch for batch, row in self.stored.batches.items()}
        if len(by_key) != len(self.stored.batches) or set(by_key) != {plan.key for plan in self.evidence.plans}:
            yield Violation(f"{len(self.evidence.plans)} plans became {len(self.stored.batches)} batches")
            return
        for plan in self.evidence.plans:
            batch = by_key[plan.key]
            row = self.stored.batches[batch]
            self.checked["batches"] += 1
            if row.items != plan.items:
                yield Violation(f"{plan.key} has {plan.items} items, the batch {row.items}", batch)
            pending = {number for number in range(row.items) if self.stored.state(batch, number) == "pending"}
            withheld_items = {number for number in range(plan.items) if plan.do(number) is None}
            fits = {
                Fate.COMPLETE: row.state == "complete",
                Fate.WITHHELD: row.state == ("sealed" if withheld_items else "complete") and pending == withheld_items,
                Fate.CANCELLED: row.state in ("cancelled", "complete"),
                Fate.EXCEEDED: row.state == "cancelled" and bool(row.exceeded),
            }[plan.fate]
            if not fits or (row.state == "complete" and pending):
                message = f"{plan.fate.value} was planned; it is {row.state}, {len(pending)} items are pending"
                yield Violation(message, batch)

    def _last_words(self) -> Iterator[Violation]:
        """A batch stays in the end state that an answer has shown."""
        for batch, history in self.histories.items():
            row = self.stored.batches[batch]
            true = {"open", "sealed", row.state, *(["succeeded"] if _succeeded(row) else [])}
            for state in sorted(history.shown.keys() - true):
                yield Violation(f"an answer showed it {state}, but it is {row.state} with {row.failed} failed", batch)

    def _batches_answered(self) -> Iterator[Violation]:
        """No answer showed a state that the batch could not have yet, or had already left."""
        for ask in self.evidence.asks:
            match = BATCH.match(ask.path)
            if not ask.good or not (match or (ask.path == "/v1/batches" and ask.method == "POST")):
                continue
            if match and match[2] == "items":
                continue
            batch = int(match[1]) if match else ask.answer["id"]
            history = self.histories.get(batch)
            if history is None:
                yield Violation("an answer shows a batch that does not exist", batch, asks=[ask])
                continue
            self.checked["answers about batches"] += 1
            message = list(_contradictions(ask, history))
            if match and match[2] == "verify":
                message += [] if ask.answer["ok"] else ["its counts and bits disagreed"]
            elif ask.answer["key"] != self.stored.batches[batch].batch_key:
                message.append("its key belongs to another batch")
            for text in message:
                yield Violation(text, batch, asks=[ask])

    def _payments(self) -> Iterator[Violation]:
        """Each nested batch paid its parent before its end was answered, or its worker said that it gave up. What the
        parents showed after that answer is judged with all other answers about batches."""
        for batch in sorted(set(self.evidence.owing) - set(self.evidence.left_to_the_sweep)):
            yield Violation("it owed its parent in the end, and no worker said so", batch)
        reads: dict[int, float] = {}
        for ask in self.evidence.asks:
            if ask.good and ask.method == "GET" and (match := BATCH.match(ask.path)) and not match[2]:
                reads[int(match[1])] = ask.at
        for batch, row in self.stored.batches.items():
            if row.parent_batch is not None:
                self.checked["nested batches"] += 1
                self.checked["nested batches cancelled by their failures"] += bool(row.exceeded)
                is_read = self.histories[batch].end_answered <= reads.get(row.parent_batch, 0)
                self.checked["payments read after their answer"] += is_read
        self.checked["payments left to the sweep"] = len(self.evidence.left_to_the_sweep)

    def _acks_answered(self) -> Iterator[Violation]:
        for ask, request in self.wanted:
            if not ask.good:
                continue
            self.checked["answers to acks and failures"] += 1
            for message, batch in self._wrong_in(ask, request):
                yield Violation(message, batch, asks=[ask])

    def _wrong_in(self, ask: Ask, request: Wanted) -> Iterator[tuple[str, int | None]]:
        answer = ask.answer
        rejected = sum(rejection.get("count", 1) for rejection in answer["rejected"])
        if answer["applied"] + answer["repeated"] + rejected != request.size:
            yield f"{request.size} items were sent, but the answer accounts for another number", None
        for rejection in answer["rejected"]:
            name = _named(rejection)
            batch = None if name is None else int(name.partition(":")[0])
            reasons = {"unknown_item"} if name in request.strangers else set[str]()
            candidates = request.batches if batch is None else {batch}
            if any(
                self.histories[candidate].cancel_asked < ask.answered_at
                and self.stored.batches[candidate].state == "cancelled"
                for candidate in candidates
            ):
                reasons.add("cancelled")
            if rejection["reason"] not in reasons:
                yield f"nothing justifies the rejection of {name}: {rejection['reason']}", batch
        surely, refused_batches = self._refused(ask, request)
        accepted_items = request.without(refused_batches)
        if unnamed_count := sum(rejection["count"] for rejection in answer["rejected"] if _named(rejection) is None):
            certain, possible = self._cancelled(ask, request)
            least, maximum = request.only(certain).pending_in(self.stored), request.only(possible).size
            if not least <= unnamed_count <= maximum:
                yield (
                    f"{unnamed_count} items were rejected as cancelled; at least {least} and at most {maximum} were",
                    None,
                )
        for batch in sorted(accepted_items.batches):
            was_cancelled = self.histories[batch].shown.get("cancelled", NEVER) < ask.at
            if was_cancelled and accepted_items.only({batch}).pending_in(self.stored):
                yield "it was cancelled before, but pending items were accepted", batch
        completed_batches = {entry["batch"] for entry in answer["completed"]}
        for batch in sorted(accepted_items.batches - completed_batches):
            # In a caller's transaction it is known after the commit, and only if the database can be asked then.
            if self.histories[batch].complete_shown < ask.at and not ask.enlisted:
                yield "it was complete before, but the answer does not name it", batch
        for entry in answer["completed"]:
            batch = entry["batch"]
            if batch not in accepted_items.batches:
                yield "it is named as complete, but no item of it was sent", batch
                continue
            history = self.histories[batch]
            if ask.answered_at < history.may_complete:
                yield "an answer showed it complete before each of its items was requested", batch
            if entry.get("succeeded") and ask.answered_at < history.may_succeed:
                yield "an answer showed it succeeded before an ack of each of its items was requested", batch
            if entry.get("newly") and history.complete_shown < ask.at and not self._retried(ask):
                yield "it was complete before the request that got newly", batch
        fresh = 0
        could_be = request.without(surely)
        for batch, numbers in could_be.acked.items():
            times = self.histories[batch].ack_answered
            fresh += sum(times.get(number, NEVER) >= ask.at for number in numbers)
        for batch, numbers in could_be.failed.items():
            times = self.histories[batch].answered
            fresh += sum(times.get(number, NEVER) >= ask.at for number in numbers)
        if answer["applied"] > fresh:
            yield f"{answer['applied']} items were answered as applied, but only {fresh} could be new", None

    def _rejections(self) -> Iterator[Violation]:
        """Items that were rejected because their batch was cancelled were pending then, so they still are."""
        for ask, request in self.wanted:
            for rejection in ask.answer["rejected"] if ask.good else ():
                name = _named(rejection)
                if name is None or name in request.strangers or rejection["reason"] != "cancelled":
                    continue
                batch, group, *index = map(int, name.split(":"))
                size = self.stored.batches[batch].group_size
                numbers = {group * size + index[0]} if index else set(range(group * size, (group + 1) * size))
                acked, failed = (numbers & named.get(batch, set()) for named in (request.acked, request.failed))
                # A caller's transaction that began before the end of the batch may be committed after it.
                late = {
                    number for number in acked | failed if self.histories[batch].enlisted.get(number, NEVER) < NEVER
                }
                pending = sum(self.stored.state(batch, number) != "acked" for number in acked - late)
                pending += sum(self.stored.state(batch, number) == "pending" for number in failed - late)
                pending += len(late)
                count = rejection.get("count", 1)
                self.checked["rejected items"] += count
                if count > pending:
                    message = f"{count} items were rejected, but {count - pending} of them had been resolved"
                    yield Violation(message, batch, asks=[ask])

    def _retried(self, ask: Ask) -> bool:
        return self._attempts[ask.key] > 1

    @property
    def _attempts(self) -> Mapping[str | None, int]:
        if not hasattr(self, "_counted"):
            self._counted = Counter(ask.key for ask in self.evidence.asks)
        return self._counted

    def _effects(self) -> Iterator[Violation]:
        """An item that was acked in a transaction of a caller has one effect, that of the call which was answered as
        applied. All other items have none."""
        by_item: dict[str, list[str]] = defaultdict(list)
        for item, attempt in self.evidence.effects:
            by_item[item].append(attempt)
        attempts: dict[str | None, Ask] = {}
        by_service: set[tuple[int, int]] = set()
        """The items that a request to the service may have acked."""
        for ask, request in self.wanted:
            acked = {(batch, number) for batch, numbers in request.acked.items() for number in numbers}
            if ask.enlisted:
                if acked:
                    attempts[ask.key] = ask
                continue
            if not ask.good or ask.answer["applied"]:
                by_service |= acked
            if acked and ask.good and ask.answer["applied"] == request.size:
                for item in map(self._item, acked):
                    if by_item.get(item):
                        yield Violation("the service acked it, but it has an effect", asks=[ask], item=item)
        for ask in attempts.values():
            [item] = ask.body["items"]
            is_applied = bool(ask.good and ask.answer["applied"])
            self.checked["answers to once"] += ask.good
            self.checked["answers to once, applied"] += is_applied
            if is_applied and by_item.get(item) != [ask.key]:
                others = by_item.get(item, [])
                yield Violation(f"it was acked with its effect, but has the effects {others}", item=item, asks=[ask])
        self.checked["effects"] = len(self.evidence.effects)
        for item, keys in by_item.items():
            calls = [attempts[key] for key in keys if key in attempts]
            if len(keys) > 1 or not calls:
                yield Violation(f"it has {len(keys)} effects", item=item, asks=calls)
            for ask in calls:
                if ask.body["items"] != [item] or (ask.good and not ask.answer["applied"]) or _has_failed(ask):
                    yield Violation("this call left an effect that it should not have", item=item, asks=[ask])
        for batch, row in self.stored.batches.items():
            for number in range(row.items):
                item = self._item((batch, number))
                is_acked = self.stored.state(batch, number) == "acked"
                if item in by_item and not is_acked:
                    yield Violation("it has an effect, but no ack", batch, item)
                if is_acked and item not in by_item and number in self.histories[batch].ack_asked:
                    nested = self._nested[batch]  # its acks are payments, which no request names
                    if (batch, number) not in by_service and not nested:
                        yield Violation(
                            "only calls in transactions can have acked it, but it has no effect", batch, item
                        )

    def _item(self, item: tuple[int, int]) -> str:
        batch, number = item
        return str(ItemId(batch, *divmod(number, self.stored.batches[batch].group_size)))

    def _sums(self) -> Iterator[Violation]:
        """The sum of `applied` is the number of items that changed, except for lost answers."""
        applied = sum(ask.answer["applied"] for ask, _ in self.wanted if ask.good)
        unanswered_items = sum(request.size for ask, request in self.wanted if not ask.good)
        resolved = redriven = 0
        for batch, history in self.histories.items():
            row = self.stored.batches[batch]
            resolved += row.acked + row.failed - self._nested[batch]
            redriven += len(history.ack_asked.keys() & history.fail_asked.keys())
        self.checked["items answered as applied"] = applied
        if not resolved - unanswered_items <= applied <= resolved + redriven:
            yield Violation(
                f"{applied} items were answered as applied, {resolved} are resolved, {redriven} of them maybe twice, "
                f"{unanswered_items} were in requests without an answer"
            )

    def _transitions(self) -> Iterator[Violation]:
        """Exactly one request received `newly`, or none where an answer was lost. The same holds for
        `newly_succeeded`."""
        names = ("newly", "newly_succeeded")
        reports: dict[str, dict[int, dict[str | None, Ask]]] = {name: defaultdict(dict) for name in names}
        hearers: dict[int, set[str | None]] = defaultdict(set)
        answered_keys: set[str | None] = set()
        for ask in self.evidence.asks:
            match = BATCH.match(ask.path)
            if match and match[2] == "seal":
                hearers[int(match[1])].add(ask.key)
            if not ask.good:
                continue
            # Spark's report doesn't name the request that completed it. What a caller's transaction has left may be
            # counted by a thread, for nobody.
            if "failed" not in (ask.body or ()) and not ask.enlisted:
                answered_keys.add(ask.key)
            for batch, entry in _completions(ask):
                for name, by_batch in reports.items():
                    if entry.get(name):
                        by_batch[batch].setdefault(ask.key, ask)
        for ask, request in self.wanted:
            for batch in request.batches:
                hearers[batch].add(ask.key)
        for batch, row in self.stored.batches.items():
            for name, due in (("newly", row.state == "complete"), ("newly_succeeded", _succeeded(row))):
                keys = reports[name][batch]
                self.checked[f"transitions ({name})"] += due
                if len(keys) > (1 if due else 0):
                    yield Violation(f"{len(keys)} requests got {name}", batch, asks=[*keys.values()])
                # A payment may have completed a batch with nested ones; nobody hears of that.
                if due and not keys and not self._nested[batch] and hearers[batch] <= answered_keys:
                    message = f"no request got {name}, and no answer was lost"
                    yield Violation(message, batch)

    def _feed(self) -> Iterator[Violation]:
        """Positions have no gap, and each transition of a batch is one event, in order."""
        events = self.stored.feed
        if [event.position for event in events] != list(range(1, len(events) + 1)):
            yield Violation("the feed's positions have a gap")
        self.checked["events"] = len(events)
        by_batch: dict[int, list[str]] = defaultdict(list)
        for event in events:
            by_batch[event.batch_id].append(event.event_id.rpartition(":")[2])
        for batch, row in self.stored.batches.items():
            sealed = ["sealed"] if row.sealed_at is not None else []
            exceeded = ["failures_exceeded"] if row.exceeded else []
            end_events = {"complete": ["completed"], "cancelled": ["cancelled"]}.get(row.state, [])
            due = ["opened", *sealed, *exceeded, *end_events, *(["succeeded"] if _succeeded(row) else [])]
            if by_batch[batch] != due:
                yield Violation(f"its events are {by_batch[batch]}, but should be {due}", batch)

    def _pages(self) -> Iterator[Violation]:
        """Each page that a reader received is a piece of the feed."""
        ids = {event.position: event.event_id for event in self.stored.feed}
        for ask in self.evidence.asks:
            if not ask.good or not ask.path.startswith("/v1/events"):
                continue
            self.checked["pages of the feed"] += 1
            after = int(re.search(r"[?&]after=(\d+)", ask.path)[1])  # type: ignore[index]  # in every request of a reader
            events = ask.answer["events"]
            if [event["position"] for event in events] != list(range(after + 1, after + 1 + len(events))):
                yield Violation("a page of the feed has a gap", asks=[ask])
            if any(ids.get(event["position"]) != event["id"] for event in events):
                yield Violation("a page of the feed shows an event that does not exist", asks=[ask])

    def _webhooks(self) -> Iterator[Violation]:
        """Each event arrived with a valid signature."""
        due = {event.event_id for event in self.stored.feed if event.position > self.evidence.webhook_from}
        received_ids = {webhook.id for webhook in self.evidence.got}
        self.checked["webhooks"] = len(due)
        if missing := sorted(due - received_ids):
            yield Violation(f"{len(missing)} events did not arrive: {', '.join(missing[:20])}")
        if extra_ids := sorted(received_ids - due):
            yield Violation(f"{len(extra_ids)} webhooks are not of events in the feed: {', '.join(extra_ids[:20])}")
        if unsigned_ids := [webhook.id for webhook in self.evidence.got if not webhook.valid]:
            yield Violation(f"{len(unsigned_ids)} webhooks have a bad signature: {', '.join(unsigned_ids[:20])}")


def _has_failed(ask: Ask) -> bool:
    """Whether the effect has failed, so that the transaction was rolled back."""
    return ask.lost is not None and ask.lost.startswith("EffectFailed")


def _named(rejection: Mapping[str, Any]) -> str | None:
    """The item or group that was rejected; None for a report of Spark, which has only counts."""
    return rejection.get("item") or rejection.get("group")


def _succeeded(row: Any) -> bool:
    return bool(row.state == "complete" and row.failed == 0)


def _completions(ask: Ask) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each batch with the completion in a good answer."""
    if ask.path in ("/v1/acks", "/v1/failures"):
        for entry in ask.answer["completed"]:
            yield entry["batch"], entry
    elif ask.path.endswith("/seal") or (ask.path == "/v1/batches" and ask.method == "POST"):
        yield ask.answer["id"], ask.answer


def _states(ask: Ask) -> Iterator[tuple[int, str]]:
    """Each batch with the state in a good answer."""
    if ask.path in ("/v1/acks", "/v1/failures"):
        for entry in ask.answer["completed"]:
            yield entry["batch"], "complete"
            if entry.get("succeeded"):
                yield entry["batch"], "succeeded"
    elif "state" in ask.answer:
        yield ask.answer["id"], ask.answer["state"]
        if ask.answer["succeeded"]:
            yield ask.answer["id"], "succeeded"


def _issued(ask: Ask) -> tuple[int, int] | None:
    """The batch, and the end of its issued numbers as a good answer shows it."""
    if ask.method == "POST" and "start" in ask.answer:
        return ask.answer.get("batch", ask.answer.get("id")), ask.answer["start"] + ask.answer["count"]
    return None


def _contradictions(ask: Ask, history: History) -> Iterator[str]:
    """The contradictions between an answer that shows a batch and the batch's history."""
    answer = ask.answer
    resolved = answer["acked"] + answer["failed"]
    least = bisect_right(history.answered_times, ask.at)
    maximum = bisect_right(history.asked_times, ask.answered_at)
    if not least <= resolved <= maximum:
        yield f"the answer shows {resolved} resolved items; {least} were before, and {maximum} had been requested"
    if "state" not in answer:
        return
    if answer["complete"] and ask.answered_at < history.may_complete:
        yield "an answer showed it complete before each of its items was requested"
    if answer["succeeded"] and ask.answered_at < history.may_succeed:
        yield "an answer showed it succeeded before an ack of each of its items was requested"
    if not answer["complete"] and history.complete_shown < ask.at:
        yield "an earlier answer showed it complete, this one doesn't"
    if answer["state"] == "open" and min(history.shown.get("sealed", NEVER), history.ended_shown) < ask.at:
        yield "an earlier answer showed it sealed, this one shows it open"
    if answer["state"] == "sealed" and history.ended_shown < ask.at:
        yield "an earlier answer showed it ended, this one shows it sealed"
    if answer["items"] < max((end for time, end in history.issued if time < ask.at), default=0):
        yield f"the answer shows {answer['items']} items, but more were issued before"
    if answer["state"] == "cancelled" and ask.answered_at < history.cancel_asked:
        yield "the answer shows it cancelled without a request"
    if answer["state"] == "sealed" and ask.answered_at < history.seal_asked:
        yield "the answer shows it sealed without a request"
    if answer["state"] == "expired":
        yield "the answer shows it expired"
