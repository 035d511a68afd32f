"""RQ on Redis.

``SimpleWorker`` runs jobs in the worker itself; RQ's default worker forks a process for each job.
"""

from __future__ import annotations

import os
from datetime import timedelta

from peers.marks import mark
from peers.protocol import BROKER, Peer
from redis import Redis
from rq import Queue

_URL = os.environ[BROKER]
queue = Queue(connection=Redis.from_url(_URL))

PEER = Peer(
    packages=("rq", "redis"),
    workers=[["rq", "worker", "--url", _URL, "--worker-class", "rq.SimpleWorker", "--with-scheduler", "--quiet"]] * 2,
    one=lambda number: queue.enqueue(mark, number, result_ttl=0),
    many=lambda numbers: queue.enqueue_many([Queue.prepare_data(mark, (number,), result_ttl=0) for number in numbers]),
    later=lambda number, delay: queue.enqueue_in(timedelta(seconds=delay), mark, number, result_ttl=0),
    settings="2 SimpleWorkers (default: Worker, a fork for each job, a fifth as fast), result_ttl=0 (default: 500 s)",
    killed="failed when the heartbeat is missed; run again only with Retry (default: none)",
    caveats=[
        "delays are checked once per second, by one more process",
        "due times lose their fractions, so jobs begin early",
    ],
)
