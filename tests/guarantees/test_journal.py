"""The journal of acks in no particular order: whatever is in the journal and in the groups, together they are exact."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors, explain
from core.acks.call import AckResult, Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.bits import cache, journal
from core.bits.cache import BitfieldCache
from core.commits.combiner import Combiner, Commit, Inline
from core.service import Service
from core.storage import schema, tables
from core.storage.database import Database
from tests.guarantees.drivers import journaled
from tests.guarantees.drivers.rounds import recount
from tests.mutants import mutant

SIZE = journal.WIDE
GROUPS = 32
ITEMS = SIZE * GROUPS - 100
CALL = 80


def ack(service: Service, batch: int, numbers: Any, verb: Verb = Verb.ACK, size: int = SIZE) -> AckResult:
    return service.acks.ack(Call.of(verb, [(batch, *divmod(number, size)) for number in numbers])).result(60)


def entries(database: Database) -> int:
    return database.read(lambda tx: tx.scalar(sa.select(sa.func.count()).select_from(tables.ack_journal))) or 0


def journal_size(database: Database) -> int:
    """The number of item numbers and marks in all entries."""
    return database.read(lambda tx: sum(map(len, tx.scalars(sa.select(tables.ack_journal.c.numbers))))) // 4


def rows(database: Database) -> int:
    return database.read(lambda tx: tx.scalar(sa.select(sa.func.count()).select_from(tables.item_groups))) or 0


def open_scattered(service: Service, calls: int, *, sealed: bool = True, seed: int = 1) -> tuple[int, set[int]]:
    """Open a batch and ack random items in `calls` calls; return its id and the acked numbers."""
    batch = service.batches.open(Opening(group_size=SIZE, items=ITEMS, sealed=sealed)).batch.id
    numbers = random.Random(seed).sample(range(ITEMS), calls * CALL)
    for start in range(0, len(numbers), CALL):
        answer = ack(service, batch, numbers[start : start + CALL])
        assert (answer.applied, answer.repeated, answer.completed) == (CALL, 0, {})
    return batch, set(numbers)


def pending(service: Service, batch: int) -> set[int]:
    numbers: set[int] = set()
    start: int | None = 0
    while start is not None:
        page = service.batches.ranges(batch, "pending", start, 100)[1]
        for span in page.ranges:
            numbers.update(range(span.start, span.end))
        start = page.next
    return numbers


def test_acks_in_no_particular_order_go_to_the_journal_and_every_read_includes_them(database: Database) -> None:
    """The first call makes the batch journaled, the others write entries and no groups; every read sees all of them."""
    service = Service(database, combiner=Inline)
    batch, acked = open_scattered(service, 12)
    assert entries(database) == 11
    stranger = Service(database, combiner=Inline)
    missing = set(range(ITEMS)) - acked
    for reader in (service, stranger):
        assert pending(reader, batch) == missing
        assert reader.batches.watermark(batch)[1] == min(missing)
        verification = reader.batches.verify(batch)
        assert verification.ok, verification.faults
        assert (verification.counted_acked, reader.batches.get(batch).acked) == (len(acked), len(acked))
    for group in (0, 7, GROUPS - 1):
        bits = service.batches.bits(batch, group)
        indexes = {number % SIZE for number in acked if number // SIZE == group}
        assert {
            index for index in range(8 * len(bits.resolved)) if bits.resolved[index // 8] >> index % 8 & 1
        } == indexes
        assert bits.tile.resolved == len(indexes)
    tiles = service.batches.picture(batch, 0, 100, 3)[1].tiles
    assert sum(tile.resolved for tile in tiles) == len(acked)
    for tile in tiles:
        first, end = tile.group * SIZE, (tile.group + tile.groups) * SIZE
        assert tile.resolved == sum(first <= number < end for number in acked)
    recount(database)


def test_no_batch_is_journaled_while_a_release_without_a_journal_may_run(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would treat the journal's items as pending, and count them again. Once no earlier release can return, batches
    are journaled."""
    monkeypatch.setattr(cache, "ASK_EVERY", 0)
    with database.engine.begin() as tx:
        tx.execute(sa.update(tables.schema_support).values(oldest="0002"))
    service = Service(database, combiner=Inline)
    open_scattered(service, 3)
    assert entries(database) == 0
    schema.finish(database)
    open_scattered(service, 3, seed=2)
    assert entries(database) == 2


def test_a_group_whose_acks_are_only_in_the_journal_is_not_untouched(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The explanation of a batch that isn't done must not call a group untouched if the journal names its items."""
    monkeypatch.setattr(BitfieldCache, "is_journaled", lambda self, batch: True)
    service = Service(database, combiner=Inline)
    batch = service.batches.open(Opening(group_size=64, items=640, sealed=True)).batch.id
    assert ack(service, batch, (0, 64, 128, 5 * 64), size=64).applied == 4
    assert (entries(database), rows(database)) == (1, 0)
    explanation = database.snapshot(explain.explain, batch)
    (reason_,) = (reason for reason in explanation.reasons if reason.code == "oldest_untouched_group")
    assert reason_.facts["group"] == 3


def journaled_items(database: Database, batch: int) -> dict[int, Any]:
    """The items of the batch that are in the journal alone."""
    return dict(database.read(journal.recent, batch, SIZE))


@mutant(
    "a-fold-writes-what-has-changed-now",
    "core.bits.journal:write",
    "{*due, *change.changed} if direct else due",
    "change.changed if direct or due else ()",
)
def test_the_journal_is_folded_when_it_is_full_and_when_the_batch_completes(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fold moves the journal's items to the groups and empties the journal; a complete batch has full groups
    without a blob."""
    monkeypatch.setattr(journal, "LEAST", 5 * CALL)
    monkeypatch.setattr(journal, "MOST", 5 * CALL)
    service = Service(database, combiner=Inline)
    batch, acked = open_scattered(service, 5)
    assert entries(database) == 4
    # These items are in four groups; the items of all other groups are in the journal alone.
    additional = [number for number in range(0, 4 * SIZE, 80) if number not in acked]
    assert ack(service, batch, additional).applied == len(additional)
    assert (journaled_items(database, batch), entries(database)) == ({}, 1)
    acked.update(additional)
    assert pending(service, batch) == set(range(ITEMS)) - acked
    repeats = random.Random(2).sample(sorted(set(range(ITEMS)) - acked), CALL)
    assert ack(service, batch, repeats).applied == CALL
    assert sum(map(len, journaled_items(database, batch).values())) == CALL
    remaining = sorted(set(range(ITEMS)) - acked - set(repeats))
    for start in range(0, len(remaining), 9000):
        answer = ack(service, batch, remaining[start : start + 9000])
    assert answer.completed[batch].newly
    assert entries(database) == 0
    columns = tables.item_groups.c
    with database.engine.connect() as tx:
        blobs = tx.scalar(sa.select(sa.func.count()).where(columns.batch_id == batch, columns.resolved.is_not(None)))
    assert blobs == 0
    assert service.batches.verify(batch).ok


@mutant(
    "a-completing-seal-leaves-the-journal",
    "core.batches.writing:BatchWrites._sealed",
    "after.complete and batch.journal_next",
    "False",
)
@mutant("a-fold-by-a-seal-is-not-announced", "core.bits.folding:fold", "return state.next", "return journal_next")
@pytest.mark.parametrize("failures", [0, 3])
def test_a_seal_that_completes_folds_the_journal(database: Database, failures: int) -> None:
    """As the last ack does. Other processes, and this one's cache, see the batch as it is then."""
    service, other = (Service(database, combiner=Inline) for _ in range(2))
    batch, acked = open_scattered(service, 12, sealed=False)
    remaining = sorted(set(range(ITEMS)) - acked)
    failed_numbers = remaining[:: len(remaining) // failures][:failures] if failures else []
    if failed_numbers:
        assert ack(other, batch, failed_numbers, Verb.FAIL).applied == failures
    rest = sorted(set(remaining) - set(failed_numbers))
    masks = {number // SIZE: bytearray(SIZE // 8) for number in rest}
    for number in rest:
        masks[number // SIZE][number % SIZE // 8] |= 1 << number % 8
    held_back = rest[::1009]
    for number in held_back:  # these are acked last, in no particular order
        masks[number // SIZE][number % SIZE // 8] &= ~(1 << number % 8)
    for group, mask in masks.items():
        service.acks.ack(Call.of(Verb.ACK, [], [(batch, group, bytes(mask))])).result(60)
    assert ack(other, batch, held_back).applied == len(held_back)
    assert entries(database) > 0
    assert journaled_items(database, batch)
    before = service.batches.get(batch).journal_next
    sealed = service.batches.seal(batch)
    assert (sealed.newly, sealed.newly_succeeded) == (True, not failures)
    assert (entries(database), journaled_items(database, batch)) == (0, {})
    assert service.batches.get(batch).journal_next > before
    columns = tables.item_groups.c
    with database.engine.connect() as tx:
        assert tx.scalar(sa.select(sa.func.sum(columns.resolved_count)).where(columns.batch_id == batch)) == ITEMS
        assert (
            tx.scalar(sa.select(sa.func.count()).where(columns.batch_id == batch, columns.resolved.is_not(None))) == 0
        )
    for reader in (service, other):
        assert ack(reader, batch, [*held_back, *failed_numbers[:1]]).applied == (
            1 if failed_numbers[:1] and reader is service else 0
        )
        assert reader.batches.verify(batch).ok
        assert pending(reader, batch) == set()
    recount(database)
    service.batches.delete(batch)
    assert (entries(database), rows(database)) == (0, 0)


@mutant(
    "entries-go-before-all-their-groups-are-folded",
    "core.bits.journal:JournalState.trim",
    "self.entries[0][0] < oldest",
    "len(self.entries) > 1",
)
@mutant(
    "an-entry-is-forgotten-that-named-a-group-before",
    "core.bits.journal:JournalState.name_groups",
    "group not in self.unfolded",
    "group is not None",
)
def test_groups_are_folded_in_portions_in_their_order(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call waits for a thousand groups, and the journal doesn't grow beyond twice its limit."""
    monkeypatch.setattr(journal, "LEAST", 5 * CALL)
    monkeypatch.setattr(journal, "MOST", 5 * CALL)
    monkeypatch.setattr(journal, "PORTION", 8)
    service = Service(database, combiner=Inline)
    batch = service.batches.open(Opening(group_size=SIZE, items=ITEMS, sealed=True)).batch.id
    numbers = random.Random(3).sample(range(ITEMS), 60 * CALL)
    sizes_written: list[list[int]] = []
    write = journal.write

    def watched(*arguments: Any) -> tuple[list[str], list[int]]:
        texts, groups = write(*arguments)
        sizes_written.append(groups)
        return texts, groups

    monkeypatch.setattr(journal, "write", watched)
    largest = 0
    for start in range(0, len(numbers), CALL):
        assert ack(service, batch, numbers[start : start + CALL]).applied == CALL
        largest = max(largest, journal_size(database))
    assert 5 * CALL <= largest <= 10 * CALL
    assert max(map(len, sizes_written)) == 8
    rounds = "".join("." if not groups else f"[{groups[0]}-{groups[-1]}]" for groups in sizes_written)
    assert rounds.startswith("....[0-7][8-15][16-23][24-31].")
    assert sum(map(len, sizes_written)) < 59 * CALL / 8
    assert entries(database) < 20
    recount(database)


def test_alternating_processes_read_no_group_again_though_the_others_fold(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries show each process what the others did; groups are read again only for failures, redriven items and
    masks."""
    monkeypatch.setattr(journal, "LEAST", 20 * CALL)
    monkeypatch.setattr(journal, "MOST", 20 * CALL)
    batch, acked = open_scattered(Service(database, combiner=Inline), 2)
    commits: list[Commit] = []

    def listening(commit: Commit) -> Inline:
        commits.append(commit)
        return Inline(commit)

    services = [Service(database, combiner=listening) for _ in range(3)]
    starts = [group * SIZE for group in range(GROUPS)]
    for service in services:
        ack(service, batch, starts)
    read: list[list[int]] = []
    fetch = journal.fetch

    def watched(tx: Any, batch_id: int, size: int, state: journal.JournalState, groups: Any) -> list[int]:
        fetched = fetch(tx, batch_id, size, state, groups)
        read.append(fetched)
        return fetched

    monkeypatch.setattr(journal, "fetch", watched)
    remaining = sorted(set(range(ITEMS)) - acked - set(starts))
    random.Random(4).shuffle(remaining)
    for turn in range(90):
        # Two calls in one flush.
        parts = [[remaining.pop() for _ in range(CALL // 2)] for _ in range(2)]
        calls = [Call.of(Verb.ACK, [(batch, *divmod(number, SIZE)) for number in part]) for part in parts]
        units = [unit for call in calls for unit in call.chunks()]
        assert [answer.applied for answer in commits[turn % 3](units, lock_waits=4)] == [CALL // 2] * 2
    assert not any(read)
    assert len(read) > 90
    read.clear()
    assert ack(services[0], batch, [remaining[-1]], Verb.FAIL).applied == 1
    assert ack(services[1], batch, remaining[-CALL:]).applied == CALL
    assert [group for group in read if group] == [[remaining[-1] // SIZE]]
    recount(database)


def test_a_process_that_is_alone_reads_entries_only_if_another_has_written_some(database: Database) -> None:
    """Then it applies them as ever, and expects more."""
    service, stranger = (Service(database, combiner=Inline) for _ in range(2))
    batch, acked = open_scattered(service, 3 + journal.ALONE)
    queries: list[str] = []

    @sa.event.listens_for(database.engine, "before_cursor_execute")
    def watch(_: object, __: object, statement: str, *___: object) -> None:
        if "FROM ack_journal" in statement and statement.startswith("SELECT"):
            queries.append(statement)

    remaining = sorted(set(range(ITEMS)) - acked)
    random.Random(5).shuffle(remaining)
    own, others = remaining[:CALL], remaining[CALL : 2 * CALL]
    assert ack(service, batch, own).applied == CALL
    assert queries == []
    assert ack(stranger, batch, others).applied == CALL
    queries.clear()
    answer = ack(service, batch, [*own, *others, *remaining[-CALL:]])
    assert (answer.applied, answer.repeated) == (CALL, 2 * CALL)
    assert ack(service, batch, others).repeated == CALL
    assert len(queries) == 2
    recount(database)


@mutant("redriven-items-are-entries", "core.acks.apply:_ack_few", "state.acked.pop(unit.batch, None)", "")
def test_changes_that_do_not_fit_an_entry_are_written_to_their_groups(database: Database) -> None:
    """Failures, redriven items, masks, and another process's repeats of items that the journal names."""
    batch, acked = open_scattered(Service(database, combiner=Inline), 6)
    service = Service(database, combiner=Inline)
    sample = sorted(acked)[::7]
    assert ack(service, batch, sample, Verb.FAIL).repeated == len(sample)
    failed_numbers = sorted(set(range(ITEMS)) - acked)[::801]
    assert ack(service, batch, [*failed_numbers, *sample], Verb.FAIL).applied == len(failed_numbers)
    assert service.batches.get(batch).failed == len(failed_numbers)
    assert ack(service, batch, [*failed_numbers[:9], *sample]).applied == 9
    mask = bytes([255]) * (SIZE // 8)
    before = len({number for number in acked | set(failed_numbers[:9]) if number // SIZE == 3})
    answer = service.acks.ack(Call.of(Verb.ACK, [], [(batch, 3, mask)])).result(60)
    assert (answer.applied, answer.repeated) == (SIZE - before, before)
    for reader in (service, Service(database, combiner=Inline)):
        verification = reader.batches.verify(batch)
        assert verification.ok, verification.faults
    recount(database)


def test_a_journaled_batch_can_grow_to_any_size(database: Database) -> None:
    """Its item numbers no longer fit into an entry, and are written to their groups."""
    service = Service(database, combiner=Inline)
    batch, acked = open_scattered(service, 3, sealed=False)
    assert entries(database) == 2
    service.batches.extend(batch, 10**12 - ITEMS)
    numbers = [10**12 - 1 - 1_000_000_007 * place for place in range(CALL)]
    assert ack(service, batch, numbers).applied == CALL
    assert ack(Service(database, combiner=Inline), batch, [*numbers, *sorted(acked)[:50]]).repeated == CALL + 50
    assert service.batches.watermark(batch)[1] == min(set(range(ITEMS)) - acked)
    recount(database)


def test_the_journal_of_a_removed_batch_is_removed(database: Database) -> None:
    """Nothing of it is left, and later acks name an unknown batch."""
    service = Service(database, combiner=Inline)
    batch, acked = open_scattered(service, 4)
    service.batches.delete(batch)
    assert (entries(database), rows(database)) == (0, 0)
    answer = ack(service, batch, sorted(acked)[:3])
    assert [rejection.reason for rejection in answer.rejected] == ["unknown_batch"] * 3
    with pytest.raises(errors.BatchNotFound):
        service.batches.verify(batch)


def test_groups_that_do_not_fit_the_cache_are_read_again(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for ten groups, nearly everything is read again for each call."""
    monkeypatch.setattr("core.service.acks.BitfieldCache", lambda: BitfieldCache(10))
    service = Service(database, combiner=Inline)
    first, acked = open_scattered(service, 5)
    other, acked_too = open_scattered(service, 5, seed=2)
    for batch, expected_acked in ((first, acked), (other, acked_too)):
        assert ack(service, batch, expected_acked).repeated == len(expected_acked)
        assert service.batches.verify(batch).ok


@pytest.mark.mariadb
def test_a_reader_never_misses_an_item_whose_ack_was_answered(
    server_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While two processes ack at random and fold, no item is pending on a page that was requested after its ack was
    answered."""
    journaled.mix(monkeypatch, 300)
    url = server_database.url.render_as_string(hide_password=False)
    size, items = 64, 64 * 60
    service = Service(server_database, combiner=Inline)
    for _ in range(3):  # one of the three is journaled
        batch = service.batches.open(Opening(group_size=size, items=items, sealed=True)).batch.id
        if batch % 3 == 0:
            break
    order = random.Random(5).sample(range(items), items)
    acked_numbers: set[int] = set()
    completions: list[int] = []
    trouble: list[BaseException] = []
    pages, page_read = 0, threading.Condition()

    def consume(place: int) -> None:
        try:
            with Database(url) as database:
                consumer_service = Service(database, combiner=Combiner)
                for start in range(place * 20, items, 40):
                    with page_read:  # so that there are enough pages, however slow they are
                        page_read.wait_for(lambda start=start: start < items * (pages + 1) / 15, timeout=30)
                    part = order[start : start + 20]
                    answer = ack(consumer_service, batch, part, size=size)
                    assert answer.applied == len(part)
                    completions.extend(completion.batch for completion in answer.completed.values() if completion.newly)
                    acked_numbers.update(part)
                consumer_service.stop()
        except BaseException as error:  # noqa: BLE001  # raised again below
            trouble.append(error)

    threads = [threading.Thread(target=consume, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        before = set(acked_numbers)
        misses = before & pending(service, batch)
        assert not misses, f"{len(misses)} items on the page were acked before it was requested"
        with page_read:
            pages += 1
            page_read.notify_all()
    for thread in threads:
        thread.join()
    if trouble:
        raise trouble[0]
    assert completions == [batch]
    assert pages > 10
    assert service.batches.verify(batch).ok
    recount(server_database)
