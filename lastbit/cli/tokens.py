"""`lastbit token`: make tokens. It sends nothing, as the service reads its tokens from its own file."""

from __future__ import annotations

import secrets

import click

from lastbit import tokens
from lastbit.cli.app import Settings, examples
from lastbit.cli.arguments import UTF8, Whole
from lastbit.tokens import Role

RATE = Whole(1, 10**9 - 1)


@click.group(epilog=examples("lastbit token new --role read"))
def token() -> None:
    """Make tokens, which identify callers to the service."""


@token.command(epilog=examples("lastbit token new --role produce --role consume --prefix search-"))
@click.option(
    "--role",
    "roles",
    multiple=True,
    required=True,
    type=click.Choice([role.value for role in Role]),
    help="What the token allows; repeat to allow more.",
)
@click.option("--prefix", type=UTF8, help="Only batches whose key begins with this.")
@click.option("--requests", type=RATE, help="Maximum calls per second.")
@click.option("--items", type=RATE, help="Maximum acks, failures, events and tally entries per second, in all.")
@click.option("--bytes", "body_bytes", type=RATE, help="Maximum bytes of request bodies per second.")
@click.option("--name", help="Name in logs and on the page.  [default: the roles and a number]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
@click.option("--jq", metavar="FILTER", help="Print the JSON as this filter of jq makes it.")
@click.pass_context
def new(
    ctx: click.Context,
    roles: tuple[str, ...],
    prefix: str | None,
    requests: int | None,
    items: int | None,
    body_bytes: int | None,
    name: str | None,
    as_json: bool,
    jq: str | None,
) -> None:
    """Make a token, which is shown only once.

    Store it for the client, and add the line that is printed with it to the service's tokens.
    """
    settings: Settings = ctx.obj
    token_text = tokens.new()
    try:
        token_name = name or "-".join((*roles, secrets.token_hex(3)))
        record = tokens.known(
            token_text, token_name, map(Role, roles), prefix, requests=requests, items=items, body_bytes=body_bytes
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with Settings(json=as_json, jq=jq).after(settings).output() as output:
        if output.as_json:
            output.document({"token": token_text, "line": record.line(), "name": record.name})
            return
    click.echo(f"token  {token_text}")
    click.echo(f"line   {record.line()}")
    click.echo(
        "Pass the token to the client (LASTBIT_TOKEN or --token-file); it is not shown\n"
        "again. Add the line, without the word `line`, to the service's file\n"
        "(LASTBIT_TOKENS_FILE) or to LASTBIT_TOKENS.",
        err=True,
    )
