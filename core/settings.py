"""Settings of the service and its jobs: `LASTBIT_…` in the environment, which command-line flags override."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="LASTBIT_", extra="ignore")

    database_url: str = "sqlite:///lastbit.db"
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    workers: int = Field(default=1, ge=1, le=256)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    max_waiting_acks: int = Field(default=50_000, ge=1)
    """Acks that may wait for the combiner before callers are told to come back."""
    janitor_every: float = Field(default=60, ge=0, le=86400)
    """On SQLite the service is its own janitor: seconds between two passes; 0 leaves it to cron."""
