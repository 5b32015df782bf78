"""`python -m api`: run the service. `migrate` updates the database's schema, `check` lists what is unsafe about its
settings, and `openapi` prints the OpenAPI document. `lastbit-server` does the same without a checkout."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import functools
import ipaddress
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import structlog
import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from api.access.tokens import Tokens
from api.fast_path.protocol import FastProtocol
from api.limits import connections
from core import errors, logs, programs
from core.acks.commit import check_merging
from core.settings import Settings, settings_of
from core.storage import checks, schema
from core.storage.database import Database
from core.storage.numbering import Numbering
from core.storage.opening import check_privileges, check_promises, opened

log = structlog.get_logger(__name__)

COMMANDS: Final = ("serve", "migrate", "check", "openapi")
JOBS: Final = {"jobs.janitor": "expires and deletes old batches", "jobs.dispatcher": "sends webhooks"}
"""Programs of their own, which `lastbit-server` runs by their last name."""

KEEP_ALIVE = 75
"""Seconds that an idle connection is kept. Clients' pools and proxies close idle connections earlier, so they never
send a request on a connection that the service is closing."""
GRACE = 15
"""Seconds that requests in progress have to finish when the service is stopped."""
WORKER_SILENCE = 60
"""Seconds after which a worker process that doesn't respond to its parent is replaced. On a busy machine, a start takes
longer than uvicorn's default of five, and the parent would kill each new worker during its imports."""

LISTENERS = 64
"""Duplicates of the listening socket in the event loop. The loop accepts one connection per iteration and socket, and
under overload its iterations are long: with one socket, the last of two thousand new clients would wait for seconds.
Several workers have one socket each, as a fast worker would otherwise accept all connections."""
CLIENTS: Final = {"LASTBIT_URL", "LASTBIT_TOKEN", "LASTBIT_PROFILE"}
"""Variables that only clients read."""
LIKENESS: Final = 0.82
"""The least likeness of a misspelled setting to a real one. Below are the variables that Kubernetes sets for a Service
named `lastbit`, such as LASTBIT_SERVICE_HOST."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=programs.command("api"),
        description="Run Lastbit. Each setting can also be in the environment, as\nLASTBIT_DATABASE_URL and so on.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lastbit-server {programs.version()}")
    parser.add_argument(
        "command",
        nargs="?",
        metavar=f"{{{','.join(COMMANDS)}}}",
        default="serve",
        help="serve (default) runs the service; migrate creates or updates the schema; check lists what is unsafe "
        "about the database's settings; openapi prints the OpenAPI document, as JSON",
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8000)")
    parser.add_argument(
        "--probe-port", type=int, help="a second port, for probes and scrapes, with connections of its own"
    )
    parser.add_argument(
        "--database-url", metavar="URL", help="sqlite:///FILE, or postgresql:// or mysql://USER:PASSWORD@HOST/DATABASE"
    )
    parser.add_argument(
        "--database-schema", metavar="NAME", help="the schema (or MariaDB's database) for Lastbit's tables alone"
    )
    parser.add_argument("--workers", type=int, help="processes (1)")
    parser.add_argument("--json", action="store_true", help="check: print one JSON document")
    parser.add_argument(
        "--finish",
        action="store_true",
        help="migrate: declare that no earlier release will use this database again",
    )
    parser.add_argument(
        "--ids",
        metavar="K/N",
        type=_numbering,
        help="migrate an empty database: batches get, for ever, the ids that leave K when they are divided by N",
    )
    parser.add_argument(
        "--tokens-file", metavar="FILE", help="tokens of the clients: lines that `lastbit token new` prints"
    )
    parser.add_argument(
        "--insecure", action="store_true", default=None, help="listen on a public address without tokens"
    )
    options = vars(parser.parse_args(arguments))
    command, as_json = options.pop("command"), options.pop("json")
    finish, ids = options.pop("finish"), options.pop("ids")
    if command not in COMMANDS:  # with `choices`, the value of an unknown option would be refused before the option
        jobs = ", ".join(programs.command(job) for job in JOBS)
        parser.error(f"{command!r} is not one of {', '.join(COMMANDS)}; the jobs are {jobs}")
    if finish and command != "migrate":
        parser.error("--finish is an option of migrate")
    if ids is not None and command != "migrate":
        parser.error("--ids is an option of migrate")
    if command == "openapi":
        return _print_document()
    settings = settings_of(parser, options)
    logs.configure(settings.log_level)
    _warn_of_misspelled_settings()
    try:
        if command == "serve":
            _check_access(settings)
            connections.check_open_files(settings.max_connections)
        with opened(settings.database_url, settings.database_schema) as database:
            description = database.describe()
            if command == "serve" and database.is_embedded and not Path(database.url.database or "").exists():
                description += ", which is new"
            if command == "check":
                return _check(database, settings.workers, as_json)
            if command == "migrate" or database.is_embedded:
                schema.migrate(database, ids=ids)
            database.read(schema.check)
            if command == "serve":
                check_privileges(database)
                check_promises(database)
            if finish:
                schema.finish(database)
    except errors.CoreError as error:
        print(f"lastbit: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if command == "migrate":
        addition = ", and earlier releases can no longer use it" if finish else ""
        print(f"lastbit: the schema of {description} is current{addition}", file=sys.stderr)  # noqa: T201
        return 0
    if settings.session_key is None:
        # All worker processes must have the same key.
        settings = settings.model_copy(update={"session_key": secrets.token_hex(32)})
    # Worker processes build their own application from the environment.
    for name, value in settings.model_dump(exclude_none=True).items():
        os.environ[f"LASTBIT_{name.upper()}"] = str(value)
    with _shared_metrics(settings.workers):
        _serve(settings, description)
    return 0


def _numbering(text: str) -> Numbering:
    try:
        return Numbering.parse(text)
    except errors.Misconfigured as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _epilog() -> str:
    lines = [f"  {programs.command(job):<27} {text}" for job, text in JOBS.items()]
    account = "mysql://lastbit:change-me@db/lastbit"
    return "\n".join(
        [
            "Jobs, each with its own --help. On SQLite the service does their work itself.",
            *lines,
            "",
            programs.examples(
                programs.command("api"),
                f"{programs.command('api')} --port 8001 --database-url sqlite:////srv/lastbit.db",
                f"{programs.command('api', 'check')} --database-url {account}",
            ),
        ]
    )


def _print_document() -> int:
    # Importing the application takes seconds, and no other command of `main` needs it.
    from api.app import create
    from api.openapi import openapi

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when the reader, such as `head`, does
    return 0 if _is_printed(json.dumps(openapi(create().fastapi), indent=2)) else 1


def _is_printed(text: str) -> bool:
    """Print to standard output. If that fails, such as on a full disk, print an error in one line."""
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "it is closed")
        print(text, flush=True)  # noqa: T201
    except OSError as error:
        print(f"lastbit: standard output failed: {error.strerror}", file=sys.stderr)  # noqa: T201
        sys.stdout = None  # else the interpreter would try to write the rest when it ends
        return False
    return True


def _check(database: Database, workers: int, as_json: bool) -> int:
    findings = checks.check(database, workers=workers)
    if any(finding.about == "promises" for finding in findings):
        findings.append(check_merging(database))
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict.value:<7} {finding.about:<14} {finding.says}")
        if finding.do is not None:
            lines.append(f"{'':<22} → {finding.do}")
    if not _is_printed(json.dumps(checks.as_json(findings)) if as_json else "\n".join(lines)):
        return 1
    return 0 if all(finding.verdict is checks.Verdict.FINE for finding in findings) else 1


def _warn_of_misspelled_settings() -> None:
    """Log a warning for each variable that is almost a setting. A misspelled LASTBIT_DATABASE_URL is ignored, and the
    service would silently use a SQLite file."""
    settings = {f"LASTBIT_{name.upper()}" for name in Settings.model_fields}
    for name in sorted(name for name in os.environ if name.upper().startswith("LASTBIT_")):
        if name.upper() not in settings | CLIENTS:
            for similar in difflib.get_close_matches(name.upper(), settings, n=1, cutoff=LIKENESS):
                log.warning("unknown_setting", name=name, similar=similar)


def _check_access(settings: Settings) -> None:
    """Raise `errors.Misconfigured` if tokens can't be read, or if a public address would be served without tokens."""
    if Tokens(settings).required or settings.insecure or _is_loopback(settings.host):
        return
    raise errors.Misconfigured(
        f"other machines can reach {settings.host}, and there are no tokens: make one with `lastbit token new` and "
        "set its line as LASTBIT_TOKENS or put it in LASTBIT_TOKENS_FILE; or listen on 127.0.0.1; or use --insecure "
        "(LASTBIT_INSECURE=true) if something else, such as a firewall, restricts access"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(settings: Settings, database: str) -> None:
    config = configuration(settings)
    sockets = listening(config)
    if settings.probe_port is not None:
        sockets.append(_bound(configuration(settings.model_copy(update={"port": settings.probe_port})), "--probe-port"))
    greeting = functools.partial(_greet, settings, database, sockets[0].getsockname()[1])
    if settings.workers > 1:
        threading.Thread(target=_greet_once_listening, args=(sockets[0], greeting), daemon=True).start()
        _Supervisor(config, sockets=sockets).run()
        return
    server = _Server(config, greeting)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=sockets)
    if not server.started:
        sys.exit(STARTUP_FAILURE)


class _Supervisor(Multiprocess):
    """Replaces a worker that dies while its response is awaited at once, and not after `WORKER_SILENCE`."""

    def keep_subprocess_alive(self) -> None:
        for worker in self.processes:
            worker.child_conn.close()  # as long as the parent has it too, the parent's end of the pipe reads no end
        super().keep_subprocess_alive()


class _Server(uvicorn.Server):
    """A server that calls `greeting` once it accepts connections."""

    def __init__(self, config: uvicorn.Config, greeting: Callable[[], None]) -> None:
        super().__init__(config)
        self._greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._greeting()


def _greet_once_listening(listener: socket.socket, greeting: Callable[[], None]) -> None:
    """Call `greeting` as soon as a worker process listens. Until then, the socket is only bound."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(listener.getsockname()[:2]):
            greeting()
            return
        time.sleep(0.05)  # the system has no notification for a socket that begins to listen


def _greet(settings: Settings, database: str, port: int) -> None:
    """Print the service's address, its database and a first command to try. Elsewhere than on a terminal, standard
    error is a log of JSON lines, which has the address too."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)  # noqa: S104  # compared only
    url = f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"
    if not sys.stderr.isatty():
        log.info("serving", url=url, version=programs.version(), database=database)
        return
    # In a checkout, the command is in the interpreter's folder, which may not be on the path.
    program = "lastbit" if shutil.which("lastbit") else f"{os.path.relpath(sys.prefix)}/bin/lastbit"
    flag = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    lines = [
        f"Lastbit {programs.version()} at {url} (batches: {url}/, API: {url}/docs)",
        f"State is in {database}",
        f"Next, in another terminal: {program}{flag} open --key hello --items 3",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201


def configuration(settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        f"{__package__}.app:create",
        factory=True,
        host=settings.host.strip("[]"),
        port=settings.port,
        workers=settings.workers,
        log_config=logs.STANDARD,
        # On a terminal, `_greet` prints what uvicorn's own log would.
        log_level="warning" if settings.log_level == "info" and sys.stderr.isatty() else settings.log_level,
        access_log=False,
        http=FastProtocol,
        server_header=False,
        proxy_headers=False,  # the service doesn't use the client's address
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
        timeout_worker_healthcheck=WORKER_SILENCE,
    )


def listening(config: uvicorn.Config) -> list[socket.socket]:
    """The listening socket and its duplicates. Exits if the address can't be used."""
    listener = _bound(config, "--port")
    return [listener, *(listener.dup() for _ in range(LISTENERS - 1 if config.workers == 1 else 0))]


def _bound(config: uvicorn.Config, option: str) -> socket.socket:
    """A socket with the address of `config`. `option`: the one that chooses its port."""
    try:
        return config.bind_socket()
    except SystemExit:  # uvicorn has logged the system's error, which doesn't contain the address
        variable = f"LASTBIT_{option.removeprefix('--').replace('-', '_').upper()}"
        print(  # noqa: T201
            f"lastbit: can't listen on {config.host} at port {config.port}: if another program uses the port, stop it "
            f"or choose another with {option} ({variable})",
            file=sys.stderr,
        )
        raise


@contextlib.contextmanager
def _shared_metrics(workers: int) -> Iterator[None]:
    """Make a folder in which worker processes share their metrics, as a scrape reaches only one of them."""
    if workers == 1:
        yield
        return
    # A worker that was killed while it stopped may leave files. They must not make the shutdown fail.
    with tempfile.TemporaryDirectory(prefix="lastbit-metrics-", ignore_cleanup_errors=True) as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        yield


if __name__ == "__main__":
    sys.exit(main())
