"""When LASTBIT_MUTANT names a mutant, the code is broken before the tests import it (see `tests.mutants`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import mutants
from tests.guarantees.drivers import journaled
from tests.support.locking import watched

mutants.from_environment()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[Any]:
    """A test fails if a transaction of this process breaks the order of the locks."""
    with watched() as problems:
        result = yield
    assert not problems, problems[0]
    return result


@pytest.fixture
def some_journaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals some of the batches."""
    journaled.mix(monkeypatch)
