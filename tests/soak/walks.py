"""Random walks on a server against the memory backend, many at once; called by ``redis_walks.py`` and others.

The test suite plays a few walks in each run. A walk in real time mostly waits, so that dozens at the same time cost
little more than one. Walks that a busy machine could not finish in time are counted apart, as they prove nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TYPE_CHECKING

from multiq.conformance import UrlHarness
from multiq.conformance.stateful.walk_comparison import run_walks

if TYPE_CHECKING:
    from servers.beanstalk import BeanstalkServer
    from servers.redis import RedisServer

_SHARE = 10  # walks that a process plays before it reports its progress


def main(server: RedisServer | BeanstalkServer, said: str | None, walks: int) -> None:
    """Play walks on a server that is started here.

    *walks*: the number of walks, unless the command line says otherwise; *said* is shown by ``--help``.
    """
    options = _arguments(said, walks)
    start = time.monotonic()
    taken = finished = 0
    with (
        server,
        ProcessPoolExecutor(options.at_once, mp_context=get_context("spawn")) as pool,
    ):
        shares = [min(_SHARE, options.walks - at) for at in range(0, options.walks, _SHARE)]
        for future in as_completed([pool.submit(walk, server.url, share) for share in shares]):
            asked, done = future.result()  # raises with the steps of the walk that differs
            taken, finished = taken + asked, finished + done
            print(f"\r{taken} of {options.walks}", end="", file=sys.stderr, flush=True)
    took = time.monotonic() - start
    print(
        f"\n{taken} walks in {took:.0f} s, {options.at_once} at once: {finished} agreed with the memory backend to the "
        f"end, {taken - finished} were given up for lack of time, none differed"
    )


def walk(url: str, count: int) -> tuple[int, int]:
    """Play some walks. Returns the number of walks, and how many of them were finished in time."""
    harness = UrlHarness(url)
    harness.walks = count
    with harness.open() as backend:
        finished = run_walks(harness, backend, harness.capabilities(backend))
    harness.close()
    return count, finished


def _arguments(said: str | None, walks: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", type=int, default=walks)
    parser.add_argument("--at-once", type=int, default=20)
    return parser.parse_args()
