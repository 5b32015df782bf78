"""`python -m api`: run the service. `python -m api migrate`: bring the database's schema up to date. `python -m api
check`: say what is unsafe."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from api.access.tokens import Tokens
from api.acks.fast_path import AckProtocol
from api.server.watchdog import raise_open_files
from core import errors, logs
from core.settings import Settings, settings_of
from core.storage import checks, schema
from core.storage.database import Database

KEEP_ALIVE = 75
"""Seconds that an idle connection is kept, longer than clients' pools and proxies do: so it's they who close it, and no
request runs into a connection that is being closed."""
GRACE = 15
"""Seconds for requests that are under way when the service is told to stop."""
WORKER_SILENCE = 60
"""Seconds after which a worker process that doesn't answer its parent is replaced. uvicorn's own five are less than a
start takes on a machine that is busy with other things: each worker is killed while it still imports, for ever."""

DOORS = 64
"""Times that the event loop has the listening socket. It takes in one connection a turn from each of its sockets, and
under overload its turns are long: of two thousand who connect at once the last would wait for seconds. Several workers
have it once each: who is quick takes what there is, and another one would get nothing."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m api",
        description="Run Lastbit. Every flag can be set in the environment too, as LASTBIT_DATABASE_URL and so on.",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=["serve", "migrate", "check"],
        default="serve",
        help="serve is the default; migrate brings the schema up to date; check says what is unsafe with the database",
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8000)")
    parser.add_argument("--database-url", metavar="URL", help="sqlite:///FILE or mysql://USER:PASSWORD@HOST/DATABASE")
    parser.add_argument("--workers", type=int, help="processes (1)")
    parser.add_argument("--json", action="store_true", help="of check: one JSON document")
    parser.add_argument(
        "--finish", action="store_true", help="of migrate: no process of an earlier release runs, and none will"
    )
    parser.add_argument("--tokens-file", metavar="FILE", help="who may call: lines that `lastbit token new` prints")
    parser.add_argument(
        "--insecure", action="store_true", default=None, help="listen where others can reach it, without tokens"
    )
    options = vars(parser.parse_args(arguments))
    command, as_json, finish = options.pop("command"), options.pop("json"), options.pop("finish")
    if finish and command != "migrate":
        parser.error("--finish goes with migrate")
    settings = settings_of(parser, options)
    logs.configure(settings.log_level)
    try:
        if command == "serve":
            _check_access(settings)
        with Database(settings.database_url) as database:
            if command == "check":
                return _check(database, settings.workers, as_json)
            if command == "migrate" or database.is_embedded:
                schema.migrate(database)
            database.read(schema.check)
            if finish:
                schema.finish(database)
    except errors.CoreError as error:
        print(f"lastbit: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if command == "migrate":
        addition = ", and serves no earlier release any more" if finish else ""
        print(f"lastbit: the schema is current{addition}", file=sys.stderr)  # noqa: T201
        return 0
    if settings.session_key is None:
        # One for all of the worker processes.
        settings = settings.model_copy(update={"session_key": secrets.token_hex(32)})
    # Worker processes build their own application, from the environment.
    for name, value in settings.model_dump(exclude_none=True).items():
        os.environ[f"LASTBIT_{name.upper()}"] = str(value)
    with _shared_metrics(settings.workers):
        _serve(settings)
    return 0


def _check(database: Database, workers: int, as_json: bool) -> int:
    findings = checks.check(database, workers=workers)
    if as_json:
        print(json.dumps(checks.as_json(findings)))  # noqa: T201
    else:
        for finding in findings:
            print(f"{finding.verdict.value:<7} {finding.about:<14} {finding.says}")  # noqa: T201
            if finding.do is not None:
                print(f"{'':<22} → {finding.do}")  # noqa: T201
    return 0 if all(finding.verdict is checks.Verdict.FINE for finding in findings) else 1


def _check_access(settings: Settings) -> None:
    """Raises `errors.Misconfigured` for tokens that can't be read, and where whoever reaches the port could do all."""
    if Tokens(settings).required or settings.insecure or _is_loopback(settings.host):
        return
    raise errors.Misconfigured(
        f"{settings.host} can be reached by others, and there are no tokens: make one with `lastbit token new` and "
        "give its line as LASTBIT_TOKENS or in LASTBIT_TOKENS_FILE; or listen on 127.0.0.1; or say --insecure "
        "(LASTBIT_INSECURE=true) where something else keeps strangers out"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(settings: Settings) -> None:
    raise_open_files()
    config = configuration(settings)
    sockets = listening(config)
    if settings.workers > 1:
        Multiprocess(config, sockets=sockets).run()
        return
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=sockets)
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def configuration(settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        "api.app:create",
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        log_config=logs.STANDARD,
        log_level=settings.log_level,
        access_log=False,
        http=AckProtocol,
        server_header=False,
        proxy_headers=False,  # nothing here asks who the client is
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
        timeout_worker_healthcheck=WORKER_SILENCE,
    )


def listening(config: uvicorn.Config) -> list[socket.socket]:
    """The bound socket, as often as the event loop is to have it."""
    listener = config.bind_socket()
    return [listener, *(listener.dup() for _ in range(DOORS - 1 if config.workers == 1 else 0))]


@contextlib.contextmanager
def _shared_metrics(workers: int) -> Iterator[None]:
    """A scrape reaches one of several workers, so each of them keeps what it measures where the others see it."""
    if workers == 1:
        yield
        return
    # A worker that was killed on the way out may leave something; it is nothing to fail for.
    with tempfile.TemporaryDirectory(prefix="lastbit-metrics-", ignore_cleanup_errors=True) as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        yield


if __name__ == "__main__":
    sys.exit(main())
