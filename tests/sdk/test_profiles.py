"""Profiles: what login checks and stores, and which address and token a command uses."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from core.programs import version
from lastbit import tokens
from lastbit.cli import profiles
from lastbit.cli.app import Settings
from lastbit.cli.profiles import Profile
from lastbit.tokens import Role
from tests.sdk.conftest import ScriptedService
from tests.sdk.terminals import on_terminal
from tests.support.servers import run_module, running_service, sqlite_file

TOKEN = tokens.new()
PRODUCER = tokens.new()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of settings, and no variable that names a service."""
    for name in ("LASTBIT_URL", "LASTBIT_TOKEN", "LASTBIT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "*")
    return tmp_path / "lastbit" / "profiles"


@pytest.fixture(scope="module")
def tokens_url() -> Iterator[str]:
    """A service that knows two tokens."""
    lines = [tokens.known(TOKEN, "all", Role).line(), tokens.known(PRODUCER, "producer", [Role.PRODUCE]).line()]
    with sqlite_file() as database, running_service(database, LASTBIT_TOKENS="\n".join(lines)) as service:
        yield service.url


def lastbit(*arguments: str, code: int = 0, **variables: str) -> Any:
    result = run_module("lastbit", *arguments, environment={**os.environ, **variables})
    assert result.returncode == code, result
    assert "Traceback" not in result.stderr
    return result


def test_a_login_is_checked_and_used(tokens_url: str, folder: Path, tmp_path: Path) -> None:
    """The token is in a file that only the user can read, and in no output."""
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    shown = lastbit("login", "--url", tokens_url, "--token-file", str(secret))
    assert shown.stdout.splitlines() == [
        f"{tokens_url} runs Lastbit {version()} and accepts the token.",
        f"Stored as the profile default in {folder}/default.json",
    ]
    assert lastbit("open", "--items", "3", "--jq", ".items").stdout == "3\n"
    file = folder / "default.json"
    assert json.loads(file.read_text()) == {"url": tokens_url, "token": TOKEN}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, folder)] == [0o600, 0o700]
    assert lastbit("profiles").stdout == f"default  {tokens_url}\n"
    document = json.loads(
        lastbit("login", "--url", tokens_url, "--token", TOKEN, "--profile", "second", "--json").stdout
    )
    assert document == {
        "profile": "second",
        "url": tokens_url,
        "version": version(),
        "file": str(folder / "second.json"),
    }
    assert sorted(path.name for path in folder.iterdir()) == ["default.json", "second.json"]
    lastbit("logout")
    assert not file.exists()
    assert "there are second" in lastbit("logout", code=2).stderr


def test_a_token_that_may_not_read_is_known(tokens_url: str, folder: Path) -> None:
    lastbit("login", "--url", tokens_url, "--token", PRODUCER)
    assert (folder / "default.json").exists()


@pytest.mark.parametrize("token", [[], ["--token", tokens.new()]], ids=["none", "unknown"])
def test_a_refused_login_stores_nothing(tokens_url: str, folder: Path, token: list[str]) -> None:
    assert "401 unauthorized" in lastbit("login", "--url", tokens_url, *token, code=1).stderr
    assert not folder.exists()


def test_what_is_no_lastbit_is_not_stored(scripted_service: ScriptedService, folder: Path) -> None:
    scripted_service.replies((200, {}, {"status": "fine"}))
    assert "Is this the address of a Lastbit" in lastbit("login", "--url", scripted_service.url, code=1).stderr
    assert not folder.exists()


def test_a_terminal_is_asked_for_address_and_token(tokens_url: str, folder: Path) -> None:
    """And the token is not shown. A script can't be asked."""
    screen = on_terminal("", ["login"], width=200, typed=f"{tokens_url}\n{TOKEN}\n", after=": ")
    assert screen.code == 0, screen.text
    assert "Address of the service [http://127.0.0.1:8000]: " in screen.text
    assert TOKEN not in screen.raw
    assert json.loads((folder / "default.json").read_text()) == {"url": tokens_url, "token": TOKEN}
    assert f"[{tokens_url}]: " in on_terminal("", ["login"], width=200, typed=f"\n{TOKEN}\n", after=": ").text
    assert "give --url" in lastbit("login", code=2).stderr


def test_a_login_that_the_environment_hides_says_so(service_url: str) -> None:
    shown = lastbit("login", "--url", service_url, LASTBIT_URL="http://127.0.0.1:1")
    assert "LASTBIT_URL is set" in shown.stderr
    assert "accepts calls" in shown.stdout


STORED = [Profile("default", "http://d", "td"), Profile("prod", "http://p", "tp"), Profile("plain", "http://o", None)]


@pytest.mark.parametrize(
    ("before", "after", "environment", "expected"),
    [
        ({}, {}, {}, ("http://d", "td")),
        ({}, {}, {"LASTBIT_TOKEN": "te"}, ("http://d", "te")),
        ({}, {}, {"LASTBIT_PROFILE": "prod"}, ("http://p", "tp")),
        ({}, {}, {"LASTBIT_PROFILE": "prod", "LASTBIT_URL": "http://e"}, (None, None)),
        ({}, {"token": "t"}, {"LASTBIT_TOKEN": "te"}, ("http://d", "t")),
        ({"url": "http://u"}, {}, {"LASTBIT_PROFILE": "prod"}, ("http://u", None)),
        ({"profile": "prod"}, {}, {"LASTBIT_URL": "http://e", "LASTBIT_TOKEN": "te"}, ("http://p", "tp")),
        ({}, {"profile": "plain"}, {"LASTBIT_TOKEN": "te"}, ("http://o", "")),
        ({"token": "t"}, {"profile": "prod"}, {}, ("http://p", "t")),
        ({"url": "http://u"}, {"profile": "prod"}, {}, ("http://p", "tp")),
        ({"profile": "prod"}, {"url": "http://u"}, {}, ("http://u", None)),
    ],
)
def test_options_go_before_the_environment_and_that_before_profiles(
    before: dict[str, str],
    after: dict[str, str],
    environment: Mapping[str, str],
    expected: tuple[str | None, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a profile's token is sent to its address alone. None: what the client itself reads from the environment."""
    for profile in STORED:
        profiles.write(profile)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Settings(**after).after(Settings(**before)).service() == expected


@pytest.mark.parametrize(
    ("options", "variables", "problem"),
    [
        (["--profile", "prod", "--url", "http://u"], {}, "--url and --profile exclude each other"),
        (["--profile", "test"], {}, "--profile: there is no profile 'test' (there are default, plain, prod)"),
        ([], {"LASTBIT_PROFILE": "test"}, "LASTBIT_PROFILE: there is no profile 'test'"),
        (["--profile", "../x"], {}, "'../x' is no profile's name"),
        ([], {"LASTBIT_PROFILE": "../x"}, "'../x' is no profile's name"),
    ],
)
def test_a_wrong_profile_is_named(options: list[str], variables: dict[str, str], problem: str) -> None:
    for profile in STORED:
        profiles.write(profile)
    assert problem in " ".join(lastbit("list", *options, code=2, **variables).stderr.split())


def test_a_damaged_profile_says_how_to_mend_it(folder: Path) -> None:
    profiles.write(STORED[0])
    (folder / "default.json").write_text("{")
    assert "`lastbit login --profile default` writes a new one" in lastbit("list", code=1).stderr


def test_names_of_profiles_are_completed() -> None:
    for profile in STORED:
        profiles.write(profile)
    option = next(option for option in click.Context(_list()).command.params if option.name == "profile")
    assert [item.value for item in option.shell_complete(click.Context(_list()), "p")] == ["plain", "prod"]


def _list() -> click.Command:
    from lastbit.cli import cli

    return cli.commands["list"]
