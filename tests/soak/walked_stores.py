"""The stores of random walks (``limit_walks.py``, ``effect_walks.py``), with a clock that the walk sets.

Delays and leases end exactly at the moments of a walk's steps. On Redis, the scripts read this clock from a key instead
of the command TIME.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import tempfile
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from servers.mysql import any_server
from servers.redis import RedisServer

from multiq import open_backend
from multiq.backend.memory import MemoryBackend
from multiq.driverkit.clock import SECOND, ManualClock
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from redis import Redis

    from multiq.backend import Backend

BACKENDS = ("memory", "sqlite", "redis", "mysql")
PARTITIONS = "redis?partitions=3"

_CLOCK = "walks:clock"  # a key of Redis: the seconds and microseconds that stand for the answer of TIME


class Walk(Protocol):
    def run(self, steps: int) -> None: ...


class Store(NamedTuple):
    open: Callable[[ManualClock], Backend]
    """Opens a backend with a connection of its own."""
    clock: Callable[[], ManualClock] = ManualClock


class _ServersClock(ManualClock):
    """Tells a Redis server the time."""

    def __init__(self, server: Redis) -> None:
        super().__init__()
        self._server = server
        self.advance(0)

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        whole, rest = divmod(self(), SECOND)
        self._server.hset(_CLOCK, mapping={"s": whole, "us": rest // 1000})


@contextlib.contextmanager
def stores(name: str) -> Iterator[Store]:
    with contextlib.ExitStack() as stack:
        if name == "memory":
            store = new_id()
            yield Store(lambda clock: stack.enter_context(MemoryBackend(name=f"{store}-{id(clock)}", clock=clock)))
        elif name == "sqlite":
            from multiq_sqlite.backend import SqliteBackend

            path = f"{stack.enter_context(tempfile.TemporaryDirectory())}/jobs.db"
            yield Store(lambda clock: stack.enter_context(SqliteBackend(path, clock=clock, synchronous="off")))
        elif name == "mysql":
            from multiq_mysql.backend import MysqlBackend

            url = stack.enter_context(stack.enter_context(any_server()).database()).url
            found = stack.enter_context(open_backend(url))
            assert isinstance(found, MysqlBackend)
            yield Store(lambda clock: stack.enter_context(MysqlBackend(found.dsn, clock=clock)))
        else:
            stack.enter_context(_scripts_read_the_clock())
            server = stack.enter_context(RedisServer())
            client = stack.enter_context(server.client())
            url = server.url + name.removeprefix("redis")
            yield Store(lambda _: stack.enter_context(open_backend(url)), lambda: _ServersClock(client))


@contextlib.contextmanager
def _scripts_read_the_clock() -> Iterator[None]:
    """Let the Redis driver's scripts read the time from a key."""
    from multiq_redis import scripts

    read = scripts._read
    called = re.compile(r"(redis\.)?call\('TIME'\)")
    scripts._read = lambda name: called.sub(f"redis.call('HMGET', '{_CLOCK}', 's', 'us')", read(name))
    scripts.script.cache_clear()
    try:
        yield
    finally:
        scripts._read = read
        scripts.script.cache_clear()


def play_walks(
    walk: Callable[[Sequence[Backend], ManualClock, int], Walk], store: Store, seeds: Sequence[int], steps: int
) -> None:
    """Play a walk for each seed. An error has a note with the seed."""
    for seed in seeds:
        clock = store.clock()
        try:
            with store.open(clock) as one, store.open(clock) as other:
                walk([one, other], clock, seed).run(steps)
        except Exception as exc:
            exc.add_note(f"the seed of this walk: {seed} (steps {steps})")
            raise


def draw_seeds(count: int) -> list[int]:
    return [random.SystemRandom().randrange(2**32) for _ in range(count)]


def main(
    play: Callable[[Store, Sequence[int], int], None], said: str | None, backends: Sequence[str] = BACKENDS
) -> None:
    """Play walks as the command line says. *said* is shown by ``--help``."""
    parser = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=backends, default="memory")
    parser.add_argument("--walks", type=int, default=200)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, help="of the first walk; without it, all seeds are drawn")
    options = parser.parse_args()
    seeds = draw_seeds(options.walks)
    if options.seed is not None:
        seeds = list(range(options.seed, options.seed + options.walks))
    began = time.monotonic()
    with stores(options.backend) as store:
        play(store, seeds, options.steps)
    print(f"{options.backend}: {len(seeds)} walks in {time.monotonic() - began:.0f} s, none differed")
