"""`python -m jobs.dispatcher`, but it never pays the debts of nested batches. So a debt that its call has forgotten
stays, and each read of the parent shows it."""

from __future__ import annotations

import sys

import pytest

from jobs.dispatcher import main

if __name__ == "__main__":
    pytest.MonkeyPatch().setattr("core.acks.parents.sweep", lambda *_, **__: 0)
    sys.exit(main())
