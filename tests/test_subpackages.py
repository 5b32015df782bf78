"""scripts/subpackages.py rewrites the imports of our programs, and nothing else."""

from __future__ import annotations

import ast
import re

import pytest

from scripts import dist, subpackages
from tests import mutants
from tests.mutants import mutant
from tests.support.servers import ROOT

mutants.from_environment()

PACKAGES = ("core", "api")


@mutant(
    "a-part-of-a-packages-name-is-rewritten",
    "scripts.subpackages:_package",
    'module.partition(".")[0]',
    "module[:4]",
    case="another package",
)
@mutant(
    "relative-imports-are-rewritten",
    "scripts.subpackages:_changes",
    "node.level == 0",
    "True",
    case="relative",
)
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from core import errors", "from ours.core import errors"),
        ("from core.storage import tables as t, x", "from ours.core.storage import tables as t, x"),
        ("from core import (  # core\n    errors,\n)", "from ours.core import (  # core\n    errors,\n)"),
        ("def f():\n    from core import x\n", "def f():\n    from ours.core import x\n"),
        ("if TYPE_CHECKING:\n\tfrom api.app import x\n", "if TYPE_CHECKING:\n\tfrom ours.api.app import x\n"),
        ("a = 'é'; from core import b; import api", "a = 'é'; from ours.core import b; import ours.api as api"),
        ("import core", "import ours.core as core"),
        ("import core as c", "import ours.core as c"),
        ("import core.feed as feed, os", "import ours.core.feed as feed, os"),
        ("import os, core.feed", "import os, ours.core.feed, ours.core as core"),
        ("core = 'from core import errors'  # core", "core = 'from core import errors'  # core"),
        pytest.param("from corearea import tables", "from corearea import tables", id="another package"),
        pytest.param("from .core import errors", "from .core import errors", id="relative"),
        ("from . import core", "from . import core"),
        ("from lastbit import core", "from lastbit import core"),
    ],
)
def test_only_the_names_of_packages_in_imports_are_rewritten(source: str, expected: str) -> None:
    """Comments, texts, layout and other modules remain."""
    assert subpackages.rewritten(source, PACKAGES, "ours") == expected


@mutant(
    "an-unknown-layout-is-rewritten",
    "scripts.subpackages:rewritten",
    "not text.startswith(old.encode(), column)",
    "False",
)
def test_a_layout_that_no_formatter_writes_is_refused() -> None:
    """It would be rewritten at the wrong place."""
    with pytest.raises(SystemExit, match="line 2 "):
        subpackages.rewritten("\nfrom  core import errors", PACKAGES, "ours")


def test_no_text_names_a_module() -> None:
    """It would have another name in the wheel. The jobs are named as the commands that a user of the checkout types."""
    module = re.compile(rf"(?:{'|'.join(dist.PROGRAMS)})(?:\.\w+)+(?::\w+)?")
    texts = {
        node.value
        for path in dist.tracked(*dist.PROGRAMS)
        if path.endswith(".py")
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and module.fullmatch(node.value)
    }
    assert texts == {"jobs.janitor", "jobs.dispatcher"}
