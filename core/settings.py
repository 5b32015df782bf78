"""Settings of the service and its jobs: `LASTBIT_…` in the environment, which command-line flags override."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from core.webhooks.backoff import Backoff

SECRET: Final = ("tokens", "session_key")
"""Settings whose values nobody is to read off a terminal."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="LASTBIT_", extra="ignore")

    database_url: str = "sqlite:///lastbit.db"
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    workers: int = Field(default=1, ge=1, le=256)
    tokens: str | None = Field(default=None, repr=False)
    """Lines as `lastbit token new` prints them, with newlines or semicolons between them. With these, or a file of
    them, callers need a token."""
    tokens_file: str | None = None
    """The same in a file, which is read again when it has changed."""
    token_requests: int | None = Field(default=None, ge=1, lt=10**9)
    """Calls a second and process that a token may make whose line doesn't say how many."""
    token_items: int | None = Field(default=None, ge=1, lt=10**9)
    """Items a second and process that it may bring."""
    insecure: bool = False
    """Listen where others can reach it though there are no tokens."""
    session_key: str | None = Field(default=None, min_length=32, repr=False)
    """With which the page's sessions are signed. By default they end when the service is started anew; processes on
    several machines need the same one."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    max_waiting_acks: int = Field(default=50_000, ge=1)
    """Acks that may wait for the combiner before callers are told to come back."""
    shed_after: float = Field(default=0.3, ge=0, le=60)
    """Seconds for which acks may have to wait for long before callers are told to come back; 0: never."""
    max_waiting_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Bytes of large requests that may be under way: of bodies that are being read, and of acks that wait."""
    max_waiting_requests: int = Field(default=2000, ge=1)
    """Requests other than acks that may wait for a thread."""
    max_connections: int = Field(default=10_000, ge=1)
    """Of clients, to a process."""
    head_timeout: float = Field(default=10, gt=0)
    """Seconds for a request's head to arrive."""
    request_timeout: float = Field(default=60, gt=0)
    """Seconds for a request to arrive, and for a part of an answer to be taken."""
    janitor_every: float = Field(default=60, ge=0, le=86400)
    """On SQLite the service is its own janitor: seconds between two passes; 0 leaves it to cron."""
    dispatcher_every: float = Field(default=0.5, ge=0, le=3600)
    """Seconds between two looks for deliveries. On SQLite the service is its own dispatcher, unless this is 0."""
    dispatcher_threads: int = Field(default=16, ge=1, le=256)
    """Deliveries that a dispatcher sends at once; to one webhook, at most a quarter."""
    webhooks_allow_private: bool = False
    """Webhooks may lead to addresses that are not public. Whoever can make one then reaches what this machine does."""
    webhooks_timeout: float = Field(default=15, gt=0, le=60)
    """Seconds for a delivery, from looking up its host to the end of the answer."""
    webhooks_tries: int = Field(default=10, ge=1, le=100)
    webhooks_first_delay: float = Field(default=5, ge=0)
    webhooks_longest_delay: float = Field(default=86_400, ge=0, le=30 * 86_400)

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.webhooks_tries, self.webhooks_first_delay, self.webhooks_longest_delay)

    @property
    def lease(self) -> timedelta:
        """After which a delivery that was being sent is taken for lost."""
        return timedelta(seconds=self.webhooks_timeout + 45)


def settings_of(parser: ArgumentParser, given: Mapping[str, Any]) -> Settings:
    """The environment's, and the flags that were `given` before these. A value that can't be is the parser's error."""
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        value = "" if first["loc"][0] in SECRET else f", got {first['input']!r}"
        parser.error(f"{first['loc'][0]}: {first['msg']}{value}")
