"""Executors: run jobs inline, on threads, or as coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

from multiq.backend import Ack, GiveBack
from multiq.job import JobTasks, job_tasks
from multiq.worker.processes.inflight import ACKED

from .event_loop import close_loop, new_event_loop, threads_of_loop
from .heartbeat import TICK
from .leftover_tasks import PATIENCE, cancel_leftovers, end_tasks
from .task_stack import frame_of, stack_of
from .thread_pool import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextvars import Context

    from multiq.backend import Verdict
    from multiq.worker.processes.inflight import Held, InflightWriter

    from .prefetch import Prefetch
    from .runner import Runner
    from .timeouts import TimedJob, Timeouts

_log = logging.getLogger("multiq.worker")

_AFTER_JOB_EVERY = 0.02  # seconds
_THREAD_BRAKE = 1.0  # seconds until the next attempt to start a thread that the system refused


class Executor(ABC):
    """Runs jobs and collects their verdicts. Calls *on_done* after each job, in the job's thread.

    *inflight* shows the supervisor and the sidecar which jobs have begun.
    """

    loop: asyncio.AbstractEventLoop | None = None
    """The event loop that all coroutine jobs share, if there is one."""

    def __init__(
        self, runner: Runner, prefetch: Prefetch, on_done: Callable[[], None], inflight: InflightWriter | None = None
    ) -> None:
        self._runner = runner
        self._prefetch = prefetch
        self._on_done = on_done
        self._inflight = inflight
        self._finished: deque[Held] = deque()
        self._running: dict[Held, None] = {}  # ordered by their beginning
        self.is_aborted = False
        """Whether the process aborts. In that case, no job may begin."""
        self._held = 0
        self._counting = threading.Lock()

    def start(self, jobs: Sequence[Held]) -> None:
        """Run these jobs. An inline executor returns after the jobs have run. The other executors return
        immediately."""
        self._count(len(jobs))
        self._start(jobs)

    def take_back(self) -> list[Held]:
        """Remove and return the jobs that have not begun. The removed jobs never begin in this executor."""
        taken = self._take_waiting()
        self._count(-len(taken))
        return taken

    def take_finished(self) -> list[Held]:
        """Remove and return the jobs that have verdicts."""
        taken: list[Held] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._finished.popleft())
        self._count(-len(taken))
        return taken

    @property
    def busy(self) -> int:
        """The number of jobs that were passed to ``start`` and not removed yet, with or without a verdict."""
        return self._held

    @property
    def oldest_finished(self) -> Held | None:
        """The first job that got a verdict and was not removed yet."""
        try:
            return self._finished[0]
        except IndexError:
            return None

    @property
    @abstractmethod
    def waiting(self) -> int:
        """The number of jobs that have not begun."""

    @property
    @abstractmethod
    def is_held_up(self) -> bool:
        """Whether a long job makes other jobs wait, or would make newly started jobs wait."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The number of jobs that can run at the same time now."""

    def running(self) -> list[Held]:
        return list(self._running)

    def running_for(self) -> float:
        running = self.running()
        return time.monotonic() - running[0].began_at if running else 0.0

    def stack_of(self, timed: TimedJob) -> str | None:
        return stack_of(frame_of(timed.thread))

    @abstractmethod
    def close(self) -> None:
        """Release threads and loops, without waiting for running jobs."""

    @abstractmethod
    def _start(self, jobs: Sequence[Held]) -> None: ...

    @abstractmethod
    def _take_waiting(self) -> list[Held]: ...

    def _count(self, change: int) -> None:
        if change:
            with self._counting:
                self._held += change

    def _begin(self, held: Held) -> bool:
        """Record that the job begins.

        Returns False if the job must not begin. The process may be aborting, or the lease may have ended while the
        process was suspended.
        """
        held.began_at = now = time.monotonic()
        self._running[held] = None  # comes first: an abort finds the job, or this thread sees ``is_aborted``
        if now >= held.ends_at or self.is_aborted:
            del self._running[held]
            self._skip(held)
            return False
        if self._inflight is not None:
            self._inflight.begin(held)
            if time.monotonic() >= held.ends_at:  # the thread was suspended; the sidecar may give the job back
                del self._running[held]
                self._skip(held)
                return False
        return True

    def _skip(self, held: Held) -> None:
        _log.debug("[%s] %s does not begin: its lease has ended, or the worker stops", held.lease.queue, held.lease.id)
        held.began_at = 0.0
        held.verdict = GiveBack(held.lease)
        if self._inflight is not None:
            self._inflight.end(held)
        self._finished.append(held)

    def _end(self, held: Held) -> None:
        if self._inflight is not None:
            self._inflight.end(held)
        del self._running[held]
        self._finished.append(held)
        self._prefetch.note_job(time.monotonic() - held.began_at)


class InlineExecutor(Executor):
    """Runs one job after the other in the thread of the worker's loop.

    This executor has the lowest cost per job, because a job stays in one thread. *after_job* is called in the same
    thread between two jobs, at most fifty times a second.
    """

    def __init__(
        self,
        runner: Runner,
        prefetch: Prefetch,
        on_done: Callable[[], None],
        inflight: InflightWriter | None = None,
        *,
        after_job: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(runner, prefetch, on_done, inflight)
        self._waiting: deque[Held] = deque()
        self._after_job = after_job or (lambda: None)

    def _start(self, jobs: Sequence[Held]) -> None:
        self._waiting.extend(jobs)
        # This is the hot path, so the code of _begin, _end and InflightWriter's begin and end is inlined. Calling them
        # costs 5 % more CPU for each no-op job (docs/decisions/0047).
        take, run, running, finished = self._waiting.popleft, self._runner.run, self._running, self._finished
        inflight, note_job, clock = self._inflight, self._prefetch.note_job, time.monotonic
        marks: Any = None if inflight is None else inflight.marks  # without an in-flight table, no job has a slot
        look_at = clock() + _AFTER_JOB_EVERY
        while True:
            try:
                held = take()
            except IndexError:  # all jobs have run, or the heartbeat has taken the rest back
                return
            held.began_at = now = clock()
            running[held] = None
            if now >= held.ends_at or self.is_aborted:
                del running[held]
                self._skip(held)
                continue
            slot = held.slot
            if slot is not None:
                marks[slot] = now
            verdict = held.verdict = run(held)
            if slot is not None and type(verdict) is Ack and verdict.after is None:
                marks[slot] = ACKED
            elif inflight is not None:
                inflight.end(held)
            del running[held]
            finished.append(held)
            ended_at = clock()
            note_job(ended_at - now)
            if ended_at >= look_at:
                look_at = ended_at + _AFTER_JOB_EVERY
                self._after_job()

    def _take_waiting(self) -> list[Held]:
        return _drained(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_held_up(self) -> bool:
        return self.running_for() > TICK

    @property
    def capacity(self) -> int:
        return 1

    def close(self) -> None:
        self._runner.close_loop()


class ThreadExecutor(Executor):
    """Runs jobs on a fixed number of daemon threads, which do not keep a process with a hung job from exiting."""

    def __init__(
        self,
        runner: Runner,
        prefetch: Prefetch,
        on_done: Callable[[], None],
        threads: int,
        inflight: InflightWriter | None = None,
    ) -> None:
        super().__init__(runner, prefetch, on_done, inflight)
        self._inbox: queue.SimpleQueue[Held | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"multiq-job-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _start(self, jobs: Sequence[Held]) -> None:
        for held in jobs:
            self._inbox.put(held)

    def _take_waiting(self) -> list[Held]:
        taken: list[Held] = []
        with contextlib.suppress(queue.Empty):
            while True:
                held = self._inbox.get_nowait()
                if held is not None:
                    taken.append(held)
        return taken

    @property
    def waiting(self) -> int:
        return self._inbox.qsize()

    @property
    def is_held_up(self) -> bool:
        return len(self._running) >= len(self._threads) and self.running_for() > TICK

    @property
    def capacity(self) -> int:
        return len(self._threads)

    def close(self) -> None:
        for _ in self._threads:
            self._inbox.put(None)

    def _serve(self) -> None:
        while (held := self._inbox.get()) is not None:
            if self._begin(held):
                held.verdict = self._runner.run(held)
                self._end(held)
            self._on_done()
        self._runner.close_loop()


class CoroutineExecutor(Executor):
    """Runs coroutine tasks on one event loop in a separate thread, and plain functions on a pool of threads.

    A plain function that waits for a free thread does not prevent coroutines from beginning.
    """

    _POOL_AT_MOST = 32  # threads for plain functions

    def __init__(
        self,
        runner: Runner,
        prefetch: Prefetch,
        on_done: Callable[[], None],
        concurrency: int,
        inflight: InflightWriter | None = None,
        *,
        timeouts: Timeouts | None = None,
    ) -> None:
        super().__init__(runner, prefetch, on_done, inflight)
        self._concurrency = concurrency
        self._waiting: deque[Held] = deque()
        self._plain: deque[Held] = deque()  # plain functions that wait for a free thread
        self._threads = min(concurrency, self._POOL_AT_MOST)
        self._in_pool = 0
        self._is_pool_short = False
        self._is_refused = False  # whether the system has just refused a thread
        self._threads_of_loop = threads_of_loop()
        self.loop = self._loop = new_event_loop(self._threads_of_loop)
        self._loop.set_task_factory(_make_task)  # type: ignore[arg-type]  # typeshed's protocol has fixed parameters
        if timeouts is not None:
            timeouts.blocked_loop.watch(self._loop, self)
        self._pool = ThreadPool(self._threads, "multiq-job", at_end=runner.close_loop)
        self._tasks: dict[asyncio.Task[None], tuple[Held, JobTasks]] = {}
        self._is_closing = False
        self._asked_at: float | None = None  # the time since which the loop has not run ``_fill``
        self._thread = threading.Thread(target=self._serve, name="multiq-loop", daemon=True)
        self._thread.start()

    def _start(self, jobs: Sequence[Held]) -> None:
        self._waiting.extend(jobs)
        self._asked_at = self._asked_at or time.monotonic()
        self._loop.call_soon_threadsafe(self._fill)

    def _take_waiting(self) -> list[Held]:
        plain = _drained(self._plain)
        self._is_pool_short = self._is_pool_short or bool(plain)
        return [*plain, *_drained(self._waiting)]

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._plain)

    @property
    def is_held_up(self) -> bool:
        if self._is_loop_held:
            return True
        full = self._at_work >= self._concurrency or bool(self._plain) or self._is_pool_short
        return full and self.running_for() > TICK

    @property
    def capacity(self) -> int:
        """The number of jobs that can run at the same time now.

        No job can begin while another job blocks the loop. If plain functions were given back because the pool was
        full, no job can begin until a thread of the pool is free.
        """
        return self._at_work if self._is_pool_short or self._is_loop_held else self._concurrency

    @property
    def _is_loop_held(self) -> bool:
        asked_at = self._asked_at
        return asked_at is not None and time.monotonic() - asked_at > TICK

    @property
    def _has_thread(self) -> bool:
        return self._in_pool < self._threads and not self._is_refused

    @property
    def _at_work(self) -> int:
        return len(self._tasks) + self._in_pool

    def stack_of(self, timed: TimedJob) -> str | None:
        if timed.thread is not None:
            return super().stack_of(timed)
        if self.holder() is timed.held:
            return self.stack()
        for task, (held, _) in list(self._tasks.items()):
            if held is timed.held:
                return "".join(f"{frame.f_code.co_filename}:{frame.f_lineno}\n" for frame in task.get_stack())
        return None

    def holder(self) -> Held | None:
        """Return the job whose code the loop runs now. None: another thread cannot find out which job it is."""
        current = asyncio.current_task(self._loop)
        of_callback = self._tasks_of_callback()
        for task, (held, tasks) in list(self._tasks.items()):
            if task is current or tasks is of_callback or current in tasks:
                return held
        held_by = list(self._tasks.values())
        # a callback without a job's context belongs to the only job, if the loop runs just one
        return held_by[0][0] if current is None and of_callback is None and len(held_by) == 1 else None

    def is_held_by_leftover(self) -> bool:
        tasks = self._tasks_of_callback()
        return tasks is not None and tasks.is_over

    def jobs(self) -> int:
        return len(self._tasks)

    def stack(self) -> str | None:
        return stack_of(frame_of(self._thread.ident))

    def _tasks_of_callback(self) -> JobTasks | None:
        """Return the tasks of the job to which the loop's current callback or task step belongs.

        The callback's context names the job. None: no callback runs, or its context names no job. The callback may have
        been created in a thread, or with another context.
        """
        frame = frame_of(self._thread.ident)
        while frame is not None:
            if frame.f_code is asyncio.Handle._run.__code__:  # noqa: SLF001 - Python has no public way
                context: Context = frame.f_locals["self"]._context  # noqa: SLF001
                return context.get(job_tasks)
            frame = frame.f_back
        return None

    def close(self) -> None:
        self._is_closing = self._runner.is_ending = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join(2 * PATIENCE + 1)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_closing:
            try:
                self._loop.run_forever()
            except BaseException:  # noqa: BLE001 - SystemExit of a job's own task: the other jobs go on
                _log.exception("a task of a job stopped the event loop; the loop runs again")
        stuck = end_tasks(self._loop, asyncio.all_tasks(self._loop))
        if stuck:
            _log.error("%d tasks ignore their cancellation; the worker ends without them", stuck)
        close_loop(self._loop)

    def _fill(self) -> None:
        """Begin as many jobs as there is room for. Runs in the loop's thread."""
        self._asked_at = None
        while self._plain and self._has_thread and self._at_work < self._concurrency:
            with contextlib.suppress(IndexError):  # the job was taken back meanwhile
                self._begin_plain(self._plain.popleft())
        while self._at_work < self._concurrency and not self._is_closing:
            try:
                held = self._waiting.popleft()
            except IndexError:  # all jobs have begun or were taken back
                return
            if not self._runner.is_coroutine(held.lease):
                if self._has_thread and not self._plain:
                    self._begin_plain(held)
                else:
                    self._plain.append(held)
            elif self._begin(held):
                self._begin_coroutine(held)
            else:
                self._on_done()

    def _begin_coroutine(self, held: Held) -> None:
        context, tasks = self._runner.fresh_context(), JobTasks()
        context.run(job_tasks.set, tasks)
        task = self._loop.create_task(self._run_one(held, tasks), context=context)
        self._tasks[task] = held, tasks  # the loop itself stores only weak references
        task.add_done_callback(self._make_room)

    def _make_room(self, task: asyncio.Task[None]) -> None:
        held, tasks = self._tasks.pop(task)
        tasks.is_over = True
        self._threads_of_loop.write_off()
        if held.verdict is None:  # the task was cancelled before its first step, so the job has not begun
            held.verdict = GiveBack(held.lease)
            self._end(held)
            self._on_done()
        self._fill()

    async def _run_one(self, held: Held, tasks: JobTasks) -> None:
        verdict: Verdict = GiveBack(held.lease)
        try:
            verdict = await self._runner.arun(held)
        finally:
            held.verdict = verdict
            self._end(held)
            self._on_done()
            cancel_leftovers(held, tasks)

    def _begin_plain(self, held: Held) -> None:
        self._in_pool += 1
        try:
            self._pool.submit(self._run_plain, held)
        except RuntimeError as exc:  # the system refuses a thread, or the pool is shut down
            self._in_pool -= 1
            self._plain.appendleft(held)
            self._is_pool_short = self._is_refused = True
            _log.error("a job cannot begin: %s; next attempt in %g s", exc, _THREAD_BRAKE)
            self._loop.call_later(_THREAD_BRAKE, self._try_again)

    def _try_again(self) -> None:
        self._is_refused = False
        self._fill()

    def _run_plain(self, held: Held) -> None:
        """Runs in a thread of the pool."""
        if self._begin(held):
            held.verdict = self._runner.run(held)
            self._end(held)
        with contextlib.suppress(RuntimeError):  # the loop is closed because the worker has ended
            self._loop.call_soon_threadsafe(self._leave_pool)

    def _leave_pool(self) -> None:
        self._in_pool -= 1
        self._is_pool_short = False
        self._fill()
        self._on_done()


def _make_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], *, context: Context | None = None, **options: Any
) -> asyncio.Task[Any]:
    """The loop's task factory: creates a plain ``asyncio.Task``, and adds it to the tasks of its context's job."""
    task = asyncio.Task(work, loop=loop, context=context, **options)
    tasks = job_tasks.get() if context is None else context.get(job_tasks)
    if tasks is not None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return task


def _drained(waiting: deque[Held]) -> list[Held]:
    """Return all items in order. Items are popped from the right, because another thread pops from the left."""
    taken: list[Held] = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(waiting.pop())
    return taken[::-1]
