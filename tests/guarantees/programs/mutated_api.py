"""`python -m api`, with the mutant that the environment names."""

from __future__ import annotations

import sys

from api.__main__ import main
from tests import mutants

if __name__ == "__main__":
    mutants.from_environment()
    sys.exit(main())
