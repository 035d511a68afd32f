"""The library's side of the protocol: a program in the library's own environment. The program executes the lines of its
input.

``python -m peers.protocol peers.libraries.huey_peer`` reads one JSON object per line, and answers each with a line:
``{"do": "enqueue", "first": 0, "count": 500}`` with ``{"seconds": 0.07, "cpu": 0.04}``. The program ends its workers
and itself at the end of its input. This module imports only the standard library and the library that it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers import marks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BROKER = "PEERS_BROKER"  # the environment variable with the URL of the server or file

_GRACE = 3.0  # seconds for workers to end by themselves
_QUIET = (0.005, 0.030)  # seconds between jobs, so that workers are idle; random, so that jobs do not align with timers


@dataclass(frozen=True)
class Peer:
    """One library with its settings: how to enqueue the job, and the commands of its workers.

    The three methods may be coroutine functions. If the methods are coroutine functions, ``start`` is awaited before
    the other methods.
    """

    packages: Sequence[str]
    """The distributions whose versions are reported."""
    workers: Sequence[Sequence[str]]
    """The commands that start two worker processes. The first word of each command is a program of this environment."""
    one: Callable[[int], Any]
    many: Callable[[Sequence[int]], Any] | None = None
    later: Callable[[int, float], Any] | None = None
    """Enqueue a job that begins after this number of seconds."""
    start: Callable[[], Any] = lambda: None
    bulk: int = 1000
    """The number of jobs in each call of ``many``."""
    settings: str = ""
    """The settings that differ from the library's defaults, with the default values."""
    killed: str = ""
    """What happens to the jobs of a worker that is killed."""
    caveats: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the workers."""


class Program:
    """The requests that an input line can make. Each request is one method."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._loop = asyncio.new_event_loop()
        self._folder = Path(os.environ[marks.FOLDER])
        self._workers: list[subprocess.Popen[bytes]] = []

    def describe(self) -> dict[str, Any]:
        peer = self._peer
        versions = {name: importlib.metadata.version(name) for name in peer.packages}
        words = {"settings": peer.settings, "killed": peer.killed, "caveats": list(peer.caveats)}
        return {"versions": versions, "bulk": peer.bulk if peer.many else None, "later": bool(peer.later), **words}

    def prepare(self) -> dict[str, Any]:
        """Connect, and make the tables if the store needs tables."""
        self._done(self._peer.start())
        return {}

    def enqueue(self, first: int, count: int) -> dict[str, Any]:
        """Enqueue *count* jobs one by one."""
        call, numbers = self._peer.one, range(first, first + count)

        async def each() -> None:
            for number in numbers:
                await call(number)

        start, used = time.perf_counter(), time.process_time()
        if inspect.iscoroutinefunction(call):
            self._done(each())
        else:
            for number in numbers:
                call(number)
        return {"seconds": time.perf_counter() - start, "cpu": time.process_time() - used}

    def enqueue_bulk(self, first: int, count: int) -> dict[str, Any]:
        """Enqueue ``Peer.bulk`` jobs at a time."""
        many, at_once = self._peer.many, self._peer.bulk
        if many is None:
            raise ValueError("this library enqueues one by one only: ask for enqueue")
        numbers = [range(at, min(at + at_once, first + count)) for at in range(first, first + count, at_once)]
        start, used = time.perf_counter(), time.process_time()
        for some in numbers:
            self._done(many(some))
        return {"seconds": time.perf_counter() - start, "cpu": time.process_time() - used}

    def pickup(self, first: int, count: int, seconds: float) -> dict[str, Any]:
        """Enqueue jobs for *seconds*, each after the previous job has run. Returns when each job was enqueued."""
        sent: list[int] = []
        end = time.monotonic() + seconds
        give_up_at = end + 10.0
        seen = marks.count(self._folder)
        for number in range(first, first + count):
            time.sleep(random.uniform(*_QUIET))  # noqa: S311 - spreads them
            if time.monotonic() > end:
                break
            sent.append(time.monotonic_ns())
            self._done(self._peer.one(number))
            while marks.count(self._folder) < seen + len(sent) and time.monotonic() < give_up_at:
                time.sleep(0.0005)
        return {"sent": sent}

    def delayed(self, first: int, delays: Sequence[float]) -> dict[str, Any]:
        """Returns the earliest time at which each job could be due: the time of its enqueue call plus its delay."""
        later = self._peer.later
        if later is None:
            raise ValueError("this library has no delays: its description says so")
        due = []
        for number, delay in enumerate(delays, first):
            due.append(time.monotonic_ns() + int(delay * 1e9))
            self._done(later(number, delay))
            time.sleep(0.005)
        return {"due": due}

    def start(self) -> dict[str, Any]:
        """The worker processes. Each command runs in its own session."""
        here = Path(sys.executable).parent
        for program, *arguments in self._peer.workers:
            command = [str(here / program), *arguments]
            environment = {**os.environ, **self._peer.environment}
            self._workers.append(subprocess.Popen(command, env=environment, start_new_session=True))  # noqa: S603 - a worker's
        return {"pids": [worker.pid for worker in self._workers]}

    def stop(self) -> dict[str, Any]:
        """End the workers with SIGTERM, and after a grace period with SIGKILL."""
        workers, self._workers = self._workers, []
        give_up_at = time.monotonic() + _GRACE
        for number in (signal.SIGTERM, signal.SIGKILL):
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):  # a process group may outlive its leader
                    os.killpg(worker.pid, number)
            for worker in workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(max(0.0, give_up_at - time.monotonic()) if number == signal.SIGTERM else None)
        return {}

    def _done(self, result: Any) -> None:
        if inspect.isawaitable(result):
            self._loop.run_until_complete(result)


def main() -> None:
    # a library's own output must not mix with the answers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    program = Program(importlib.import_module(sys.argv[1]).PEER)
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            answer = getattr(program, asked.pop("do"))(**asked)
            answers.write(json.dumps(answer) + "\n")
    finally:
        program.stop()


if __name__ == "__main__":
    main()
