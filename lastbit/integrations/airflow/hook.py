"""Clients from an Airflow connection, for tasks of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, Unpack

from lastbit.client import Client
from lastbit.errors import BatchNotFound, LastbitError
from lastbit.integrations._fan_out import FanOutOptions, Send, fan_out
from lastbit.integrations._versions import warn_of_unknown
from lastbit.integrations.airflow import provider
from lastbit.integrations.airflow._airflow import BaseHook
from lastbit.integrations.airflow.address import Address
from lastbit.integrations.airflow.runs import run_key
from lastbit.retry import Retry

T = TypeVar("T")

DEFAULT_CONNECTION: Final = "lastbit_default"


class LastbitHook(BaseHook):
    """The service that the connection `lastbit_conn_id` names: its host is a host name or a URL, its schema `http` or
    `https`, its password the token."""

    conn_name_attr = "lastbit_conn_id"
    default_conn_name = DEFAULT_CONNECTION
    conn_type = "lastbit"
    hook_name = "Lastbit"

    def __init__(self, lastbit_conn_id: str = DEFAULT_CONNECTION, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lastbit_conn_id = lastbit_conn_id

    def get_conn(self) -> Client:
        """A new client: `with hook.get_conn() as client`. Raises `InvalidArgument` if the connection names no service,
        and Airflow's exception if there is no such connection."""
        return self._client()

    def _client(self, retry: Retry | None = None) -> Client:
        address = self.address()
        warn_of_unknown(self.log)
        return Client(address.url, token=address.token, retry=retry)

    def address(self) -> Address:
        """The service's URL and the token."""
        return Address.of(self.get_connection(self.lastbit_conn_id))

    async def address_async(self) -> Address:
        """`address`, awaited: for triggers, because a triggerer must not block."""
        if hasattr(self, "aget_connection"):
            return Address.of(await self.aget_connection(self.lastbit_conn_id))
        from asgiref.sync import sync_to_async  # before Airflow 3.1

        return Address.of(await sync_to_async(self.get_connection)(self.lastbit_conn_id))

    def fan_out(
        self,
        messages: Iterable[T],
        send: Send[T],
        *,
        batch: int | None = None,
        identify: Callable[[T], Any] | None = None,
        **options: Unpack[FanOutOptions],
    ) -> int:
        """`lastbit.integrations.fan_out` within a task. Returns the batch's id, which a sensor can wait for.

        The idempotency key is by default one of the task's run (`run_key`) with `key`, `labels` and `batch`, or that of
        the `parent`: if a try was interrupted, the next one continues the same batch, sends everything that was not
        sent, and repeats at most one chunk. The messages must be the same, in the same order; see there, also for
        `identify`. Several fan-outs in one task need different keys.
        """
        if options.get("idempotency_key") is None and options.get("parent") is None:
            options["idempotency_key"] = run_key(None, options.get("key"), options.get("labels"), batch)
        with self.get_conn() as client:
            handle = fan_out(
                client,
                messages,
                send,
                batch=batch,
                identify=identify,
                **options,
            )
            self.log.info("%s: %s/#/batches/%d", handle, client.url, handle.id)
            return handle.id

    def test_connection(self) -> tuple[bool, str]:
        """For the Test button of the connection's form: whether the service responds and accepts the token."""
        try:
            with self._client(Retry(attempts=1)) as client:
                try:
                    client.batch(0).refresh()  # no batch has this id
                except BatchNotFound:
                    return True, f"The service at {client.url} responds and accepts the token"
                return False, f"The service at {client.url} is no Lastbit service: it has a batch 0"
        except LastbitError as error:
            return False, str(error)

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """The form of the connection before Airflow 3.2."""
        return {
            "hidden_fields": list(provider.HIDDEN_FIELDS),
            "relabeling": dict(provider.RELABELING),
            "placeholders": dict(provider.PLACEHOLDERS),
        }
