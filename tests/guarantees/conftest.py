"""Where LASTBIT_MUTANT names a mutant, the code is broken before the tests see it (see `mutants`)."""

from __future__ import annotations

import pytest

from tests.guarantees import mutants
from tests.guarantees.drivers import journaled

mutants.from_environment()


@pytest.fixture
def some_journaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all batches, some are journaled."""
    journaled.mix(monkeypatch)
