"""The routes for the page alone: it signs in with a token and gets a session cookie, and asks which sections to show.
They are not part of the contract."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import BaseModel, Field, StringConstraints

from api.access.rules import Access, digest_of, needs, open_to_all, unauthorized
from api.access.sessions import cookie
from api.routes.batches import service_of
from api.routes.fields import Body
from api.routes.route import JsonRoute, PrefixedRouter
from lastbit.tokens import LONGEST, Role, Token

router = PrefixedRouter(prefix="/session", route_class=JsonRoute, include_in_schema=False)


class SignIn(Body):
    token: Annotated[str, StringConstraints(max_length=LONGEST)]


class Who(BaseModel):
    """The token that signed in. `needed`: whether the service requires one. If it doesn't, everybody may do
    everything."""

    needed: bool
    name: str | None = None
    roles: list[Role] = []
    prefix: str | None = None


class KnownToken(BaseModel):
    """A token that the service accepts, without its digest."""

    name: str
    roles: list[Role]
    prefix: str | None
    requests: int | None
    items: int | None
    body_bytes: int | None = Field(serialization_alias="bytes")


class KnownTokens(BaseModel):
    tokens: list[KnownToken]


class Sections(BaseModel):
    """The sections of the page that have something in them, except those that are always shown. `ids`: which numbers
    are ids of batches, such as 3/16; None: all."""

    sections: list[str]
    ids: str | None


def _access(request: Request) -> Access:
    access: Access = request.app.state.access
    return access


def _who(access: Access, token: Token | None) -> Who:
    is_required = access.tokens.required
    if token is None:
        return Who(needed=is_required)
    return Who(needed=is_required, name=token.name or None, roles=sorted(token.roles), prefix=token.prefix)


@router.get("")
@open_to_all
async def who(request: Request) -> Who:
    """The signed-in token. Without one the response is not a 401, as the page calls this first, and that is no
    error."""
    access = _access(request)
    cookies = request.headers.get("cookie", "").encode("latin-1")
    return _who(access, access.tokens.find(access.sessions.read(cookies)))


@router.post("")
@open_to_all
async def sign_in(body: SignIn, request: Request, response: Response) -> Any:
    """Check a token and set the cookie. Raises `Problem`: `unauthorized`."""
    access = _access(request)
    digest = digest_of(b"Bearer " + body.token.strip().encode())
    token = None if digest is None else access.tokens.find(digest)
    if token is None:
        raise unauthorized(has_token=True)
    if access.tokens.required:
        _set(request, response, access.sessions.make(token.digest))
    return _who(access, token)


@router.get("/tokens")
@needs(Role.ADMIN)
def known_tokens(request: Request) -> KnownTokens:
    """All tokens, by name."""
    return KnownTokens(
        tokens=[
            KnownToken(
                name=token.name,
                roles=sorted(token.roles),
                prefix=token.prefix,
                requests=token.requests,
                items=token.items,
                body_bytes=token.body_bytes,
            )
            for token in _access(request).tokens.all()
        ]
    )


@router.get("/sections")
@needs(Role.READ)
def sections(request: Request) -> Sections:
    """By their names in the page's addresses."""
    service = service_of(request)
    ids = service.ids()
    return Sections(
        sections=[name.replace("_", "-") for name, is_used in service.in_use()._asdict().items() if is_used],
        ids=None if ids is None else str(ids),
    )


@router.delete("", status_code=204)
@open_to_all
async def sign_out(request: Request) -> Response:
    """Delete the cookie."""
    response = Response(status_code=204)
    _set(request, response, "")
    return response


def _set(request: Request, response: Response, value: str) -> None:
    response.headers["Set-Cookie"] = cookie(value, request.headers, request.scope["scheme"])
