"""taskiq on a list in Redis."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from peers.marks import mark
from peers.protocol import BROKER, Peer
from taskiq_redis import ListQueueBroker

if TYPE_CHECKING:
    from collections.abc import Sequence

broker = ListQueueBroker(os.environ[BROKER])


async def _job(number: int) -> None:
    mark(number)


job = broker.task(task_name="job")(_job)


async def one(number: int) -> None:
    await job.kiq(number)


async def many(numbers: Sequence[int]) -> None:
    await asyncio.gather(*map(one, numbers))


PEER = Peer(
    packages=("taskiq", "taskiq-redis", "redis"),
    workers=[
        ["taskiq", "worker", "peers.libraries.taskiq_peer:broker", "--workers", "2", "--log-level", "WARNING"],
    ],
    start=broker.startup,
    one=one,
    many=many,
    bulk=50,
    settings="2 processes (the default), ListQueueBroker, no results (the default)",
    killed="lost: no ack (its broker on streams has one)",
    caveats=["bulk: none of its own, 50 calls gathered", "delays need a scheduler process of their own"],
)
