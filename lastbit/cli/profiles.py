"""Profiles: services with their tokens, each under a name, for people who use several. `lastbit login` stores one.

Each is a file of its own, so that two logins at once lose nothing. Only the user can read it. A profile is used whole:
its token is sent to its address alone.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from lastbit import errors

DEFAULT: Final = "default"
"""The profile that is used if none is named."""
VARIABLE: Final = "LASTBIT_PROFILE"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Profile:
    """`token`: None if the service has no tokens."""

    name: str
    url: str
    token: str | None = field(repr=False)


class ProfileFailed(errors.LastbitError):
    """A profile's file can't be read or written."""

    def __str__(self) -> str:
        path, cause = self.args
        return f"the profile {str(path)!r} can't be used: {cause}"


class ProfileName(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """The name of a profile, which is also that of its file."""

    name = "name"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not _NAME.fullmatch(value):
            self.fail(f"{value!r} is no profile's name: expected 1 to 64 letters, digits, '.', '_' or '-'", param, ctx)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in names() if name.startswith(incomplete)]


def folder() -> Path:
    """Where the profiles are: in the user's folder for settings."""
    return Path(click.get_app_dir("lastbit")) / "profiles"


def path_of(name: str) -> Path:
    return folder() / f"{name}.json"


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.json") if _NAME.fullmatch(path.stem))


def read(name: str) -> Profile | None:
    """None if there is no such profile. Raises `ProfileFailed`."""
    path = path_of(name)
    try:
        content = json.loads(path.read_text("utf-8"))
        url, token = content["url"], content.get("token")
        if not isinstance(url, str) or not isinstance(token, str | None):
            raise TypeError("its url and token are texts")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProfileFailed(path, error.strerror) from None
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ProfileFailed(path, f"it is damaged; `lastbit login --profile {name}` writes a new one") from None
    return Profile(name, url, token)


def existing(name: str, source: str) -> Profile:
    """`source`: what names it, for the error. Raises `ProfileFailed`, and `click.UsageError` if there is none."""
    profile = read(name)
    if profile is None:
        known = ", ".join(names())
        there = f"there are {known}" if known else "there is none yet"
        raise click.UsageError(f"{source}: there is no profile {name!r} ({there}); `lastbit login` stores one")
    return profile


def chosen_by_environment() -> Profile | None:
    """The profile that LASTBIT_PROFILE names, or the default one. Raises as `existing`."""
    name = os.environ.get(VARIABLE)
    if not name:
        return read(DEFAULT)
    return existing(ProfileName()(name), VARIABLE)


def write(profile: Profile) -> Path:
    """Store the profile, whole or not at all, for the user alone; returns its file. Raises `ProfileFailed`."""
    path = path_of(profile.name)
    content = {"url": profile.url} if profile.token is None else {"url": profile.url, "token": profile.token}
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:  # mode 0600
            json.dump(content, file, indent=2)
            file.write("\n")
        Path(file.name).replace(path)
    except OSError as error:
        raise ProfileFailed(path, error.strerror) from None
    return path


def remove(name: str) -> None:
    """Raises `ProfileFailed`, and `click.UsageError` if there is none."""
    existing_path = path_of(name)
    try:
        existing_path.unlink()
    except FileNotFoundError:
        existing(name, "--profile")
    except OSError as error:
        raise ProfileFailed(existing_path, error.strerror) from None
