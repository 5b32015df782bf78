"""Processes of Lastbit under `opentelemetry-instrument`, whose spans are printed by the console exporter of the SDK."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from tests.support.servers import ROOT, ServiceProcess

INSTRUMENT = Path(sys.executable).parent / "opentelemetry-instrument"
ENVIRONMENT = {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}


class TracedService(ServiceProcess):
    """A service that appends its spans to the file `spans`, at the latest when it is stopped."""

    def __init__(self, database_url: str, spans: Path, **environment: str) -> None:
        super().__init__(database_url, environment=environment)
        self.spans = spans

    def _spawn(self, log: IO[bytes] | None) -> None:
        arguments = ["--port", str(self.port), "--database-url", self.database_url]
        with self.spans.open("ab") as output:
            self.process = subprocess.Popen(
                [INSTRUMENT, sys.executable, "-m", self.module, *arguments],
                cwd=ROOT,
                env={"LASTBIT_LOG_LEVEL": "warning", **os.environ, **ENVIRONMENT, **self.environment},
                stdout=output,
                start_new_session=True,
            )


def dispatch(database_url: str, spans: Path, **environment: str) -> None:
    """Run `jobs.dispatcher --once` in the same way."""
    with spans.open("ab") as output:
        subprocess.run(
            [INSTRUMENT, sys.executable, "-m", "jobs.dispatcher", "--once", "--database-url", database_url],
            cwd=ROOT,
            env={"LASTBIT_LOG_LEVEL": "warning", **os.environ, **ENVIRONMENT, **environment},
            stdout=output,
            timeout=120,
            check=True,
        )


def read(spans: Path) -> list[dict[str, Any]]:
    """The spans of this project in the file. FastAPI has some of its own."""
    decoder, text, found = json.JSONDecoder(), spans.read_text(), []
    while text := text.lstrip():
        span, end = decoder.raw_decode(text)
        found.append(span)
        text = text[end:]
    return [span for span in found if any(name.startswith("lastbit.") for name in span["attributes"])]
