"""The page's session: a cookie instead of a token, for a while.

The cookie holds the digest of the token that signed in and an expiry, and is signed. So the service stores nothing, any
process with the key can verify it, and it ends with its token, which is looked up for each request. Scripts can't read
it, other sites' pages can't send it, and a change needs the browser's statement that our own page asks (see `rules`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from typing import Final

SECONDS: Final = 8 * 3600
"""A working day."""
NAME: Final = "lastbit"
SECURE_NAME: Final = "__Host-lastbit"
"""A browser takes this name over HTTPS alone, and from the very host, not from one beside it."""


class Sessions:
    """Makes cookies and reads them. Processes with one key know each other's."""

    def __init__(self, key: str | None = None) -> None:
        self._key = hashlib.sha256((key or secrets.token_hex(32)).encode()).digest()

    def make(self, digest: bytes) -> str:
        """The cookie's value for the token with this digest."""
        text = f"{int(time.time()) + SECONDS}.{_encoded(digest)}"
        return f"{text}.{self._signature(text)}"

    def read(self, cookie_header: bytes) -> bytes:
        """The digest of the token that signed in; that of none where there is no good cookie."""
        cookies: dict[str, str] = {}
        for part in cookie_header.decode("latin-1").split(";"):
            name, _, value = part.strip().partition("=")
            cookies.setdefault(name, value)
        text, _, signature = (cookies.get(SECURE_NAME) or cookies.get(NAME, "")).rpartition(".")
        until, _, digest = text.partition(".")
        if not hmac.compare_digest(signature.encode("latin-1"), self._signature(text).encode()):
            return b""
        return _decoded(digest) if time.time() < int(until) else b""

    def _signature(self, text: str) -> str:
        return _encoded(hmac.new(self._key, text.encode("latin-1"), hashlib.sha256).digest())


def cookie(value: str, headers: Mapping[str, str], scheme: str) -> str:
    """A Set-Cookie header; without a value it ends the session."""
    secure = is_https(headers, scheme)
    name = SECURE_NAME if secure else NAME
    age = SECONDS if value else 0
    return f"{name}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"


def is_https(headers: Mapping[str, str], scheme: str) -> bool:
    """Whether the browser uses HTTPS, to this service or to a proxy before it. A client that forges these headers
    affects only its own cookie."""
    return (
        scheme == "https"
        or headers.get("x-forwarded-proto", "").lower() == "https"
        or headers.get("origin", "").startswith("https://")
    )


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return b""
