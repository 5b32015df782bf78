"""The `lastbit` command: the client for people and scripts.

Each command calls the client and shows the result. The logic is in the client.
"""

from __future__ import annotations

from lastbit.cli.app import cli
from lastbit.cli.batches import (
    cancel,
    counts,
    delete,
    explain,
    extend,
    list_batches,
    open_batch,
    reopen,
    seal,
    status,
    update,
)
from lastbit.cli.completion import completion
from lastbit.cli.events import append, events
from lastbit.cli.groups import groups
from lastbit.cli.items import ack, fail, failures, pending, reasons, redrive, skip
from lastbit.cli.login import list_profiles, login, logout
from lastbit.cli.processes import commands, processes
from lastbit.cli.tally import tally
from lastbit.cli.tokens import token
from lastbit.cli.verify import repair, verify
from lastbit.cli.watch import watch
from lastbit.cli.webhooks import webhooks

# In the order of the help text.
for _command in (
    open_batch,
    extend,
    update,
    seal,
    ack,
    fail,
    skip,
    status,
    watch,
    explain,
    pending,
    reasons,
    failures,
    redrive,
    list_batches,
    counts,
    cancel,
    reopen,
    delete,
    verify,
    repair,
    events,
    append,
    webhooks,
    groups,
    tally,
    processes,
    commands,
    token,
    login,
    logout,
    list_profiles,
    completion,
):
    cli.add_command(_command)

__all__ = ["cli"]
