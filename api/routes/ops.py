"""The routes for operators: liveness, readiness, metrics, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import json

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import State

from api.access.rules import needs, open_to_all
from api.metrics import exposition
from api.problems import documented
from api.routes.route import GuardedRoute
from core import programs
from lastbit.tokens import Role

router = APIRouter(route_class=GuardedRoute, tags=["operations"])


@router.head("/healthz", name="head_health", responses=documented())
@router.get("/healthz", responses=documented())
@open_to_all
async def get_health() -> dict[str, str]:
    """The process is alive. `version` is its release."""
    # Not in a thread of the pool: while the database doesn't respond, all threads may wait for it. The health check
    # would fail, and the orchestrator would kill the process.
    return {"status": "ok", "version": programs.version()}


@router.head("/readyz", name="head_readiness", responses=documented())
@router.get("/readyz", responses=documented())
@open_to_all
async def get_readiness(request: Request) -> dict[str, str]:
    """The database is reachable and takes writes, and its schema fits this release."""
    # Not in the thread pool of the other routes: while the database is unreachable, all its threads may wait for it.
    await asyncio.to_thread(_check_ready, request.app.state)
    return {"status": "ready"}


def _check_ready(state: State) -> None:
    """Raises `errors.CoreError`."""
    state.writability.begin()  # beside the read
    state.readiness.result()
    state.writability.result()


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **documented()},
)
@needs(Role.READ)
async def get_metrics(request: Request) -> Response:
    """Metrics in Prometheus text format."""
    request.app.state.writability.begin()  # on an idle service, nothing else would notice that no write gets through
    content = await asyncio.to_thread(exposition, request.app.state.gauges)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False)
@open_to_all
def document(request: Request) -> Response:
    """The OpenAPI document."""
    state = request.app.state
    if not hasattr(state, "document"):
        state.document = json.dumps(request.app.openapi(), ensure_ascii=False).encode()
    return Response(state.document, media_type="application/json")
