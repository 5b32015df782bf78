"""`python -m tests.integrations.rq.worker`: a worker without forks, whose abandoned jobs are back after seconds."""

from __future__ import annotations

from rq.job import Job

from lastbit.integrations.rq import LastbitSimpleWorker
from tests.integrations.rq import app


class Quick(LastbitSimpleWorker):
    def get_heartbeat_ttl(self, job: Job) -> int:
        return 2


if __name__ == "__main__":
    Quick([app.queue], connection=app.store, maintenance_interval=1, worker_ttl=20).work(logging_level="INFO")
