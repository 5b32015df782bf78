"""`lastbit watch`: follow a batch until it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import click

from lastbit import progress
from lastbit.batch import BatchHandle
from lastbit.cli import rendering
from lastbit.cli.app import Session, end, examples, session
from lastbit.cli.arguments import BATCH, DURATION
from lastbit.cli.faults import NOT_SUCCEEDED, ending_without_a_reader
from lastbit.models import Batch


class Tree:
    """Shows a batch that has children with the sums of its tree."""

    def __init__(self, handle: BatchHandle, show: Callable[[Batch], None]) -> None:
        self._handle = handle
        self._show = show

    def __call__(self, batch: Batch) -> None:
        sums = self._handle.progress()
        if sum(sums.batches.values()) > 1:
            counts = {name: getattr(sums, name) for name in ("items", "acked", "failed", "skipped", "pending")}
            batch = replace(batch, **counts)
        self._show(batch)


@click.command(epilog=examples("lastbit watch 7", "lastbit watch catalog-42 --timeout 2h"))
@click.argument("batch", type=BATCH)
@click.option("--timeout", type=DURATION, help="Give up after this long: seconds, or 15m, 12h.")
@session
def watch(s: Session, batch: int, timeout: int | None) -> None:
    """Follow BATCH until it is complete, expired or cancelled. If it has children, the progress is that of all batches
    below it."""
    handle = s.client.batch(batch)
    with ending_without_a_reader():
        if s.output.as_json:
            final = handle.wait(timeout)
        elif s.output.console.is_terminal:
            with progress.bar(s.output.console) as bar:
                final = handle.wait(timeout, progress=Tree(handle, bar))
        else:
            final = handle.wait(timeout, progress=Tree(handle, progress.Lines(s.output.say)))
    if s.output.as_json:
        s.output.document(final)
    else:
        s.output.say(
            f"{rendering.title(final.id, final.key)}  {rendering.state(final)}: "
            f"{rendering.number(final.items, 'item')}, {final.acked:,} acked, {final.failed:,} failed"
            f"{rendering.skipped(final)}, {final.pending:,} pending"
        )
    if not final.succeeded:
        end(NOT_SUCCEEDED)
