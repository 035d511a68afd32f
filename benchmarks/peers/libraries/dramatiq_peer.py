"""Dramatiq on Redis."""

from __future__ import annotations

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from peers.marks import mark
from peers.protocol import BROKER, Peer

dramatiq.set_broker(RedisBroker(url=os.environ[BROKER]))
job = dramatiq.actor(mark, actor_name="job")

PEER = Peer(
    packages=("dramatiq", "redis"),
    workers=[["dramatiq", "peers.libraries.dramatiq_peer", "--processes", "2", "--threads", "8"]],
    environment={"dramatiq_queue_prefetch": "1000"},
    one=job.send,
    later=lambda number, delay: job.send_with_options(args=(number,), delay=int(delay * 1000)),
    settings="2 processes of 8 threads, prefetch 1,000 (default: 16, half as fast)",
    killed="run again after a minute without a heartbeat",
    caveats=["no bulk", "polls, backing off when idle", "a long job keeps up to 999 prefetched ones waiting"],
)
