"""`lastbit …` as a process, recorded: one call of it is one request."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from typing import Any

from lastbit import errors
from tests.chaos.record import Record
from tests.support.servers import ROOT

_REFUSED = re.compile(r"\((\d{3}) (\w+)\)")


class CommandLine:
    def __init__(self, url: str, record: Record) -> None:
        self._url = url
        self._record = record

    def run(self, arguments: list[str], path: str, body: Any, *, key: str | None = None, input: str = "") -> Any:
        """Run the command with `input` as standard input and return its JSON output. It is recorded as the POST of
        `body` to `path` that it sends, under `key` or a random key. Raises `LastbitError` if the command fails."""
        number = self._record.ask("POST", path, key or uuid.uuid4().hex, body)
        process = subprocess.run(
            [sys.executable, "-m", "lastbit", "--json", "--url", self._url, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            input=input,
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode in (0, 3):
            answer = json.loads(process.stdout)
            self._record.answered(number, 200, answer)
            return answer
        if match := _REFUSED.search(process.stderr):
            status, code = int(match[1]), match[2]
            self._record.answered(number, status, {"code": code})
            raise errors.service_error(status, code, process.stderr)
        self._record.lost(number, process.stderr)
        raise errors.LastbitError(process.stderr)
