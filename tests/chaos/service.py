"""`python -m api`, where some batches are journaled from their first ack on (in production only large ones are), and
with the mutant that the environment names. With LASTBIT_CHAOS_ALL_LARGE no batch is journaled, and each flush locks the
rows of batches last, as flushes of masks and of many ids do in production."""

from __future__ import annotations

import os
import sys

import pytest

from api.__main__ import main
from tests import mutants
from tests.guarantees.drivers import journaled

# At the top level, since worker processes import this module again under another name.
if "LASTBIT_CHAOS_ALL_LARGE" in os.environ:
    pytest.MonkeyPatch().setattr("core.acks.flush._is_little", lambda units: False)
else:
    journaled.mix(pytest.MonkeyPatch(), numbers=40)
mutants.from_environment()

if __name__ == "__main__":
    sys.exit(main())
