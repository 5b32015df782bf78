"""When LASTBIT_MUTANT names a mutant, the code is broken before the tests import it (see `mutants`)."""

from __future__ import annotations

import pytest

from tests.guarantees import mutants
from tests.guarantees.drivers import journaled

mutants.from_environment()


@pytest.fixture
def some_journaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals some of the batches."""
    journaled.mix(monkeypatch)
