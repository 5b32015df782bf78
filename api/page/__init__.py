"""The page at `/`, which shows batches and processes. Its HTML, styles and modules are served as they are in this
folder, without a build step and without external resources.

Keys, labels and reasons are text from clients. The page renders them only as text. Its content security policy also
prevents scripts in them from running, whether inline, from other sites or through `innerHTML` (trusted types).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from api.access.rules import open_to_all
from api.routes.route import GuardedRoute

FOLDER: Final = Path(__file__).resolve().parent
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
DOCS_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The same without trusted types, which the package for the API reference doesn't support."""


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media_type: str
    etag: str


def read_files() -> dict[str, File]:
    """The page's files, by name."""
    files = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            content = path.read_bytes()
            files[path.name] = File(content, TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return files


def routes() -> APIRouter:
    """The page's routes, with its files in memory."""
    files = read_files()
    router = APIRouter(route_class=GuardedRoute, include_in_schema=False)

    @router.get("/")
    @open_to_all
    async def page(request: Request) -> Response:
        return _answer(request, files["index.html"])

    @router.get("/docs")
    @open_to_all
    async def docs(request: Request) -> Response:
        """The API reference. It contains no secrets, and the routes that it calls require a token themselves."""
        return _answer(request, files["docs.html"], DOCS_POLICY)

    @router.get("/page/{name}")
    @open_to_all
    async def part(name: str, request: Request) -> Response:
        if name not in files or name.endswith(".html"):
            raise HTTPException(404)
        return _answer(request, files[name])

    return router


def _answer(request: Request, file: File, policy: str = POLICY) -> Response:
    headers = {
        # Browsers must revalidate each file, so that they never mix files of two releases. Most responses are 304.
        "Cache-Control": "no-cache",
        "ETag": file.etag,
        "Content-Security-Policy": policy,
        "Cross-Origin-Opener-Policy": "same-origin",
    }
    tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in tags:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
