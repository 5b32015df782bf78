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
"""Settings whose values must not be shown."""
_EXPECTED: Final = {
    "bool_parsing": "expected true or false",
    "float_parsing": "expected a number",
    "finite_number": "expected a number",
    "int_parsing": "expected a whole number",
    "greater_than": "expected more than {gt:,.0f}",
    "greater_than_equal": "expected at least {ge:,.0f}",
    "less_than_equal": "expected at most {le:,.0f}",
    "literal_error": "expected {expected}",
}
"""By the type of pydantic's error."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="LASTBIT_", extra="ignore")

    database_url: str = "sqlite:///lastbit.db"
    database_schema: str | None = None
    """The schema of PostgreSQL, or the database of MariaDB and MySQL, that has the tables, beside those of others."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    probe_port: int | None = Field(default=None, ge=1, le=65535)
    """A second port, for probes and scrapes, whose connections don't count as others."""
    workers: int = Field(default=1, ge=1, le=256)
    tokens: str | None = Field(default=None, repr=False)
    """Lines as printed by `lastbit token new`, separated by newlines or semicolons. With these, or a file of them,
    clients need a token."""
    tokens_file: str | None = None
    """A file of such lines, which is read again when it changes."""
    token_requests: int | None = Field(default=None, ge=1, lt=10**9)
    """Maximum calls per second and process for tokens without their own limit."""
    token_items: int | None = Field(default=None, ge=1, lt=10**9)
    """Maximum items per second and process for tokens without their own limit."""
    token_bytes: int | None = Field(default=None, ge=1, lt=10**9)
    """Maximum bytes of bodies per second and process for tokens without their own limit."""
    insecure: bool = False
    """Allow listening on public addresses without tokens."""
    session_key: str | None = Field(default=None, min_length=32, repr=False)
    """The key that signs the page's sessions. By default sessions end when the service restarts; processes on several
    machines need the same key."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    max_waiting_acks: int = Field(default=50_000, ge=1)
    """Maximum acks that wait for the combiner; further ones get a 503."""
    shed_after: float = Field(default=0.3, ge=0, le=60)
    """Seconds of persistently long waits after which acks get a 503; 0: never."""
    max_waiting_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Maximum bytes of large requests in progress: of bodies that are being read, and of waiting acks."""
    max_waiting_requests: int = Field(default=2000, ge=1)
    """Maximum requests other than acks that wait for a thread."""
    max_connections: int = Field(default=10_000, ge=1)
    """Maximum client connections per process."""
    head_timeout: float = Field(default=10, gt=0)
    """Maximum seconds until a request's head has arrived."""
    request_timeout: float = Field(default=60, gt=0)
    """Maximum seconds until a request has arrived, and until the client reads a part of the response."""
    janitor_every: float = Field(default=60, ge=0, le=86400)
    """Seconds between passes of the built-in janitor, on SQLite only; 0: use cron instead."""
    dispatcher_every: float = Field(default=0.5, ge=0, le=3600)
    """Seconds between two rounds of the dispatcher. On SQLite it is built into the service, unless this is 0."""
    dispatcher_threads: int = Field(default=16, ge=1, le=256)
    """Maximum deliveries that a dispatcher sends at the same time; to one webhook, at most a quarter of it, or half
    while the receiver answers quickly."""
    webhooks_allow_private: bool = False
    """Allow webhooks to addresses that are not public. Clients that can create webhooks can then reach every address
    that this machine can reach."""
    webhooks_timeout: float = Field(default=15, gt=0, le=60)
    """Maximum seconds for a delivery, from the DNS lookup to the end of the response."""
    webhooks_tries: int = Field(default=10, ge=1, le=100)
    webhooks_first_delay: float = Field(default=5, ge=0)
    webhooks_longest_delay: float = Field(default=86_400, ge=0, le=30 * 86_400)

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.webhooks_tries, self.webhooks_first_delay, self.webhooks_longest_delay)

    @property
    def lease(self) -> timedelta:
        """The time after which a claimed delivery may be claimed again."""
        return timedelta(seconds=self.webhooks_timeout + 45)


def settings_of(parser: ArgumentParser, flags: Mapping[str, Any]) -> Settings:
    """Settings from the environment, overridden by `flags`. The parser reports an invalid value and exits."""
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        value = "" if first["loc"][0] in SECRET else f", got {first['input']!r}"
        name = str(first["loc"][0])
        flag = "--" + name.removeprefix("dispatcher_").replace("_", "-")
        source = f"LASTBIT_{name.upper()}" if flags.get(name) is None else flag
        parser.error(f"{source}: {_expected(first)}{value}")


def _expected(error: Any) -> str:
    text = _EXPECTED.get(error["type"])
    return error["msg"] if text is None else text.format(**error.get("ctx", {}))
