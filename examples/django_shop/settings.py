"""Django's settings, with the addresses from the environment."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

SECRET_KEY = "only for this example"  # noqa: S105
INSTALLED_APPS = ["examples.django_shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TIME_ZONE = "UTC"
USE_TZ = True

DATABASES: dict[str, dict[str, object]] = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db", "OPTIONS": {"transaction_mode": "IMMEDIATE"}}
}
if url := os.environ.get("DATABASE_URL"):
    address = urlsplit(url)
    DATABASES["default"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": address.path[1:],
        "USER": unquote(address.username or ""),
        "PASSWORD": unquote(address.password or ""),
        "HOST": address.hostname,
        "PORT": address.port,
    }
