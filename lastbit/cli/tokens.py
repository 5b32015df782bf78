"""`lastbit token`: making tokens. Nothing is sent: what the service has to know stands in a file of its own."""

from __future__ import annotations

import secrets

import click

from lastbit import tokens
from lastbit.cli.app import Settings
from lastbit.cli.output import Output
from lastbit.tokens import Role


@click.group()
def token() -> None:
    """Make tokens, by which a service knows who calls."""


@token.command()
@click.option(
    "--role",
    "roles",
    multiple=True,
    required=True,
    type=click.Choice([role.value for role in Role]),
    help="What it may do; may be given several times.",
)
@click.option("--prefix", help="Only with batches whose key begins so.")
@click.option("--requests", type=int, help="At most so many calls a second.")
@click.option("--items", type=int, help="At most so many items a second, of acks, failures, events and tallies.")
@click.option("--name", help="How logs and the page call it.  [default: the roles and a number]")
@click.option("--json", "as_json", is_flag=True, help="Answer with one JSON document.")
@click.pass_context
def new(
    ctx: click.Context,
    roles: tuple[str, ...],
    prefix: str | None,
    requests: int | None,
    items: int | None,
    name: str | None,
    as_json: bool,
) -> None:
    """Make a token. It is shown this once: keep it for the client, and give the service the line."""
    given: Settings = ctx.obj
    made = tokens.new()
    try:
        named = name or "-".join((*roles, secrets.token_hex(3)))
        known = tokens.known(made, named, map(Role, roles), prefix, requests=requests, items=items)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    output = Output(as_json or given.json)
    if output.as_json:
        output.document({"token": made, "line": known.line(), "name": known.name})
        return
    click.echo(f"token  {made}")
    click.echo(f"line   {known.line()}")
    click.echo(
        "The token is for the client (LASTBIT_TOKEN or --token-file), and is not shown again. The line is for the\n"
        "service: a line of LASTBIT_TOKENS_FILE, or of LASTBIT_TOKENS.",
        err=True,
    )
