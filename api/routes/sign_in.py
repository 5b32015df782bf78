"""The page signs in with a token, and has a cookie from then on. Of the page, and no part of the contract."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, StringConstraints

from api.access.rules import Access, digest_of, open_to_all, unauthorized
from api.access.sessions import cookie
from api.routes.models import Body
from api.routes.route import JsonRoute
from lastbit.tokens import LONGEST, Role, Token

router = APIRouter(prefix="/session", route_class=JsonRoute, include_in_schema=False)


class SignIn(Body):
    token: Annotated[str, StringConstraints(max_length=LONGEST)]


class Who(BaseModel):
    """Whose page it is. Where no token is needed, it is anybody's, who may do all."""

    needed: bool
    name: str | None = None
    roles: list[Role] = []
    prefix: str | None = None


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
    """Not a 401 where nobody is signed in: it is what the page asks first, and no error."""
    access = _access(request)
    cookies = request.headers.get("cookie", "").encode("latin-1")
    return _who(access, access.tokens.find(access.sessions.read(cookies)))


@router.post("")
@open_to_all
async def sign_in(body: SignIn, request: Request, response: Response) -> Any:
    """Sets the cookie. Raises `Problem`."""
    access = _access(request)
    digest = digest_of(b"Bearer " + body.token.strip().encode())
    token = None if digest is None else access.tokens.find(digest)
    if token is None:
        raise unauthorized(has_token=True)
    if access.tokens.required:
        _set(request, response, access.sessions.make(token.digest))
    return _who(access, token)


@router.delete("", status_code=204)
@open_to_all
async def sign_out(request: Request) -> Response:
    """Has the browser forget the cookie."""
    response = Response(status_code=204)
    _set(request, response, "")
    return response


def _set(request: Request, response: Response, value: str) -> None:
    response.headers["Set-Cookie"] = cookie(value, request.headers, request.scope["scheme"])
