"""`python -m api`, with the mutant in place that the environment names."""

from __future__ import annotations

import sys

from api.__main__ import main
from tests.guarantees import mutants

# Not below: worker processes import this module again, under another name.
mutants.from_environment()

if __name__ == "__main__":
    sys.exit(main())
