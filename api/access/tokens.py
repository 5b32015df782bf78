"""The tokens that the service accepts. They are read at the start, and again when their file changes."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from api.limits.rates import Rates
from core import errors
from core.settings import Settings
from lastbit import tokens
from lastbit.tokens import Role, Token

LOOK_EVERY: Final = 1.0
"""Seconds between two checks of the file."""
EVERYBODY: Final = Token("", frozenset({Role.ADMIN}), b"")
"""The caller of a service without tokens."""

log = structlog.get_logger(__name__)


class Tokens:
    """Tokens by their digests. The time of a lookup by digest reveals nothing, as a caller can't choose a digest, only
    the text it is made of. A new set replaces the old one in one step, so calls need no lock."""

    def __init__(self, settings: Settings) -> None:
        """Raises `errors.Misconfigured`."""
        self._text = settings.tokens
        self._file = None if settings.tokens_file is None else Path(settings.tokens_file)
        self.required = self._text is not None or self._file is not None
        """Whether callers need a token. This never changes while the service runs."""
        self._default = settings.token_requests, settings.token_items, settings.token_bytes
        self.rates = Rates()
        self._stamp = self._look()
        self._known = self._read()
        self.are_current = True
        """False if the file has changed and can't be read."""

    def find(self, digest: bytes) -> Token | None:
        if not self.required:
            return EVERYBODY
        token = self._known.get(digest)
        return token if token is not None and hmac.compare_digest(token.digest, digest) else None

    def all(self) -> list[Token]:
        """The tokens, by name."""
        return sorted(self._known.values(), key=lambda token: token.name)

    def reload_if_changed(self) -> None:
        """Read the file again if it changed. If it can't be read, the previous tokens stay valid: a half-written file
        must lock nobody out."""
        stamp = self._look()
        if stamp != self._stamp:
            self.reload()

    def reload(self) -> None:
        # Before reading, so that a change during the read is noticed at the next check.
        self._stamp = self._look()
        try:
            self._known = self._read()
        except errors.Misconfigured as error:
            self.are_current = False
            log.error("tokens_not_reloaded", error=str(error))
        else:
            self.are_current = True
            self.rates.retain(self._known.keys())
            log.info("tokens_reloaded", tokens=len(self._known))

    def _look(self) -> tuple[int, ...] | None:
        if self._file is None:
            return None
        try:
            status = self._file.stat()
        except OSError:
            return None
        # The last one changes with the file's owner and mode too.
        return status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns

    def _read(self) -> dict[bytes, Token]:
        loaded_tokens: list[Token] = []
        for text, text_ in self._texts():
            try:
                loaded_tokens += tokens.parse(text())
            except (OSError, ValueError) as error:
                # The message of a decoding error quotes bytes of the file.
                problem = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
                if isinstance(error, FileNotFoundError):
                    problem = "there is no such file; `lastbit token new` prints a line for it"
                raise errors.Misconfigured(f"the tokens in {text_} can't be read: {problem}") from None
        if self.required and not loaded_tokens:
            text_ = " and ".join(text_ for _, text_ in self._texts())
            raise errors.Misconfigured(f"there is no token in {text_}; `lastbit token new` makes one")
        return {token.digest: self._rated(token) for token in loaded_tokens}

    def _rated(self, token: Token) -> Token:
        """The token with the settings' rates as defaults."""
        requests, items, body_bytes = self._default
        return replace(
            token,
            requests=token.requests or requests,
            items=token.items or items,
            body_bytes=token.body_bytes or body_bytes,
        )

    def _texts(self) -> Iterator[tuple[Callable[[], str], str]]:
        """(function that reads the text, name of the source) of each configured source."""
        text = self._text
        if text is not None:
            yield lambda: text, "LASTBIT_TOKENS"
        file = self._file
        if file is not None:
            yield lambda: file.read_text("utf-8-sig"), str(file)  # some editors begin a file with a byte order mark
