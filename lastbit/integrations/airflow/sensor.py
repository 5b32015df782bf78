"""The task that waits for a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from lastbit.integrations.airflow import link, outcome
from lastbit.integrations.airflow._airflow import AirflowException, BaseSensorOperator, PokeReturnValue, conf
from lastbit.integrations.airflow.hook import DEFAULT_CONNECTION, LastbitHook
from lastbit.integrations.airflow.target import Target
from lastbit.integrations.airflow.trigger import POLL_INTERVAL, LastbitBatchTrigger


class LastbitBatchSensor(BaseSensorOperator):
    """Waits until a batch is complete: by its `batch_id`, or the newest one with `batch_key`, once there is one.

    Both can be templates or other tasks' outputs. `opened_since` (a time, or a template of one) ignores earlier batches
    with the key; it is for keys that each run uses again. The task fails if the batch is cancelled or expires, and with
    `fail_on_failed_items` if items have failed. It returns the counts as its XCom: `{id, key, state, items, acked,
    failed, skipped, pending, succeeded}`.

    `deferrable`: wait in the triggerer, without a worker; by default Airflow's setting `[operators]
    default_deferrable`. `trigger_interval` is the trigger's `poll_interval`, in seconds. Without `deferrable`,
    `poke_interval` and `mode` apply. `timeout` applies to both, in seconds or as `timedelta`.
    """

    template_fields: Sequence[str] = ("batch_id", "batch_key", "opened_since")
    operator_extra_links = (link.LastbitBatchLink(),)
    ui_color = "#d9ead3"

    def __init__(
        self,
        *,
        batch_id: int | str | None = None,
        batch_key: str | None = None,
        opened_since: datetime | str | None = None,
        fail_on_failed_items: bool = False,
        lastbit_conn_id: str = DEFAULT_CONNECTION,
        deferrable: bool | None = None,
        trigger_interval: float = POLL_INTERVAL,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.batch_id = batch_id
        self.batch_key = batch_key
        self.opened_since = opened_since
        self.fail_on_failed_items = fail_on_failed_items
        self.lastbit_conn_id = lastbit_conn_id
        self.deferrable = (
            conf.getboolean("operators", "default_deferrable", fallback=False) if deferrable is None else deferrable
        )
        self.trigger_interval = trigger_interval

    def poke(self, context: Mapping[str, Any]) -> Any:
        target = Target.of(self.batch_id, self.batch_key, self.opened_since)
        with LastbitHook(self.lastbit_conn_id).get_conn() as client:
            batch = target.find(client)
            if batch is not None:
                link.remember(context, client.url, batch.id)
        if batch is not None and batch.ended:
            return PokeReturnValue(True, self._outcome(outcome.summary(batch)))
        self.log.info(
            "waiting for %s", target if batch is None else f"{target}: {batch.state}, {batch.pending} pending"
        )
        if self.deferrable:
            # From here and not from `execute`, so that soft_fail, never_fail and silent_fail apply to this first look.
            self._wait_in_the_triggerer(target)
        return False

    def _wait_in_the_triggerer(self, target: Target) -> None:
        since = target.opened_since
        self.defer(
            trigger=LastbitBatchTrigger(
                target.batch_id,
                target.batch_key,
                None if since is None else since.isoformat(),
                self.lastbit_conn_id,
                self.trigger_interval,
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )

    def execute_complete(self, context: Mapping[str, Any], event: Mapping[str, Any]) -> dict[str, Any]:
        """Continue in a worker after the trigger's event."""
        if "error" in event:
            raise AirflowException(event["error"])
        return self._outcome(event["batch"])

    def _outcome(self, batch: dict[str, Any]) -> dict[str, Any]:
        by_key = self.batch_id is None
        outcome.check(batch, fail_on_failed_items=self.fail_on_failed_items, by_key=by_key)
        return batch
