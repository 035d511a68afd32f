"""Where jobs run: inline, on threads, or as coroutines. One interface, so that the worker's loop is the same."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from multiq.backend import Ack, GiveBack

from .loop import new_event_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Lease, Verdict

    from .ledger import Ledger
    from .prefetch import Prefetch
    from .runner import Runner


class Executor(ABC):
    """Runs leases' jobs and collects their verdicts. ``on_done`` is called after each job, in its thread.

    With a *ledger*, those outside of the process can see which jobs have begun.
    """

    loop: asyncio.AbstractEventLoop | None = None
    """The event loop that all jobs which are coroutines run on, if there is one."""

    def __init__(
        self, runner: Runner, prefetch: Prefetch, on_done: Callable[[], None], ledger: Ledger | None = None
    ) -> None:
        self._runner = runner
        self._prefetch = prefetch
        self._on_done = on_done
        self._ledger = ledger
        self._finished: deque[Verdict] = deque()
        self._running: dict[int, tuple[Lease, float]] = {}
        self._held = 0
        self._counting = threading.Lock()

    def start(self, leases: Sequence[Lease]) -> None:
        """Run these jobs: inline before returning, elsewhere soon."""
        self._count(len(leases))
        self._start(leases)

    def take_back(self) -> list[Lease]:
        """Leases whose jobs have not begun, and now never will here."""
        taken = self._take_waiting()
        self._count(-len(taken))
        return taken

    def take_finished(self) -> list[Verdict]:
        """The verdicts since the last call."""
        taken: list[Verdict] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._finished.popleft())
        self._count(-len(taken))
        return taken

    @property
    def busy(self) -> int:
        """How many jobs were handed over, and neither their verdicts nor their leases taken back yet."""
        return self._held

    @property
    @abstractmethod
    def waiting(self) -> int:
        """How many jobs have not begun."""

    @property
    def at_work(self) -> int:
        """How many jobs run now."""
        return len(self._running)

    def running(self) -> list[Lease]:
        """The leases of the jobs that run now."""
        return [lease for lease, _ in list(self._running.values())]

    def running_for(self) -> float:
        """Seconds since the oldest running job began."""
        running = list(self._running.values())  # in the order in which they began
        return time.monotonic() - running[0][1] if running else 0.0

    @abstractmethod
    def close(self) -> None:
        """Let go of threads and loops; what still runs is left alone."""

    @abstractmethod
    def _start(self, leases: Sequence[Lease]) -> None: ...

    @abstractmethod
    def _take_waiting(self) -> list[Lease]: ...

    def _count(self, change: int) -> None:
        if change:
            with self._counting:
                self._held += change

    def _begin(self, lease: Lease) -> None:
        start = time.monotonic()
        self._running[id(lease)] = (lease, start)
        if self._ledger is not None:
            self._ledger.begin(lease, start)

    def _end(self, lease: Lease, verdict: Verdict) -> None:
        self._finished.append(verdict)
        _, start = self._running.pop(id(lease))
        if self._ledger is not None:
            self._ledger.end(lease, acked=type(verdict) is Ack)
        self._prefetch.saw_job(time.monotonic() - start)


class InlineExecutor(Executor):
    """One job after the other, in the thread of the worker's loop: no hand-over, the least cost per job."""

    def __init__(
        self, runner: Runner, prefetch: Prefetch, on_done: Callable[[], None], ledger: Ledger | None = None
    ) -> None:
        super().__init__(runner, prefetch, on_done, ledger)
        self._waiting: deque[Lease] = deque()

    def _start(self, leases: Sequence[Lease]) -> None:
        self._waiting.extend(leases)
        ledger = self._ledger
        marks, place = ledger.turns(leases[0]) if ledger is not None else (None, 0)
        verdict: Verdict | None = None
        while True:
            try:
                lease = self._waiting.popleft()
            except IndexError:  # all done, or taken back by the heartbeat
                break
            key, start = id(lease), time.monotonic()
            self._running[key] = (lease, start)
            if marks is not None:
                marks[place] = start
                place += 1
            verdict = self._runner.run(lease)
            self._finished.append(verdict)
            del self._running[key]
            self._prefetch.saw_job(time.monotonic() - start)
            if ledger is not None and type(verdict) is not Ack:
                ledger.end(lease, acked=False)
        if ledger is not None and type(verdict) is Ack:
            ledger.end(verdict.lease, acked=True)  # the beginning of the next one told the end of all others

    def _take_waiting(self) -> list[Lease]:
        return _drained(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        self._runner.close_loop()


class ThreadExecutor(Executor):
    """Jobs on a fixed number of threads. They are daemons: a process that must end does not wait for a hung job."""

    def __init__(
        self,
        runner: Runner,
        prefetch: Prefetch,
        on_done: Callable[[], None],
        threads: int,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(runner, prefetch, on_done, ledger)
        self._inbox: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"multiq-job-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _start(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self._inbox.put(lease)

    def _take_waiting(self) -> list[Lease]:
        taken: list[Lease] = []
        with contextlib.suppress(queue.Empty):
            while True:
                lease = self._inbox.get_nowait()
                if lease is not None:
                    taken.append(lease)
        return taken

    @property
    def waiting(self) -> int:
        return self._inbox.qsize()

    def close(self) -> None:
        for _ in self._threads:
            self._inbox.put(None)

    def _serve(self) -> None:
        while (lease := self._inbox.get()) is not None:
            self._begin(lease)
            self._end(lease, self._runner.run(lease))
            self._on_done()
        self._runner.close_loop()


class CoroutineExecutor(Executor):
    """Coroutine tasks on one event loop in a thread of its own; plain functions go to a pool beside it."""

    _POOL_AT_MOST = 32  # threads for plain functions
    _PATIENCE = 2.0  # seconds for cancelled coroutines to clean up after themselves

    def __init__(
        self,
        runner: Runner,
        prefetch: Prefetch,
        on_done: Callable[[], None],
        concurrency: int,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(runner, prefetch, on_done, ledger)
        self._concurrency = concurrency
        self._waiting: deque[Lease] = deque()
        self.loop = self._loop = new_event_loop()
        self._pool = ThreadPoolExecutor(min(concurrency, self._POOL_AT_MOST), "multiq-job")
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, name="multiq-loop", daemon=True)
        self._thread.start()

    def _start(self, leases: Sequence[Lease]) -> None:
        self._waiting.extend(leases)
        self._loop.call_soon_threadsafe(self._fill)

    def _take_waiting(self) -> list[Lease]:
        return _drained(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        self._concurrency = 0
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join(self._PATIENCE)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _fill(self) -> None:
        """Begin as many jobs as there is room for. In the loop's thread."""
        while len(self._tasks) < self._concurrency:
            try:
                lease = self._waiting.popleft()
            except IndexError:  # all have begun, or were taken back
                return
            self._begin(lease)
            task = self._loop.create_task(self._run_one(lease))
            self._tasks.add(task)  # the loop itself keeps only weak references
            task.add_done_callback(self._make_room)

    def _make_room(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._fill()

    async def _run_one(self, lease: Lease) -> None:
        verdict: Verdict = GiveBack(lease)
        try:
            if self._runner.is_coroutine(lease):
                verdict = await self._runner.arun(lease)
            else:
                verdict = await self._loop.run_in_executor(self._pool, self._runner.run, lease)
        finally:
            self._end(lease, verdict)
            self._on_done()


def _drained(waiting: deque[Lease]) -> list[Lease]:
    """What has waited, in its order, from the end: another thread takes from the beginning meanwhile."""
    taken: list[Lease] = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(waiting.pop())
    return taken[::-1]
