"""When LASTBIT_MUTANT names a mutant, the code is broken before the tests import it (see
`tests.mutants`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lastbit import tokens
from lastbit.tokens import Role
from tests import mutants
from tests.support.servers import running_service, sqlite_file

mutants.from_environment()

TOKEN = tokens.new()


@pytest.fixture(scope="module")
def tokens_url() -> Iterator[str]:
    """The URL of a service that knows one token, and refuses all others for good."""
    line = tokens.known(TOKEN, "ci", list(Role)).line()
    with sqlite_file() as database, running_service(database, LASTBIT_TOKENS=line) as service:
        yield service.url
