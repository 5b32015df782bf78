"""A missing extra is reported by its name."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.servers import ROOT


@pytest.mark.parametrize(
    ("module", "library"),
    [
        ("aws_lambda", "aws_lambda_powertools.utilities.batch"),
        ("dramatiq", "dramatiq"),
        ("rq", "rq"),
        ("sqs", "botocore.exceptions"),
        ("taskiq", "taskiq"),
    ],
)
def test_a_missing_library_names_the_extra(module: str, library: str) -> None:
    """When the module is imported."""
    program = f"import sys; sys.modules[{library!r}] = None; import lastbit.integrations.{module}"
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    assert re.search("MissingExtra: .* needs more than the bare client", process.stderr)
    extra = module.replace("_", "-")
    assert f"pip install 'lastbit[{extra}]'" in process.stderr


def test_airflow_is_imported_with_the_first_name() -> None:
    """Not with the package: Airflow itself imports it to read the provider's description."""
    program = (
        "import sys; sys.modules['airflow'] = None; from lastbit.integrations.airflow import provider; "
        "print(provider.get_provider_info()['package-name'], 'httpx' in sys.modules, flush=True); "
        "from lastbit.integrations.airflow import LastbitBatchSensor"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.stdout.split() == ["lastbit", "False"]
    assert process.returncode == 1
    assert "MissingExtra: lastbit.integrations.airflow needs more than the bare client" in process.stderr
    assert "pip install 'lastbit[airflow]'" in process.stderr


def test_the_service_in_ones_own_process_is_an_extra() -> None:
    """When its first module is wanted."""
    program = "import sys; sys.modules['lastbit_server'] = None; from lastbit import _server; _server.program('core')"
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    assert "MissingExtra: lastbit.embedded needs more than the bare client" in process.stderr
    assert "pip install 'lastbit[embedded]'" in process.stderr
