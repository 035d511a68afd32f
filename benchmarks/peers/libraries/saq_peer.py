"""SAQ on Redis."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from peers.marks import mark
from peers.protocol import BROKER, Peer
from saq import Queue

if TYPE_CHECKING:
    from collections.abc import Sequence

queue = Queue.from_url(os.environ[BROKER])


async def job(_context: Any, *, number: int) -> None:
    mark(number)


settings = {"queue": queue, "functions": [job], "concurrency": 20}


async def one(number: int) -> None:
    await queue.enqueue("job", number=number, ttl=-1)


async def many(numbers: Sequence[int]) -> None:
    await asyncio.gather(*map(one, numbers))


async def later(number: int, delay: float) -> None:
    await queue.enqueue("job", number=number, ttl=-1, scheduled=time.time() + delay)


PEER = Peer(
    packages=("saq", "redis"),
    workers=[["saq", "peers.libraries.saq_peer.settings", "--workers", "2", "--quiet"]],
    start=queue.connect,
    one=one,
    many=many,
    later=later,
    bulk=100,
    settings="2 processes, concurrency 20 (default: 10), ttl=-1: results are not kept (default: 10 minutes)",
    killed="the running one is aborted by a sweep, and run again only with more retries (default: none)",
    caveats=[
        "bulk: none of its own, 100 calls gathered",
        "delays are checked once per second",
        "the sweep at a worker's start may treat a job that was just fetched as stuck, and run it again",
    ],
)
