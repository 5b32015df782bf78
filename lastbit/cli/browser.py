"""`--web`: show a batch on the service's page, in the user's browser."""

from __future__ import annotations

import click

from lastbit import errors
from lastbit._protocol import masked
from lastbit.cli.app import F, Session
from lastbit.cli.output import safe


class NoBrowser(errors.LastbitError):
    """No browser could be started."""

    def __str__(self) -> str:
        return f"no browser could be started: the batch is at {self.args[0]}"


def web_option(command: F) -> F:
    return click.option("--web", is_flag=True, help="Show the batch on the service's page, in a browser.")(command)


def show(s: Session, batch: int) -> None:
    """Raises `NoBrowser`."""
    import webbrowser

    address = f"{s.client.url}/#/batches/{batch}"
    shown = masked(address)
    if not webbrowser.open(address):
        raise NoBrowser(shown)
    s.output.answer({"url": shown}, f"opening {safe(shown)}")
