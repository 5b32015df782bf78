"""The page's session: a cookie that replaces the token for a limited time.

The cookie contains the digest of the token that signed in and an expiry, and is signed. So the service stores nothing,
and any process with the key can verify it. The token is looked up for each request, so removing it ends the session.
Scripts can't read the cookie, and pages of other sites can't send it. For a request that changes something, the browser
must also confirm that it comes from our own page (see `rules`).
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
"""The name over HTTPS. Browsers accept this prefix only over HTTPS and only from the host itself, not from another
subdomain."""


class Sessions:
    """Makes and verifies cookies. Processes with the same key accept each other's cookies."""

    def __init__(self, key: str | None = None) -> None:
        self._key = hashlib.sha256((key or secrets.token_hex(32)).encode()).digest()

    def make(self, digest: bytes) -> str:
        """The cookie's value for the token with this digest."""
        text = f"{int(time.time()) + SECONDS}.{_encoded(digest)}"
        return f"{text}.{self._signature(text)}"

    def read(self, cookie_header: bytes) -> bytes:
        """The digest of the token that signed in, or empty bytes if there is no valid cookie."""
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
    """The value of a Set-Cookie header. An empty `value` ends the session."""
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
