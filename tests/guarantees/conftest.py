"""Where LASTBIT_MUTANT names a mutant, the code is broken before the tests see it (see `mutants`)."""

from __future__ import annotations

from tests.guarantees import mutants

mutants.from_environment()
