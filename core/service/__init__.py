"""The service as `api` and `jobs` call it: an attribute for each noun, and each method one transaction.

`service.batches.open(…)` is `BatchService.open` in `batches`. `enlisted` has the verbs in a caller's transaction. The
other nouns are `acks`, `feed`, `tallies`,
`webhooks`, `consumer_groups` and `processes`, each a module of that name. `batch_facts` caches what never changes of a
batch. A new verb becomes a method of its noun; its SQL goes into the noun's package in `core`.

Methods block, so they are called from threads. Acks are queued: `acks.ack` returns a future that is done after the
commit. So are the verbs that share transactions: `writes.submit` takes their operations. `reads` has the reads that
share transactions.
"""

from __future__ import annotations

from collections.abc import Callable

from core.commits.combiner import Combiner, Commit, GroupCommit, Inline
from core.service import in_use
from core.service.acks import AckService
from core.service.batch_facts import BatchFacts
from core.service.batches import BatchService
from core.service.consumer_groups import ConsumerGroupService
from core.service.enlisted import EnlistedService
from core.service.feed import FeedService
from core.service.in_use import InUse
from core.service.processes import ProcessService
from core.service.reads import MAX_WAITING, ReadService
from core.service.tallies import TallyService
from core.service.webhooks import WebhookService
from core.service.writes import WriteService
from core.storage import dialects, schema
from core.storage.database import Database
from core.storage.numbering import Numbering
from core.webhooks.sender import Sender


class Service:
    """Every verb that a client can call. `stop` answers the acks in progress and closes the database's connections.

    `combiner` decides how acks share transactions, `writes` how other writing verbs do. `sender` sends webhooks;
    without one they can't be created or tested.
    """

    def __init__(
        self,
        database: Database,
        *,
        combiner: Callable[[Commit], GroupCommit] = Combiner,
        writes: Callable[[Commit], GroupCommit] = Inline,
        sender: Sender | None = None,
        max_waiting_reads: int = MAX_WAITING,
    ) -> None:
        self.database = database
        facts = BatchFacts(database)
        self.acks = AckService(database, facts, combiner)
        self.writes = WriteService(database, self.acks, writes)
        self.enlisted = EnlistedService(database, self.acks)
        self.reads = ReadService(database, max_waiting_reads)
        self.webhooks = WebhookService(database, sender)
        self.batches = BatchService(database, facts, self.acks, self.writes, self.reads, self.webhooks)
        self.feed = FeedService(database, self.writes, self.reads)
        self.tallies = TallyService(database, self.writes)
        self.consumer_groups = ConsumerGroupService(database, self.writes)
        self.processes = ProcessService(database, self.writes)

    def check_ready(self) -> None:
        """Raise `errors.Unavailable` if the database can't be reached, `Misconfigured` if its schema is older than this
        code."""
        self.database.read(schema.check)

    def in_use(self) -> InUse:
        """Which kinds of things there are, besides batches."""
        return self.database.read(in_use.read)

    def ids(self) -> Numbering | None:
        """Which numbers are ids of batches; None: all."""
        return self.database.read(lambda tx: dialects.of(tx).numbering(tx))

    def stop(self) -> None:
        """Answer the acks in progress, accept no more, and close the connections."""
        self.enlisted.stop()
        self.writes.stop()
        self.reads.stop()
        self.acks.stop()
        self.database.dispose()
