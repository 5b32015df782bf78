"""When LASTBIT_MUTANT names a mutant, the code is broken before the tests import it (see
`tests.mutants`)."""

from __future__ import annotations

from tests import mutants

mutants.from_environment()
