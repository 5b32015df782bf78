"""Waits for a batch in Airflow's triggerer.

What could go wrong, and why it can't:

*The triggerer is killed or replaced.* The trigger's state is only its arguments. Another triggerer runs it again, and
the service's answer is the same: a batch that has ended stays so.

*The service is down for a while.* The trigger keeps waiting. The sensor's `timeout` is the limit.

*A wrong address or token.* The sensor's own first look, in the worker, finds it. If the token is withdrawn later, the
trigger ends, and the task fails with the service's answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from lastbit.errors import BatchNotFound, LastbitError, ServiceError, ServiceUnreachable
from lastbit.integrations.airflow import outcome
from lastbit.integrations.airflow._airflow import BaseTrigger, TriggerEvent
from lastbit.integrations.airflow.clients import shared_client
from lastbit.integrations.airflow.hook import DEFAULT_CONNECTION, LastbitHook
from lastbit.integrations.airflow.target import Target
from lastbit.models import Batch

POLL_INTERVAL: Final = 5.0


class LastbitBatchTrigger(BaseTrigger):
    """Fires when the batch is complete, expired or cancelled.

    `poll_interval`: seconds between two looks for a batch that isn't open yet, and between attempts to reach a service
    that doesn't respond. While the batch is open, the trigger polls without such a pause: the service answers when the
    batch ends, or after 30 s.

    The event's payload is `{"batch": …}` as in `outcome.summary`, or `{"error": text}`.
    """

    def __init__(
        self,
        batch_id: int | None = None,
        batch_key: str | None = None,
        opened_since: str | None = None,
        lastbit_conn_id: str = DEFAULT_CONNECTION,
        poll_interval: float = POLL_INTERVAL,
    ) -> None:
        super().__init__()
        self.batch_id = batch_id
        self.batch_key = batch_key
        self.opened_since = opened_since
        self.lastbit_conn_id = lastbit_conn_id
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        names = ("batch_id", "batch_key", "opened_since", "lastbit_conn_id", "poll_interval")
        return f"{__name__}.{type(self).__name__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[Any]:
        try:
            payload: dict[str, Any] = {"batch": outcome.summary(await self._ended())}
        except LastbitError as error:
            payload = {"error": str(error)}
        yield TriggerEvent(payload)

    async def _ended(self) -> Batch:
        """The batch in its last state. Raises the errors that won't pass by waiting."""
        target = Target.of(self.batch_id, self.batch_key, self.opened_since)
        address = await LastbitHook(self.lastbit_conn_id).address_async()
        async with shared_client(address) as client:
            while True:
                try:
                    batch = await target.find_async(client)
                    if batch is not None:
                        return await client.batch(batch.id).wait()
                except BatchNotFound:
                    if target.batch_id is not None:
                        raise
                except (ServiceError, ServiceUnreachable) as error:
                    if not error.is_temporary:
                        raise
                    self.log.warning("still waiting for %s: %s", target, error)
                await asyncio.sleep(self.poll_interval)
