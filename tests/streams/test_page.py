"""The snippets of docs/streams.md run in order, and their assertions hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.servers import ROOT
from tests.test_docs import blocks


def test_the_snippets_of_the_page_run(tmp_path: Path) -> None:
    """As one script, with the library alone."""
    script = tmp_path / "streams.py"
    script.write_text("\n".join(blocks(ROOT / "docs/streams.md", "python")))
    process = subprocess.run(
        [sys.executable, str(script)], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
