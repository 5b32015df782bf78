"""`lastbit watch`: a batch on its way, until it ends."""

from __future__ import annotations

import click

from lastbit import progress
from lastbit.cli import rendering
from lastbit.cli.app import NOT_SUCCEEDED, Session, end, session
from lastbit.cli.arguments import BATCH, DURATION
from lastbit.models import Batch


class Lines:
    """A plain line for each change, where no terminal can show a bar."""

    def __init__(self, s: Session) -> None:
        self._output = s.output
        self._pace = progress.Pace()
        self._last: tuple[str, int, int] | None = None

    def __call__(self, batch: Batch) -> None:
        self._pace.saw(batch)
        seen = (batch.state, batch.resolved, batch.items)
        if seen == self._last:
            return
        self._last = seen
        self._output.say(
            f"batch {batch.id} {batch.state}: {batch.resolved:,} of {batch.items:,} resolved, "
            f"{rendering.share(batch)}, {self._pace.words(batch)}"
        )


@click.command()
@click.argument("batch", type=BATCH)
@click.option("--timeout", type=DURATION, help="Give up after this long: seconds, or 15m, 12h.")
@session
def watch(s: Session, batch: int, timeout: int | None) -> None:
    """Follow BATCH until it is complete, expired or cancelled."""
    handle = s.client.batch(batch)
    if s.output.as_json:
        ended = handle.wait(timeout)
        s.output.document(ended)
    elif s.output.console.is_terminal:
        with progress.bar(s.output.console) as bar:
            ended = handle.wait(timeout, progress=bar)
    else:
        ended = handle.wait(timeout, progress=Lines(s))
    if not s.output.as_json:
        s.output.say(
            f"{rendering.title(ended.id, ended.key)}  {rendering.state(ended)}: "
            f"{rendering.number(ended.items, 'item')}, {ended.acked:,} acked, {ended.failed:,} failed, "
            f"{ended.pending:,} pending"
        )
    if not ended.succeeded:
        end(NOT_SUCCEEDED)
