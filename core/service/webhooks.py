"""Webhooks: subscriptions to the feed, and the log of their deliveries."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import structlog
from sqlalchemy.engine import Connection

from core import errors
from core.batches import batch as batches
from core.storage.database import Database
from core.webhooks import delivery_log, rotation, subscriptions
from core.webhooks.delivery_log import Progress
from core.webhooks.sender import Sender, SendResult

log = structlog.get_logger(__name__)


class WebhookService:
    """Methods that take a webhook's id raise `errors.WebhookNotFound`."""

    def __init__(self, database: Database, sender: Sender | None) -> None:
        self._database = database
        self._sender = sender

    def create(self, url: str, types: Sequence[str] | None, label: str | None) -> subscriptions.Created:
        """Raises `errors.InvalidRequest` for a URL to which nothing may be sent."""
        self.check(url)
        return self._database.write(subscriptions.create, url, types, label, subscriptions.new_secret())

    def check(self, url: str, place: str = "body.url") -> None:
        """Raise `errors.InvalidRequest` if nothing may be sent to the URL, which is at this place of the request."""
        subscriptions.fit(self._require_sender(), url, place)

    def page(self, before: int | None, limit: int) -> tuple[list[subscriptions.Webhook], int | None]:
        """The newest webhooks with an id below `before`, without the callbacks of batches, and the `before` of the next
        page."""
        return self._database.read(subscriptions.page, before, limit)

    def get(self, webhook: int) -> subscriptions.Webhook:
        return self._database.read(subscriptions.get, webhook)

    def delete(self, webhook: int) -> None:
        subscriptions.delete(self._database, webhook)

    def rotate_secret(
        self, webhook: int, overlap: timedelta = rotation.OVERLAP, idempotency_key: str | None = None
    ) -> subscriptions.Created:
        """Give the webhook a new secret. For the time of `overlap`, the earlier ones sign too. Raises
        `errors.IdempotencyKeyReused`, `UpgradeNotFinished`."""
        secret = subscriptions.new_secret()
        result = self._database.write(subscriptions.rotate_secret, webhook, secret, overlap, idempotency_key)
        if not result.replayed:
            log.info("secret_rotated", webhook=webhook, overlap=overlap.total_seconds())
        return result

    def deliveries(
        self, webhook: int, state: Progress | None, before: int | None, limit: int
    ) -> tuple[list[delivery_log.Delivery], int | None]:
        """The newest deliveries of events at positions below `before`, and the `before` of the next page."""
        return self._database.snapshot(delivery_log.log, webhook, state, before, limit)

    def of_batch(self, batch: int) -> subscriptions.Webhook | None:
        """The callback of the batch. Raises `errors.BatchNotFound`."""

        def read(tx: Connection) -> subscriptions.Webhook | None:
            batches.get(tx, batch)
            return subscriptions.of_batch(tx, batch)

        return self._database.snapshot(read)

    def deliveries_of_batch(self, batch: int) -> list[delivery_log.Delivery]:
        """Raises `errors.BatchNotFound`."""

        def read(tx: Connection) -> list[delivery_log.Delivery]:
            batches.get(tx, batch)
            return delivery_log.of_batch(tx, batch)

        return self._database.snapshot(read)

    def redeliver(self, webhook: int, *, position: int | None = None, event: str | None = None) -> int:
        """Returns the number of deliveries that are due again. Raises `errors.WebhookDisabled`, `PositionTrimmed`,
        `InvalidRequest`."""
        return delivery_log.redeliver(self._database, webhook, position=position, event=event)

    def test(self, webhook: int) -> tuple[str, SendResult]:
        """Send a test event. Returns its id and the receiver's response."""
        return subscriptions.test(self._database, self._require_sender(), webhook)

    def _require_sender(self) -> Sender:
        if self._sender is None:
            raise errors.Misconfigured("webhooks can't be sent from here")
        return self._sender
