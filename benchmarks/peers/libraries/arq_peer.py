"""arq on Redis."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, ClassVar

from arq import create_pool, func
from arq.connections import RedisSettings
from peers.marks import mark
from peers.protocol import BROKER, Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

_SETTINGS = RedisSettings.from_dsn(os.environ[BROKER])


async def job(_context: Any, number: int) -> None:
    mark(number)


class WorkerSettings:
    functions: ClassVar = [func(job, name="job")]
    redis_settings = _SETTINGS
    poll_delay = 0.01
    max_jobs = 100
    keep_result = 0
    log_results = False


class _Pool:
    """The pool is created when there is an event loop."""

    redis: Any = None


async def start() -> None:
    _Pool.redis = await create_pool(_SETTINGS)


async def one(number: int) -> None:
    await _Pool.redis.enqueue_job("job", number)


async def many(numbers: Sequence[int]) -> None:
    await asyncio.gather(*map(one, numbers))


async def later(number: int, delay: float) -> None:
    await _Pool.redis.enqueue_job("job", number, _defer_by=delay)


PEER = Peer(
    packages=("arq", "redis"),
    workers=[["arq", "peers.libraries.arq_peer.WorkerSettings"]] * 2,
    start=start,
    one=one,
    many=many,
    later=later,
    bulk=100,
    settings="2 processes, poll_delay 0.01 s (default: 0.5 s), max_jobs 100 (default: 10), results not kept",
    killed="run again when its timeout of 5 minutes is over",
    caveats=["bulk: none of its own, 100 calls gathered", "polls"],
)
