"""The application: routes, problems and the service under them, put together. Nothing is created at import."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.types import Lifespan

from api import page, problems
from api.access.rules import Access
from api.access.sessions import Sessions
from api.access.tokens import LOOK_EVERY, Tokens
from api.acks.queue import AckQueue
from api.acks.routes import AckRoutes
from api.limits import Limits
from api.metrics import DatabaseGauges, omit_creation_times
from api.openapi import VERSION, openapi
from api.routes import (
    batches,
    commands,
    consumer_groups,
    events,
    failure_search,
    failures,
    ops,
    processes,
    search,
    sign_in,
    tallies,
    webhooks,
)
from api.routes.long_polls import Waiting
from api.routes.route import guarded
from api.routes.writes import Reads, Writes
from api.signals import EVERY, Signals
from core import janitor, logs, traces
from core.batches import expiry
from core.commits.admission import Admission
from core.commits.combiner import Combiner
from core.dispatcher import Dispatcher
from core.probe import Probe
from core.service import Service
from core.settings import Settings
from core.storage import schema
from core.storage.database import Database
from core.storage.job_runs import JobRuns
from core.ticker import ticking
from core.webhooks.replicas import Replica
from senders.webhooks import WebhookSender

SWITCH_INTERVAL = 0.0003
"""Seconds that a thread may keep the GIL while another thread waits for it. Python's default of 5 ms is longer than an
ack transaction: between two of its statements, the combiner would wait until the event loop has written all its
responses. The event loop releases the GIL for a moment with each read, and then the wait starts again. So the interval
must be shorter than parsing a call of a thousand ids. Otherwise the combiner rarely acquires the GIL while such calls
arrive, and a transaction takes ten times as long."""
READINESS_PATIENCE = 3.0
"""Seconds that a readiness probe waits for a read of the database, and beside it for a write. The image's health check
waits for five."""
SWITCH_INTERVAL_SHEDDING = 0.0001
"""The interval while most acks are refused. The event loop acquires the GIL again for each request that it reads, and
waits this long while the combiner computes. With the usual interval, it could refuse only a thousand calls a second."""


def create(settings: Settings | None = None) -> AckRoutes:
    """The ASGI application. It connects to the database when it starts, and finishes requests in progress when it
    stops."""
    settings = settings or Settings()
    tokens = Tokens(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        logs.configure(settings.log_level)  # a worker process doesn't run `api.__main__`
        omit_creation_times()
        database = Database(settings.database_url, schema=settings.database_schema)
        if database.is_embedded:
            schema.migrate(database)
        sender = WebhookSender(timeout=settings.webhooks_timeout, allow_private=settings.webhooks_allow_private)
        combiner = functools.partial(
            Combiner,
            max_waiting=settings.max_waiting_acks,
            max_bytes=settings.max_waiting_bytes,
            admission=Admission(settings.shed_after, _loop_first) if settings.shed_after else None,
        )
        writes_combiner = functools.partial(
            Combiner,
            max_waiting=settings.max_waiting_acks,
            max_bytes=settings.max_waiting_bytes,
            admission=Admission(settings.shed_after) if settings.shed_after else None,
            what="writes",
        )
        service = Service(
            database,
            combiner=combiner,
            writes=writes_combiner,
            sender=sender,
            max_waiting_reads=settings.max_waiting_requests,
        )
        service.check_ready()
        sys.setswitchinterval(SWITCH_INTERVAL)
        attach(app, service, settings, asyncio.get_running_loop())
        with contextlib.ExitStack() as running:
            signals = Signals(database, app.state.limits.connections, tokens)
            signals.measure()
            running.enter_context(ticking("signals", signals.measure, EVERY))
            if settings.tokens_file is not None:
                running.enter_context(ticking("tokens", tokens.reload_if_changed, LOOK_EVERY))
                running.enter_context(_on_hang_up(app.state.loop, tokens.reload))
            if database.is_embedded and settings.janitor_every:
                # With SQLite, one command runs the whole product. With a database server, cron runs one janitor for
                # all replicas.
                tidy = functools.partial(janitor.run_once, database, expiry.Policy())
                running.enter_context(ticking("janitor", tidy, settings.janitor_every))
            if database.is_embedded and settings.dispatcher_every:
                dispatcher = Dispatcher(
                    database,
                    sender,
                    backoff=settings.backoff,
                    lease=settings.lease,
                    threads=settings.dispatcher_threads,
                    replica=Replica(database) if settings.workers > 1 else None,
                )
                running.callback(dispatcher.stop)
                running.enter_context(ticking("dispatcher", dispatcher.run_once, settings.dispatcher_every))
                overdue = JobRuns(database, "deadlines").noting(functools.partial(janitor.expire_overdue, database))
                running.enter_context(ticking("deadlines", overdue, janitor.DEADLINES_EVERY))
            service.enlisted.start()
            running.enter_context(app.state.limits.connections.watching())
            running.enter_context(_long_polls_end_first(app.state.waiting, app.state.loop))
            # All objects that exist now stay in use. Without this, each full collection would scan them and stop the
            # process for a tenth of a second.
            gc.collect()
            gc.freeze()
            yield
        await asyncio.to_thread(service.stop)
        await asyncio.to_thread(traces.flush)

    return assemble(settings, tokens, lifespan)


def assemble(settings: Settings, tokens: Tokens, lifespan: Lifespan[FastAPI] | None = None) -> AckRoutes:
    """The routes and what they need of the settings. `attach` adds what belongs to one event loop."""
    app = FastAPI(
        title="Lastbit",
        version=VERSION,
        summary="Knows, exactly, when a fanned-out batch of work is finished, at one bit an item.",
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,
        openapi_url=None,  # `routes.ops` serves it, with a rule like other routes
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(guarded)],
    )
    app.state.access = Access(tokens, Sessions(settings.session_key))
    problems.install(app)
    app.include_router(search.router)
    app.include_router(batches.router)
    app.include_router(failures.router)
    app.include_router(failure_search.router)
    app.include_router(webhooks.of_batches)
    app.include_router(events.router)
    app.include_router(webhooks.router)
    app.include_router(consumer_groups.router)
    app.include_router(tallies.router)
    app.include_router(processes.router)
    app.include_router(commands.router)
    app.include_router(ops.router)
    app.include_router(page.routes())
    app.include_router(sign_in.router)
    app.mount("/docs/assets", StaticFiles(packages=[("fastapi_swagger", "resources")]))
    app.openapi = functools.partial(openapi, app)  # type: ignore[method-assign]
    return AckRoutes(app)


def attach(app: FastAPI, service: Service, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
    """Let the app serve `service` in the running event loop."""
    state, database = app.state, service.database
    access: Access = state.access
    state.service = service
    state.gauges = DatabaseGauges(database)
    state.readiness = Probe("readiness", service.check_ready, patience=READINESS_PATIENCE)
    state.writability = Probe(
        "writability", database.check_writes, patience=READINESS_PATIENCE, fresh=1.0, silence="no write was committed"
    )
    state.loop = loop
    state.limits = Limits(settings, loop)
    state.waiting = Waiting(service)
    state.writes = Writes(service, loop)
    state.reads = Reads(service, loop)
    state.acks = AckQueue(service, state.limits, access.rates, loop)


def _loop_first(shedding: bool) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_SHEDDING if shedding else SWITCH_INTERVAL)


@contextlib.contextmanager
def _on_hang_up(loop: asyncio.AbstractEventLoop, react: Callable[[], None]) -> Iterator[None]:
    """Call `react` in a thread on each SIGHUP, the usual signal to reload a configuration. Not in the handler itself:
    that interrupts the event loop anywhere, also while it holds a lock that `react` needs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(loop.run_in_executor, None, react))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextlib.contextmanager
def _long_polls_end_first(waiting: Waiting, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """End long polls on SIGTERM and SIGINT. uvicorn waits for open requests before it ends the lifespan, so the end of
    the lifespan would be too late."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(waiting.close)
        handler = before[number]
        if callable(handler):
            handler(number, frame)
        elif handler is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in (int(signal.SIGTERM), int(signal.SIGINT)):
        before[number] = signal.getsignal(number)
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
