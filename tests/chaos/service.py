"""`python -m api`, where some batches are journaled from their first ack on, which in production are large ones alone;
and with the mutant in place that the environment names."""

from __future__ import annotations

import sys

import pytest

from api.__main__ import main
from tests.guarantees import journaled, mutants

# Not below: worker processes import this module again, under another name.
journaled.mix(pytest.MonkeyPatch(), numbers=40)
mutants.from_environment()

if __name__ == "__main__":
    sys.exit(main())
