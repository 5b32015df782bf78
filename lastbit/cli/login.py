"""`lastbit login`, `logout` and `profiles`: store a service's address and token, and see what is stored."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import click

from lastbit import _calls, errors
from lastbit.cli import profiles
from lastbit.cli.app import PATIENCE, Settings, common_options, examples
from lastbit.cli.output import safe
from lastbit.cli.profiles import Profile

NONE_GIVEN = "nobody can be asked for the address here: give --url, and --token-file if the service has tokens"


@click.command(epilog=examples("lastbit login", "lastbit login --profile prod --url https://lastbit.example"))
@common_options
@click.pass_context
def login(ctx: click.Context, /, *, settings: Settings) -> None:
    """Check the address and token of a service, and store them.

    What isn't given is asked for. Other commands then use them, by default or with --profile. Programs don't: they
    have LASTBIT_URL and LASTBIT_TOKEN.
    """
    name = settings.profile or profiles.DEFAULT
    known = profiles.read(name)
    is_asked = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    url, token = settings.url, settings.secret()
    if url is None:
        if not is_asked:
            raise click.UsageError(NONE_GIVEN)
        url = click.prompt("Address of the service", default=known.url if known else "http://127.0.0.1:8000", err=True)
    if not token and is_asked:
        token = click.prompt(
            "Token (empty if it has none)", default="", show_default=False, hide_input=True, err=True
        ).strip()
    from lastbit.client import Client  # and httpx, which --help doesn't need

    with Client(url, token=token or "", retry=PATIENCE) as client:
        version = client.driver.run(_calls.version)
        with suppress(errors.Forbidden):  # then it is a known token
            next(client.batches(page_size=1), None)
        address = client.driver.service.address
        path = profiles.write(Profile(name, client.url, token or None))
    with settings.output() as output:
        output.answer(
            {"profile": name, "url": address, "version": version, "file": str(path)},
            f"{safe(address)} runs Lastbit {safe(version)} and accepts {'the token' if token else 'calls'}.",
            f"Stored as the profile [bold]{name}[/] in {safe(str(path))}",
        )
    if os.environ.get("LASTBIT_URL"):
        click.echo(f"LASTBIT_URL is set, so it is used instead: unset it, or add --profile {name}", err=True)


@click.command(epilog=examples("lastbit logout", "lastbit logout --profile prod"))
@click.option("--profile", type=profiles.ProfileName(), default=profiles.DEFAULT, show_default=True, help="Its name.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
@click.pass_obj
def logout(before: Settings, profile: str, as_json: bool) -> None:
    """Remove a profile, with its token, from this machine. The service still accepts the token."""
    profiles.remove(profile)
    with Settings(json=as_json).after(before).output() as output:
        output.answer({"removed": profile}, f"the profile [bold]{profile}[/] is removed")


@click.command("profiles", epilog=examples("lastbit profiles"))
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
@click.pass_obj
def list_profiles(before: Settings, as_json: bool) -> None:
    """List the stored services. Tokens are not shown."""
    stored = [profile for name in profiles.names() if (profile := profiles.read(name)) is not None]
    from lastbit._protocol import masked

    rows = [
        {"name": profile.name, "url": masked(profile.url), "has_token": profile.token is not None} for profile in stored
    ]
    with Settings(json=as_json).after(before).output() as output:
        output.listing(
            "profiles",
            rows,
            lambda row: f"[bold]{row['name']}[/]  {safe(str(row['url']))}{'' if row['has_token'] else '  no token'}",
            "no profiles: `lastbit login` stores one",
        )
