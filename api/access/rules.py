"""Permissions. Each route declares, beside its path, which roles may call it; a route without a declaration refuses
everybody.

    @router.get("/{id}")
    @needs(Role.READ, is_limited=True)
    def get_batch(...)

A caller is a token, sent as `Authorization: Bearer` or in the page's session (see `sessions`). A service without
tokens treats every caller as an admin. Permissions are checked before any part of a body is read.

A token that is limited to a prefix is refused by every route without `is_limited=True`; a route with it enforces the
limit itself. For routes of one batch, `models.BatchId` does that.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fastapi import Request
from starlette.types import Scope

from api.access.sessions import Sessions
from api.access.tokens import Tokens
from api.limits.shares import CALLER, NOBODY
from api.problems import Problem
from lastbit.tokens import LONGEST, Role, Token

ANY: Final = (Role.READ, Role.PRODUCE, Role.CONSUME)
CONSUMERS: Final = frozenset({Role.CONSUME, Role.ADMIN})
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_SCHEME: Final = b"bearer "

E = TypeVar("E", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Rule:
    """The callers that a route admits: everybody, or callers that have one of `roles` or are admins."""

    roles: tuple[Role, ...] = ()
    limited: bool = False
    everybody: bool = False


REFUSED: Final = Rule()
"""The rule of a route without a declaration. It admits no caller."""


def needs(*roles: Role, is_limited: bool = False) -> Callable[[E], E]:
    """Declares which callers a route admits: those that have one of these roles or are admins. `is_limited`: also
    tokens that are limited to a prefix."""
    return lambda endpoint: _declare(endpoint, Rule(roles, is_limited))


def open_to_all(endpoint: E) -> E:
    """Declares that a route needs no token."""
    return _declare(endpoint, Rule(everybody=True))


def _declare(endpoint: E, rule: Rule) -> E:
    endpoint.lastbit_rule = rule  # type: ignore[attr-defined]
    return endpoint


def rule_of(endpoint: object) -> Rule:
    rule: Rule = getattr(endpoint, "lastbit_rule", REFUSED)
    return rule


def caller_of(request: Request) -> Token:
    caller: Token = request.scope[CALLER]
    return caller


class Access:
    """Identifies callers and checks their permissions."""

    def __init__(self, tokens: Tokens, sessions: Sessions) -> None:
        self.tokens = tokens
        self.rates = tokens.rates
        self.sessions = sessions

    def enter(self, scope: Scope, rule: Rule) -> Token:
        """The caller of a request. Raises `Problem`: `unauthorized`, `forbidden`, `rate_limited`."""
        headers = first_headers(scope)
        digest = digest_of(headers.get(b"authorization"))
        if digest is None and scope["method"] not in _SAFE:
            _refuse_other_sites(headers)
        if rule.everybody:
            return NOBODY
        caller = self._caller(headers)
        if caller is None:
            raise unauthorized(b"authorization" in headers)
        if digest is None and self.tokens.required and scope["method"] not in _SAFE:
            _demand_own_site(headers)
        _judge(caller, rule)
        self.rates.charge_call(caller, declared_length(headers))
        return caller

    def _caller(self, headers: Mapping[bytes, bytes]) -> Token | None:
        """The caller by its token, or else by its session."""
        digest = digest_of(headers.get(b"authorization"))
        if digest is None and self.tokens.required:
            digest = self.sessions.read(headers.get(b"cookie", b""))
        return self.tokens.find(digest or b"")

    def consumer(self, digest: bytes | None) -> Token | None:
        """The caller of an ack route, or None if it has no permission. This runs for each item, so it gives no reason
        and charges no rate. For a request without a token that names a site (`SITE`), call `enter_consumer` instead."""
        caller = self.tokens.find(digest or b"")
        return caller if caller is not None and not CONSUMERS.isdisjoint(caller.roles) else None

    def enter_consumer(self, headers: Mapping[bytes, bytes]) -> Token:
        """The caller of an ack route, a POST. Raises `Problem`."""
        digest = digest_of(headers.get(b"authorization"))
        if digest is None:
            _refuse_other_sites(headers)
        caller = self.tokens.find(digest or b"")
        if caller is None:
            raise unauthorized(b"authorization" in headers)
        _judge(caller, CONSUMES)
        self.rates.charge_call(caller, declared_length(headers))
        return caller

    def is_valid(self, scope: Scope) -> bool:
        """Whether the caller of this request is still accepted, without changes: its token may have been removed, its
        session may have ended. Streams check this repeatedly."""
        caller: Token = scope[CALLER]
        return self._caller(first_headers(scope)) == caller


CONSUMES: Final = Rule((Role.CONSUME,), limited=True)
"""The rule of the ack routes."""


SITE: Final = frozenset({b"origin", b"sec-fetch-site"})
"""The headers by which a browser names the site whose page a request comes from."""
_ORIGIN: Final = re.compile(rb"https?://([\w.-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")


def first_headers(scope: Scope) -> dict[bytes, bytes]:
    """The first value of each header, by name."""
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name, value)
    return headers


def declared_length(headers: Mapping[bytes, bytes]) -> int:
    """The bytes of the body as its head declares them; 0 if it doesn't."""
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() else 0


def digest_of(authorization: bytes | None) -> bytes | None:
    """The digest of the bearer token in an Authorization header, or None if there is none."""
    if authorization is None or authorization[:7].lower() != _SCHEME or len(authorization) > LONGEST + 7:
        return None
    return hashlib.sha256(authorization[7:].strip()).digest()


def unauthorized(has_token: bool) -> Problem:
    """401. `has_token`: the request has an Authorization header, even if it is malformed."""
    if has_token:
        detail = "the token is invalid: it was mistyped or removed, or it belongs to another service"
        challenge = 'Bearer realm="lastbit", error="invalid_token"'
    else:
        detail = "this service requires a token: send it as `Authorization: Bearer …`, or set LASTBIT_TOKEN"
        challenge = 'Bearer realm="lastbit"'
    return Problem("unauthorized", detail, headers={"WWW-Authenticate": challenge})


def forbidden(detail: str) -> Problem:
    return Problem("forbidden", detail)


def outside(caller: Token, place: str, name: str) -> Problem:
    """403 for a name that a limited token may not use. `place`: where the request has it; `name`: what it names."""
    return forbidden(f"{place}: the token {caller.name} is limited to {name} with the prefix {caller.prefix!r}")


def _judge(caller: Token, rule: Rule) -> None:
    if not rule.roles:
        raise forbidden("this route doesn't declare its callers")
    if not caller.has(rule.roles):
        required, actual = _named(rule.roles, "or"), _named((role for role in Role if role in caller.roles), "and")
        challenge = f'Bearer realm="lastbit", error="insufficient_scope", scope="{" ".join(rule.roles)}"'
        raise Problem(
            "forbidden",
            f"this route requires the role {required}; the token {caller.name} has {actual}",
            headers={"WWW-Authenticate": challenge},
        )
    if caller.prefix is not None and not rule.limited:
        raise forbidden(
            f"this route refuses limited tokens, and {caller.name} is limited to the prefix {caller.prefix!r}"
        )


def _named(roles: Iterable[Role], word: str) -> str:
    *first, last = roles
    return f"{', '.join(first)} {word} {last}" if first else str(last)


def _refuse_other_sites(headers: Mapping[bytes, bytes]) -> None:
    """Raise `Problem` if a browser sent this request for a page of another site. Such a page can make a browser send
    requests with our cookie, or from within our network; the browser names the site in a header. This applies only to
    requests without a token, as a page of another site can't send one."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        fine = site in (b"same-origin", b"none")
    else:
        # On plain HTTP browsers send Origin alone.
        fine = origin is None or _is_ours(origin, headers)
    if not fine:
        raise forbidden("this request comes from the page of another site")


def _is_ours(origin: bytes, headers: Mapping[bytes, bytes]) -> bool:
    origin = origin.lower()
    # Anything that isn't an origin, such as `null`, counts as another site.
    return _ORIGIN.fullmatch(origin) is not None and origin.partition(b"://")[2] == headers.get(b"host", b"").lower()


def _demand_own_site(headers: Mapping[bytes, bytes]) -> None:
    """Raise `Problem` if no header names the site. Current browsers name it with every request that can change
    something. A cookie alone doesn't prove that the user wanted the request."""
    if b"sec-fetch-site" not in headers and b"origin" not in headers:
        raise forbidden("a session requires a browser: this request lacks the headers Sec-Fetch-Site and Origin")
