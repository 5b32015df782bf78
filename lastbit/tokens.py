"""Makes tokens, and the lines by which a service recognizes them. The service uses this module too. It needs only the
standard library.

A token is 256 random bits, so only its plain SHA-256 is stored. Such a token can't be guessed, even from its digest. A
slow hash, which protects passwords that people choose, would only slow down each call. A line is

    NAME ROLE[,ROLE…] sha256:HEX [prefix=PREFIX] [requests=N/s] [items=N/s] [bytes=N/s]

where the prefix is percent-encoded and the rates are whole numbers per second. Blank lines and lines that begin with
`#` are ignored. In an environment variable, `;` separates lines.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final
from urllib.parse import quote, unquote

LONGEST: Final = 8192
"""Maximum characters of a token."""
_BEGINS: Final = "lastbit_"
"""A prefix by which secret scanners recognize a token."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RATES: Final = ("requests", "items", "bytes")
_RATE: Final = re.compile(r"([1-9][0-9]{0,8})/s")
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")


class Role(StrEnum):
    READ = "read"
    PRODUCE = "produce"
    CONSUME = "consume"
    ADMIN = "admin"
    """All other roles, and the operators' actions."""


class InvalidTokens(ValueError):
    """Lines that cannot be parsed. The message does not quote them, because they may contain a token."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token's record, without the token itself. `prefix` limits it to batches whose key begins with it; `requests`,
    `items` and `body_bytes` are limits per second."""

    name: str
    roles: frozenset[Role]
    digest: bytes = field(repr=False)
    prefix: str | None = None
    requests: int | None = None
    items: int | None = None
    body_bytes: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether it has a prefix or a rate."""
        return (self.prefix, self.requests, self.items, self.body_bytes) != (None, None, None, None)

    def has(self, roles: Iterable[Role]) -> bool:
        """Whether the token has at least one of these roles, or is an admin."""
        return not self.roles.isdisjoint({Role.ADMIN, *roles})

    def covers(self, key: str | None) -> bool:
        """Whether the token may access a batch or an event with this key."""
        return self.prefix is None or (key is not None and key.startswith(self.prefix))

    def line(self) -> str:
        """The line for the service's file."""
        roles = ",".join(role for role in Role if role in self.roles)
        limit = "" if self.prefix is None else f" prefix={quote(self.prefix, safe='')}"
        for name, rate in (("requests", self.requests), ("items", self.items), ("bytes", self.body_bytes)):
            limit += "" if rate is None else f" {name}={rate}/s"
        return f"{self.name} {roles} sha256:{self.digest.hex()}{limit}"


def new() -> str:
    """A new random token."""
    return _BEGINS + secrets.token_urlsafe(32)


def digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def known(
    token: str,
    name: str,
    roles: Iterable[Role],
    prefix: str | None = None,
    *,
    requests: int | None = None,
    items: int | None = None,
    body_bytes: int | None = None,
) -> Token:
    """The record of `token`, whose `line` the service needs. Raises `ValueError` for an invalid name, prefix or
    rate."""
    if not _NAME.fullmatch(name):
        raise ValueError("a token's name is 1 to 64 letters, digits, dots, underscores and hyphens")
    if prefix is not None and not 1 <= len(prefix) <= 255:
        raise ValueError("a prefix is 1 to 255 characters")
    if any(rate is not None and not 1 <= rate < 10**9 for rate in (requests, items, body_bytes)):
        raise ValueError("a rate is at least 1 a second, and below a billion")
    return Token(name, frozenset(roles), digest(token.encode()), prefix, requests, items, body_bytes)


def parse(text: str) -> list[Token]:
    """Parse the lines. Raises `InvalidTokens`."""
    tokens: dict[bytes, Token] = {}
    names: set[str] = set()
    for number, line in enumerate(re.split("[\n;]", text), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        token = _token(number, words)
        if token.digest in tokens or token.name in names:
            raise InvalidTokens(f"line {number}: an earlier line has the same token or name")
        tokens[token.digest] = token
        names.add(token.name)
    return list(tokens.values())


def _token(number: int, words: list[str]) -> Token:
    def refused(reason: str) -> InvalidTokens:
        return InvalidTokens(f"line {number}: {reason}; `lastbit token new` prints such lines")

    if words[0] == "line" and len(words) > 3 and not words[1].startswith("sha256:") and words[3].startswith("sha256:"):
        raise refused("remove the word `line` before the token's name")
    if not 3 <= len(words) <= 7:
        raise refused("expected a name, roles, sha256:… and perhaps prefix=…, requests=…/s, items=…/s, bytes=…/s")
    if not _NAME.fullmatch(words[0]):
        raise refused("expected a name of letters, digits, dots, underscores and hyphens")
    try:
        roles = frozenset(map(Role, words[1].split(",")))
    except ValueError:
        raise refused(f"expected one or more of the roles {', '.join(Role)}, with commas between them") from None
    digest = _DIGEST.fullmatch(words[2])
    if digest is None:
        raise refused("expected sha256: and 64 hexadecimal digits")
    prefix: str | None = None
    rates: dict[str, int] = {}
    for word in words[3:]:
        option, _, value = word.partition("=")
        if option == "prefix" and prefix is None and 1 <= len(unquote(value)) <= 255:
            prefix = unquote(value)
        elif option in _RATES and option not in rates and (rate := _RATE.fullmatch(value)):
            rates[option] = int(rate[1])
        else:
            raise refused(
                "expected prefix= and 1 to 255 characters, percent-encoded, or requests=, items= or bytes= and a rate "
                "like 100/s, each once"
            )
    return Token(words[0], roles, bytes.fromhex(digest[1]), prefix, *map(rates.get, _RATES))
