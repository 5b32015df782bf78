"""Commands that recount the bits of batches: verify, and repair."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import click

from lastbit.cli import rendering
from lastbit.cli.app import Session, end, examples, session
from lastbit.cli.arguments import BATCH
from lastbit.cli.faults import NOT_SUCCEEDED, add_to_error
from lastbit.cli.output import plain
from lastbit.errors import BatchNotFound, LastbitError
from lastbit.models import Verification


@click.command(epilog=examples("lastbit verify 7", "lastbit verify --all"))
@click.argument("batch", type=BATCH, required=False)
@click.option(
    "--all", "all_batches", is_flag=True, help="Verify all batches that are there when it begins, one after the other."
)
@session
def verify(s: Session, batch: int | None, all_batches: bool) -> None:
    """Recount the bits of BATCH and compare them with its counts."""
    if all_batches:
        if batch is not None:
            raise click.UsageError("expected either BATCH or --all")
        _verify_all(s)
        return
    if batch is None:
        raise click.UsageError("expected BATCH, or --all")
    result = s.client.batch(batch).verify()
    if s.output.as_json:
        s.output.document(result)
    elif result.ok:
        s.output.say(
            f"[bold]batch {batch}[/]  [green]ok[/], the bits agree with the counts: "
            f"{rendering.number(result.items, 'item')}, {result.acked:,} acked, {result.failed:,} failed, "
            f"{result.pending:,} pending"
        )
    else:
        for line in rendering.inconsistency(batch, result):
            s.output.say(line)
    if not result.ok:
        end(NOT_SUCCEEDED)


@dataclass
class _Recount:
    """What `verify --all` has found so far."""

    batches: int = 0
    items: int = 0
    gone: int = 0
    inconsistent: list[dict[str, Any]] = field(default_factory=list)
    current: int | None = None
    """The batch that is being recounted."""

    def run(self, s: Session) -> None:
        with s.output.counter("batches recounted") as count:
            for batch in s.client.batches(page_size=1000):
                self.current = batch.id
                try:
                    self._add(s, batch.id, s.client.batch(batch.id).verify())
                    count(self.batches)
                except BatchNotFound:  # deleted since it was listed
                    self.gone += 1
                self.current = None

    def _add(self, s: Session, batch: int, result: Verification) -> None:
        self.batches += 1
        self.items += result.items
        if not result.ok:
            self.inconsistent.append({"batch": batch, **plain(result)})
            if not s.output.as_json:
                for line in rendering.inconsistency(batch, result):
                    s.output.say(line)

    def fields(self) -> dict[str, Any]:
        counts = {"batches": self.batches, "items": self.items, "gone": self.gone}
        return {**counts, "inconsistent": self.inconsistent}

    def __str__(self) -> str:
        batches = f"{self.batches:,} batch{'' if self.batches == 1 else 'es'}"
        return f"{batches}, {rendering.number(self.items, 'item')}"


def _verify_all(s: Session) -> None:
    found = _Recount()
    try:
        found.run(s)
    except (LastbitError, KeyboardInterrupt):
        if s.output.as_json:
            add_to_error({"stopped_at": found.current, **found.fields()})
        else:
            place = "" if found.current is None else f" at batch {found.current},"
            verdict = f"{len(found.inconsistent):,} inconsistent" if found.inconsistent else "none is inconsistent"
            click.echo(f"Stopped{place} after {found}: {verdict}", err=True)
        raise
    if s.output.as_json:
        s.output.document({"ok": not found.inconsistent, **found.fields()})
    else:
        verdict = f"[red]{len(found.inconsistent):,} inconsistent[/]" if found.inconsistent else "[green]ok[/]"
        gone = f"; {found.gone:,} were deleted in the meantime" if found.gone else ""
        s.output.say(f"{found}: {verdict}{gone}")
    if found.inconsistent:
        end(NOT_SUCCEEDED)


@click.command(epilog=examples("lastbit repair 7 --dry-run", "lastbit repair 7"))
@click.argument("batch", type=BATCH)
@click.option("--dry-run", is_flag=True, help="Show what would be repaired, and change nothing.")
@session
def repair(s: Session, batch: int, dry_run: bool) -> None:
    """Restore the counts and state of BATCH from its bits."""
    result = s.client.batch(batch).repair(dry_run=dry_run)
    s.output.answer(result, *rendering.repair(batch, result))
    if dry_run and result.needed:
        end(NOT_SUCCEEDED)
