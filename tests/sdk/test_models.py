"""Answers as values."""

from __future__ import annotations

import dataclasses
import pickle
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastbit import errors, ids, models

BATCH: dict[str, Any] = {
    "id": 7,
    "key": "catalog-42",
    "labels": {"team": "search"},
    "state": "sealed",
    "group_size": 8192,
    "items": 10,
    "acked": 4,
    "failed": 1,
    "pending": 5,
    "complete": False,
    "succeeded": False,
    "parent": None,
    "expires_in": None,
    "deadline": None,
    "tolerated_failures": None,
    "tolerated_failure_percentage": None,
    "on_exceeded": "continue",
    "exceeded": False,
    "created_at": "2026-01-02T03:04:05Z",
    "updated_at": "2026-01-02T03:04:05.123456Z",
    "sealed_at": "2026-01-02T05:04:05+02:00",
    "ended_at": None,
}


def test_a_batch_decodes_with_aware_utc_times() -> None:
    """With every UTC offset."""
    batch = models.Batch.from_json(BATCH)
    assert batch.created_at == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert batch.updated_at.microsecond == 123456
    assert batch.sealed_at == batch.created_at
    assert batch.sealed_at is not None
    assert batch.sealed_at.tzinfo is UTC
    assert batch.ended_at is None
    assert (batch.resolved, batch.ended) == (5, False)


def test_fields_of_a_newer_service_are_ignored() -> None:
    """In every answer."""
    extra = {"colour": "red"}
    assert models.Batch.from_json({**BATCH, **extra}) == models.Batch.from_json(BATCH)
    completion = {"batch": 7, "key": None, "newly": True, "succeeded": True, "newly_succeeded": True, **extra}
    result = {
        "applied": 1,
        "repeated": 0,
        "completed": [completion],
        "rejected": [{"item": "7:0:1", "reason": "x", **extra}],
    }
    assert models.AckResult.from_json({**result, **extra}).completed[0].newly


def test_a_time_without_a_zone_is_refused() -> None:
    """No zone is assumed."""
    with pytest.raises(ValueError, match="time zone"):
        models.Batch.from_json({**BATCH, "created_at": "2026-01-02T03:04:05"})


def test_answers_cannot_be_changed() -> None:
    """Answers are immutable."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        models.Batch.from_json(BATCH).acked = 5  # type: ignore[misc]


def test_an_open_returns_its_issued_ids() -> None:
    """As a lazy range with the batch's own group size."""
    answer = models.Opened.from_json({**BATCH, "group_size": 64, "start": 60, "count": 8, "newly": False})
    assert list(answer.ids)[3:6] == ["7:0:63", "7:1:0", "7:1:1"]


flags = st.booleans()
completions = st.builds(models.Completed, st.integers(0, 3), st.just("k"), flags, flags, flags)
rejections = st.builds(models.Rejected, st.just("unknown_item"), st.just("7:0:1"))
results = st.builds(
    models.AckResult,
    st.integers(0, 9),
    st.integers(0, 9),
    st.lists(completions, max_size=4, unique_by=lambda completion: completion.batch).map(tuple),
    st.lists(rejections, max_size=3).map(tuple),
)


@given(results, results, results)
def test_merging_answers_does_not_depend_on_how_they_are_grouped(
    first: models.AckResult, second: models.AckResult, third: models.AckResult
) -> None:
    """Counts add up, each batch is named once, and `newly` in one answer is `newly` in the merged one."""
    total = first.merged(second).merged(third)
    assert total == first.merged(second.merged(third))
    assert total.applied == first.applied + second.applied + third.applied
    batches = [completion.batch for completion in total.completed]
    assert len(batches) == len(set(batches))
    for completion in total.completed:
        parts = [
            part for result in (first, second, third) for part in result.completed if part.batch == completion.batch
        ]
        assert completion.newly == any(part.newly for part in parts)
        assert completion.succeeded == any(part.succeeded for part in parts)


def test_a_rejected_mask_counts_its_bits() -> None:
    """An id counts as one, a mask's entry has a count."""
    result = models.AckResult.from_json(
        {
            "applied": 0,
            "repeated": 0,
            "completed": [],
            "rejected": [
                {"item": "7:0:1", "reason": "expired"},
                {"group": "7:2", "reason": "unknown_item", "count": 5},
            ],
        }
    )
    assert result.rejected_count == 6


@given(st.integers(0, 10**6), st.integers(1, 500), st.sampled_from([64, 128, 8192, 32768]))
def test_a_pending_range_expands_to_its_ids(start: int, count: int, group_size: int) -> None:
    """The group size follows from the ends, so that a range can be published again without another request."""
    numbers = range(start, start + count)
    expected = ids.ItemIds(7, group_size, numbers)
    item_range = models.PendingRange(start, start + count, expected[0], expected[-1])
    assert list(item_range.ids) == list(expected)
    assert item_range.count == count


def every_error() -> list[errors.LastbitError]:
    batch = models.Batch.from_json(BATCH)
    return [
        errors.service_error(404, "batch_not_found", "batch 7 is not known", [{"place": "batch"}], 1.5),
        errors.ServiceUnreachable("http://x", "GET /v1/batches/7", "refused", 3, 1.25),
        errors.UnexpectedAnswer("http://x", "GET /", 200, "the response is not JSON"),
        errors.WaitTimeout(batch, 5),
        errors.ItemRejected("7:0:1", "expired"),
        errors.AckerClosed(),
        errors.NotRefreshed(7),
        errors.MessagesDiffer("run-1", 0, 1000),
        errors.MessagesRefused(["7:0:1"]),
        errors.MissingExtra("cli", "a bar"),
        errors.NoCurrentItem(),
        errors.InvalidArgument("no"),
        errors.MalformedItem("7:0", 3),
    ]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_errors_can_be_pickled(error: errors.LastbitError) -> None:
    """With its class, its message and its data."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("status", "code", "kind", "is_temporary"),
    [
        (404, "batch_not_found", errors.BatchNotFound, False),
        (409, "batch_sealed", errors.BatchSealed, False),
        (409, "batch_cancelled", errors.BatchEnded, False),
        (422, "idempotency_key_reused", errors.IdempotencyKeyReused, False),
        (409, "batch_frozen", errors.Conflict, False),
        (418, "teapot", errors.ServiceError, False),
        (429, "rate_limited", errors.RateLimited, True),
        (429, "http_429", errors.RateLimited, True),
        (500, "internal", errors.ServiceError, True),
        (503, "unavailable", errors.Unavailable, True),
        (502, "http_502", errors.Unavailable, True),
    ],
)
def test_a_problem_has_the_class_of_its_code_or_else_of_its_status(
    status: int, code: str, kind: type[errors.ServiceError], is_temporary: bool
) -> None:
    """So that a code newer than this client still has a fitting class."""
    error = errors.service_error(status, code, "detail")
    assert type(error) is kind
    assert (error.status, error.code, error.detail) == (status, code, "detail")
    assert error.is_temporary is is_temporary
    assert pickle.loads(pickle.dumps(error)).is_temporary is is_temporary


def test_only_failures_to_respond_are_temporary_apart_from_those() -> None:
    temporary = {type(error) for error in every_error() if error.is_temporary}
    assert temporary == {errors.ServiceUnreachable, errors.UnexpectedAnswer}
