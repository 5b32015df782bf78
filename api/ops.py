"""For those who run it: is it alive, is it ready, what does it measure, and the API's pages."""

from __future__ import annotations

import asyncio
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from prometheus_client import CONTENT_TYPE_LATEST

from api.metrics import exposition
from api.problems import documented

router = APIRouter(tags=["operations"])

_ICON: Final = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect width='16' height='16' rx='3' fill='%231a7f4b'/%3E%3C/svg%3E"
)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Alive."""
    # Not in a thread: while the database is silent all of them wait for it, and whoever asks would end the process.
    return {"status": "ok"}


@router.get("/readyz", responses=documented())
def readyz(request: Request) -> dict[str, str]:
    """The database is reached, and its schema is current."""
    request.app.state.service.check_ready()
    return {"status": "ready"}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    # Not in the pool of the other routes' threads: while the database is away they may all be waiting for it.
    content = await asyncio.to_thread(exposition, request.app.state.gauges)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


@router.get("/docs", include_in_schema=False)
def docs() -> Response:
    """The API's pages, from files of our own: nothing is loaded from elsewhere."""
    return get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Lastbit API",
        swagger_js_url="/docs/assets/swagger-ui-bundle.js",
        swagger_css_url="/docs/assets/swagger-ui.css",
        swagger_favicon_url=_ICON,
    )
