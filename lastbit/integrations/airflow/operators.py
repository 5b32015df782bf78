"""Tasks that open, seal and cancel a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

from lastbit.batch import BatchHandle
from lastbit.client import Client
from lastbit.errors import BatchEnded
from lastbit.integrations.airflow import link, outcome
from lastbit.integrations.airflow._airflow import BaseOperator
from lastbit.integrations.airflow.hook import DEFAULT_CONNECTION, LastbitHook
from lastbit.integrations.airflow.runs import run_key
from lastbit.integrations.airflow.target import whole_number


class LastbitOpenBatchOperator(BaseOperator):
    """Opens a batch and returns its id. `key`, `labels`, `items`, `sealed` and `expires_in` are those of `Client.open`.

    All tries of the task return the same batch, as long as it hasn't ended: a cleared task whose batch is complete,
    expired or cancelled opens another one. With an `idempotency_key` of your own, it is always the batch of that key.
    """

    template_fields: Sequence[str] = ("key", "labels", "idempotency_key")
    operator_extra_links = (link.LastbitBatchLink(),)

    def __init__(
        self,
        *,
        key: str | None = None,
        labels: Mapping[str, str] | None = None,
        items: int | None = None,
        sealed: bool = False,
        expires_in: int | timedelta | None = None,
        idempotency_key: str | None = None,
        lastbit_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.key = key
        self.labels = labels
        self.items = items
        self.sealed = sealed
        self.expires_in = expires_in
        self.idempotency_key = idempotency_key
        self.lastbit_conn_id = lastbit_conn_id

    def execute(self, context: Mapping[str, Any]) -> int:
        with LastbitHook(self.lastbit_conn_id).get_conn() as client:
            batch = self._open(client, context)
            link.remember(context, client.url, batch.id)
            self.log.info("%s %s", "found again" if batch.replayed else "opened", batch)
            return batch.id

    def _open(self, client: Client, context: Mapping[str, Any]) -> BatchHandle:
        options: dict[str, Any] = {
            "key": self.key,
            "labels": self.labels,
            "items": self.items,
            "sealed": self.sealed,
            "expires_in": self.expires_in,
        }
        if self.idempotency_key is not None:
            return client.open(**options, idempotency_key=self.idempotency_key)
        for number in count():
            batch = client.open(**options, idempotency_key=run_key(context, options, number))
            if not (batch.replayed and batch.info.ended):
                return batch
        raise AssertionError("unreachable")


class _BatchOperator(BaseOperator):
    """An operator that acts on one batch and returns its counts."""

    template_fields: Sequence[str] = ("batch_id",)
    operator_extra_links = (link.LastbitBatchLink(),)

    def __init__(self, *, batch_id: int | str, lastbit_conn_id: str = DEFAULT_CONNECTION, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.batch_id = batch_id
        self.lastbit_conn_id = lastbit_conn_id

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        batch_id = whole_number("batch_id", self.batch_id)
        with LastbitHook(self.lastbit_conn_id).get_conn() as client:
            batch = client.batch(batch_id)
            link.remember(context, client.url, batch_id)
            self.act(batch)
            self.log.info("%s", batch)
            return outcome.summary(batch.info)

    def act(self, batch: BatchHandle) -> None:
        raise NotImplementedError


class LastbitSealBatchOperator(_BatchOperator):
    """Seals a batch: no more items will come. A sealed or complete batch stays as it is. Returns the counts."""

    def act(self, batch: BatchHandle) -> None:
        batch.seal()


class LastbitCancelBatchOperator(_BatchOperator):
    """Cancels a batch that is not done, for example as a teardown task. A batch that has ended stays as it is. Returns
    the counts."""

    def act(self, batch: BatchHandle) -> None:
        try:
            batch.cancel()
        except BatchEnded:
            batch.refresh()
