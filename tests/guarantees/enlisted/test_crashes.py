"""A caller dies at each point of its transaction, of what makes its batch ready before, and of what counts after it.

As in `tests.guarantees.test_crashes`, but the request runs in a transaction of a caller. Then either the caller repeats
it, or another process moves what is left, and a service gets the repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from core.acks import parents
from core.batches import nesting
from core.commits.combiner import Inline
from core.enlisted import mover
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from tests.guarantees.drivers import journaled
from tests.guarantees.enlisted.service import EnlistingService
from tests.guarantees.models.service import Model, Request, assert_equal, perform
from tests.guarantees.programs.dying import Mortals
from tests.guarantees.test_crashes import (
    Ground,
    acks_into_groups_that_have_a_row,
    acks_into_new_groups,
    acks_skipped_items,
    completes_a_child,
    completes_the_batch,
    completes_two_batches_in_one_transaction,
    dying,
    extends,
    extends_on_behalf_of_an_item,
    extends_until_it_seals_itself,
    fails_with_a_reason_and_completes,
    is_redriven_within_the_tolerance,
    opens_a_batch,
    opens_a_batch_that_is_complete_at_once,
    passes_the_tolerance,
    passes_the_tolerance_of_a_child_which_is_cancelled,
    redrives_the_last_failed_items,
    skips_with_a_reason_and_completes,
)
from tests.mutants import mutant

__all__ = ["dying"]

ACKS: list[Callable[[Ground], Request]] = [
    *(acks_into_new_groups, acks_into_groups_that_have_a_row, completes_the_batch, fails_with_a_reason_and_completes),
    *(skips_with_a_reason_and_completes, acks_skipped_items, redrives_the_last_failed_items),
    *(completes_two_batches_in_one_transaction, passes_the_tolerance, is_redriven_within_the_tolerance),
    *(completes_a_child, passes_the_tolerance_of_a_child_which_is_cancelled),
]
WRITES: list[Callable[[Ground], Request]] = [
    *(opens_a_batch, opens_a_batch_that_is_complete_at_once),
    *(extends, extends_until_it_seals_itself, extends_on_behalf_of_an_item),
]


PATIENCE = 60
"""Seconds in which a server notices that a dead process's session is gone, and its locks with it."""
OFTEN = [acks_into_new_groups, completes_the_batch, opens_a_batch, extends_on_behalf_of_an_item]


def _rarely(scenarios: list[Callable[[Ground], Request]], often: list[Callable[[Ground], Request]]) -> list[object]:
    return [each if each in often else pytest.param(each, marks=pytest.mark.slow) for each in scenarios]


@mutant(
    "the-outbox-is-emptied-in-a-transaction-of-its-own",
    "core.enlisted.mover:move",
    "waiting = outbox.take(pipeline, counts)",
    """
waiting = outbox.take(pipeline, counts)
pipeline.flush()
tx.commit()
""",
    case="sqlite-completes_the_batch-repeated",
)
@mutant(
    "a-repeat-leaves-what-waits",
    "core.service.enlisted:EnlistedService._settled",
    "not self._database.read(_may_be_complete, batch)",
    "not claims or not self._database.read(_may_be_complete, batch)",
    case="sqlite-completes_the_batch-repeated",
)
@mutant(
    "events-that-wait-are-appended-and-stay",
    "core.feed:_taken",
    "pipeline.later(f\"DELETE FROM event_outbox WHERE id IN ({','.join(map(str, part))})\")",
    "pass",
    case="sqlite-opens_a_batch-moved by another",
)
@pytest.mark.parametrize("moved_by_another", [False, True], ids=["repeated", "moved by another"])
@pytest.mark.parametrize("scenario", _rarely([*ACKS, *WRITES], OFTEN), ids=lambda scenario: scenario.__name__)
def test_a_retry_after_a_crash_at_any_point_matches_the_model(
    database: Database, dying: Mortals, scenario: Callable[[Ground], Request], moved_by_another: bool
) -> None:
    _die_everywhere(database, dying, scenario, moved_by_another=moved_by_another)


@pytest.mark.parametrize("moved_by_another", [False, True], ids=["repeated", "moved by another"])
@pytest.mark.nightly
@pytest.mark.parametrize("scenario", [*ACKS, extends_on_behalf_of_an_item], ids=lambda scenario: scenario.__name__)
def test_a_retry_after_a_crash_at_any_point_matches_the_model_for_a_batch_that_was_journaled(
    database: Database,
    dying: Mortals,
    scenario: Callable[[Ground], Request],
    moved_by_another: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was acked before is in the journal, which the caller has to fold."""
    journaled.everything(monkeypatch)
    _die_everywhere(database, dying, scenario, moved_by_another=moved_by_another)


def _die_everywhere(
    database: Database, dying: Mortals, scenario: Callable[[Ground], Request], *, moved_by_another: bool
) -> None:
    url = database.url.render_as_string(hide_password=False)
    deaths: list[str] = []
    while True:
        ground = Ground(Service(database, combiner=Inline), Model())
        request = scenario(ground)
        death = dying.run(url, request, len(deaths), enlisted=True)
        if death is None or death.commits:
            ground.model.perform(request, _newest(database))
        _assert_what_waits_is_known(ground, death.where if death else "")
        if moved_by_another:
            _sweep(database)
            assert_equal(ground.service, ground.model)
        retrying = ground.service if moved_by_another else EnlistingService(database, combiner=Inline)
        answer = perform(retrying, request)
        expected = ground.model.perform(request, answer.get("batch"))
        is_told = death is None or not death.commits
        assert _told(answer, is_told) == _told(expected, is_told), death
        _sweep(database)
        assert_equal(ground.service, ground.model)
        _assert_feed_has_no_gap(database)
        retrying.enlisted.stop()
        if death is None:
            break
        deaths.append(death.where)
        assert len(deaths) < 200
    assert "after COMMIT" in deaths
    commits = deaths.count("after COMMIT")
    assert commits >= 2, f"the caller's transaction and the mover's commit: {deaths}"


def _told(answer: dict[str, object], newly: bool) -> dict[str, object]:
    """The answer, without what is claimed after the commit. If the process dies before, no call is told."""
    completed = answer.get("completed")
    if newly or not isinstance(completed, dict):
        return answer
    kept = {batch: {name: entry[name] for name in ("key", "succeeded")} for batch, entry in completed.items()}
    return answer | {"completed": kept}


def _assert_what_waits_is_known(ground: Ground, where: str) -> None:
    """Counts that wait are no fault, and those of bits are the model's."""
    for batch in ground.model.batches.values():
        verification = ground.service.batches.verify(batch.id)
        assert verification.ok, (where, verification.faults)
        counted = verification.counted_acked, verification.counted_failed, verification.counted_skipped
        if batch.parent is None and batch.live:
            assert counted == (len(batch.acked), len(batch.failed), len(batch.skipped)), where


def _sweep(database: Database) -> None:
    """What services and dispatchers do until nothing waits."""
    outboxes = (tables.count_outbox, tables.event_outbox)
    until = time.monotonic() + PATIENCE
    while any(_rows(database, outbox) for outbox in outboxes) or database.read(nesting.debts):
        assert time.monotonic() < until
        mover.sweep(database)
        parents.sweep(database)


def _rows(database: Database, table: sa.Table) -> int:
    with database.engine.connect() as tx:
        return int(tx.scalar(sa.select(sa.func.count()).select_from(table)) or 0)


def _newest(database: Database) -> int | None:
    with database.engine.connect() as tx:
        newest: int | None = tx.scalar(sa.select(sa.func.max(tables.batches.c.id)))
        return newest


def _assert_feed_has_no_gap(database: Database) -> None:
    with database.engine.connect() as tx:
        positions = tx.scalars(sa.select(tables.feed.c.position).order_by(tables.feed.c.position)).all()
    assert positions == list(range(1, len(positions) + 1))
