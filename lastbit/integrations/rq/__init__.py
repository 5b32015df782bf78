"""RQ: each job of a fan-out resolves its item when it ends. Needs `pip install 'lastbit[rq]'`.

    rq worker --worker-class lastbit.integrations.rq.LastbitWorker
    batch = fan_out(queue, render, ((product,) for product in products), key="catalog-42")

RQ permits no colons in a job's id, so the job of item `7:0:42` is `lastbit-7-0-42`.

`_worker` resolves items, `_maintenance` compares them with jobs that ended without a worker, `_fan_out` makes the jobs.
One limit is RQ's own: a job that is deleted, or that expires in the queue, leaves no trace, and its item stays
pending. `fan_out` refuses the option `ttl` for that reason.
"""

from __future__ import annotations

from lastbit import errors

try:
    from lastbit.integrations.rq._fan_out import fan_out, resend
    from lastbit.integrations.rq._jobs import default_client, item_of_job, job_id_of
    from lastbit.integrations.rq._maintenance import reconcile
    from lastbit.integrations.rq._worker import LastbitMixin, LastbitSimpleWorker, LastbitWorker
except ImportError as cause:
    raise errors.MissingExtra("rq", "the adapter for RQ") from cause

__all__ = [
    "LastbitMixin",
    "LastbitSimpleWorker",
    "LastbitWorker",
    "default_client",
    "fan_out",
    "item_of_job",
    "job_id_of",
    "reconcile",
    "resend",
]
