"""The baseline of ``multiq bench``: the fastest loops over a socket and hiredis."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

from multiq.bench.adapter import PUT_BATCH, TAKE_BATCH, Baseline

from .connection import pack

if TYPE_CHECKING:
    from .connection import Connection, Word

_PATIENCE = 60.0  # seconds for one command

_PUT = """
    local scored = {}
    for i = 1, #ARGV, 2 do
        scored[i], scored[i + 1] = i, ARGV[i]
    end
    redis.call('HSET', KEYS[1], unpack(ARGV))
    redis.call('ZADD', KEYS[2], unpack(scored))
"""
_TAKE = """
    if #ARGV > 1 then
        redis.call('ZREM', KEYS[3], unpack(ARGV, 2))
        redis.call('HDEL', KEYS[1], unpack(ARGV, 2))
    end
    local ready = redis.call('ZRANGE', KEYS[2], 0, ARGV[1] - 1)
    if #ready == 0 then return ready end
    redis.call('ZREMRANGEBYRANK', KEYS[2], 0, #ready - 1)
    local held = {}
    for i = 1, #ready do
        held[2 * i - 1], held[2 * i] = 1, ready[i]
    end
    redis.call('ZADD', KEYS[3], unpack(held))
    return {ready, redis.call('HMGET', KEYS[1], unpack(ready))}
"""


class RedisBaseline(Baseline):
    """Single jobs are in a list. Batches are in a hash and two sorted sets, which two scripts change.

    The constructor runs each command once, and raises ``hiredis.ReplyError`` if the account may not run one of them.
    ``close`` also closes the *connection*.
    """

    def __init__(self, connection: Connection, base: str, body: bytes) -> None:
        self._connection = connection
        self._body = body
        self._list = f"{base}:limit-list"
        self._keys = tuple(f"{base}:limit-{name}" for name in ("bodies", "ready", "reserved"))
        self._ask("LPUSH", self._list, body)
        self._ask("EVAL", _PUT, len(self._keys), *self._keys, "first", body)  # loads both scripts for EVALSHA
        self._ask("EVAL", _TAKE, len(self._keys), *self._keys, 1)
        self._delete()

    def put_one_by_one(self, count: int) -> float:
        """Puts each job with ``LPUSH``."""
        ask, name, body = self._connection.ask, self._list, self._body
        start = time.perf_counter()
        for _ in range(count):
            ask(pack(("LPUSH", name, body)), time.monotonic() + _PATIENCE)
        return count / (time.perf_counter() - start)

    def put_in_batches(self, count: int) -> float:
        start = time.perf_counter()
        for first in range(0, count, PUT_BATCH):
            jobs: list[Word] = []
            for number in range(first, min(first + PUT_BATCH, count)):
                jobs += (number, self._body)
            self._run(_PUT, *jobs)
        return count / (time.perf_counter() - start)

    def take_in_batches(self) -> float:
        """One script deletes the jobs that it took before, and takes the next jobs."""
        start, count = time.perf_counter(), 0
        held: list[bytes] = []
        while True:
            answer = self._run(_TAKE, TAKE_BATCH, *held)
            if not answer:
                return count / (time.perf_counter() - start)
            held = answer[0]
            count += len(held)

    def close(self) -> None:
        if self._connection.is_free:
            self._delete()
        self._connection.close()

    def _delete(self) -> None:
        self._ask("DEL", self._list, *self._keys)

    def _run(self, text: str, *words: Word) -> Any:
        return self._ask("EVALSHA", _SHAS[text], len(self._keys), *self._keys, *words)

    def _ask(self, *words: Word) -> Any:
        return self._connection.ask(pack(words), time.monotonic() + _PATIENCE)


_SHAS = {text: hashlib.sha1(text.encode()).hexdigest() for text in (_PUT, _TAKE)}  # noqa: S324 - Redis' own choice
