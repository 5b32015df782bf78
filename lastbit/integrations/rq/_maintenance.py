"""What the workers' maintenance does: it compares jobs that have ended with their items.

RQ ends a job without a worker: it is cancelled, or its worker died and somebody's look at a registry cleaned it up. No
hook sees all of these.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from rq import Queue
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry

from lastbit import errors
from lastbit.client import Client, HasClients, client_of
from lastbit.ids import ItemId
from lastbit.integrations._verdicts import log_rejections
from lastbit.integrations.rq import _unacked
from lastbit.integrations.rq._jobs import default_client, item_of_job, job_id_of, last_line, stored_error


def reconcile(queue: Queue, client: Client | HasClients | None = None) -> int:
    """Resolve the pending items of jobs of this queue that have ended, and return how many there were.

    Finished jobs ack or skip their items, failed and cancelled ones fail them. Workers call this when they start and at
    each maintenance, by default every ten minutes. The token needs the roles `consume` and `read`. Raises
    `ServiceError`, `ServiceUnreachable`.
    """
    return compare(queue, client_of(client or default_client()), set())


def compare(queue: Queue, client: Client, compared: set[str]) -> int:
    """`reconcile`, without the finished jobs whose items were `compared` before: an item that is acked or skipped stays
    so. There may be thousands of batches, each of which costs a call or two."""
    resolved = _ack_noted(queue, client) + _skip_noted(queue, client)
    canceled = CanceledJobRegistry(queue.name, connection=queue.connection)
    finished = _items_of(queue.finished_job_registry.get_job_ids(cleanup=False), "finished")
    compared.intersection_update(finished)
    ended = {
        **_items_of(queue.failed_job_registry.get_job_ids(cleanup=False), "failed"),
        **_items_of(canceled.get_job_ids(cleanup=False), "canceled"),
        **{item: status for item, status in finished.items() if item not in compared},
    }
    for batch in {ItemId.parse(item).batch for item in ended}:
        for item in _pending(client, batch, [item for item in ended if ItemId.parse(item).batch == batch]):
            if ended[item] == "finished":
                result = client.ack(item)
            elif ended[item] == "canceled":
                result = client.fail(item, "the job was canceled")
            else:
                job = queue.fetch_job(job_id_of(item))
                if job is None or job.get_status() not in (JobStatus.FAILED, JobStatus.STOPPED):
                    continue  # it was put on the queue again
                result = client.fail(item, last_line(stored_error(job)))
            resolved += result.applied
    compared.update(finished)
    return resolved


def _ack_noted(queue: Queue, client: Client) -> int:
    """Ack the items that workers have noted. Most of them belong to running workers, which ack them too."""
    items = _unacked.noted(queue.connection, queue.name)
    if not items:
        return 0
    result = client.ack(items)
    log_rejections(result)
    _unacked.remove(queue.connection, queue.name, items)
    return result.applied


def _skip_noted(queue: Queue, client: Client) -> int:
    """Skip the items that workers have noted."""
    resolved = 0
    for item, reason in _unacked.noted_skips(queue.connection, queue.name).items():
        result = client.skip(item, reason)
        log_rejections(result)
        _unacked.remove_skip(queue.connection, queue.name, item)
        resolved += result.applied
    return resolved


def _items_of(job_ids: Iterable[str], status: str) -> dict[str, str]:
    return {item: status for job_id in job_ids if (item := item_of_job(job_id)) is not None}


def _pending(client: Client, batch: int, items: Sequence[str]) -> Iterator[str]:
    """Those of the items of a live batch that are pending."""
    handle = client.batch(batch)
    try:
        info = handle.refresh()
        if info.ended:
            return
        ranges = list(handle.pending())
    except errors.BatchNotFound:
        return
    starts = [pending.start for pending in ranges]
    for item in items:
        number = ItemId.parse(item).number(info.group_size)
        place = -1 if number is None else bisect_right(starts, number) - 1
        if place >= 0 and number is not None and number < ranges[place].end:
            yield item
