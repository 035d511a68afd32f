"""Celery on Redis, or on a database through SQLAlchemy.

With no-op jobs, two ``solo`` workers are about twice as fast as the default, one ``prefork`` worker with two processes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from celery import Celery
from peers.marks import mark
from peers.protocol import BROKER, Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

_URL = os.environ[BROKER]
_SQL = urlsplit(_URL).scheme == "mysql"

app = Celery("peers", broker=_URL.replace("mysql://", "sqla+mysql+pymysql://"))
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)

job = app.task(name="job")(mark)


def many(numbers: Sequence[int]) -> None:
    """Sends the jobs in a pipeline on Redis. Celery's ``group`` sends one by one, and is slower than ``delay``."""
    with app.producer_pool.acquire(block=True) as producer, producer.batch(max_size=len(numbers)):
        for number in numbers:
            job.apply_async((number,), producer=producer)


_QUIET = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING"]

PEER = Peer(
    packages=("celery", "kombu", "SQLAlchemy" if _SQL else "redis"),
    workers=[
        ["celery", "-A", "peers.libraries.celery_peer", "worker", "--pool", "solo", "-n", name, *_QUIET]
        for name in ("one@localhost", "two@localhost")
    ],
    one=job.delay,
    many=many,
    bulk=500,
    later=lambda number, delay: job.apply_async((number,), countdown=delay),
    settings="2 workers of pool solo (default: one of prefork), no gossip, mingle or heartbeat, results ignored",
    killed="the running one is lost (acks early, the default), prefetched ones "
    + ("too" if _SQL else "come back after an hour"),
    caveats=[
        "bulk: kombu's Producer.batch, " + ("which sends messages to a database one by one" if _SQL else "a pipeline"),
        "delayed jobs wait in a worker's memory",
        *(["polls once a second", "rows are never removed"] if _SQL else []),
    ],
)
