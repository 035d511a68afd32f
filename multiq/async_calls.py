"""Runs the blocking calls of coroutines on multiq's own threads.

- ``asyncio.to_thread`` is not delayed: multiq does not use the event loop's executor. Each backend has up to 16 threads
  of its own, so a server that hangs delays only the calls to that server.
- A call waits at most 10 s for a thread. A call that would wait longer is not made, and raises ``BackendTimeout``.
- A cancelled call is not made, or is made to its end. ``run_to_end`` waits for the call's end.
- A call runs in a copy of the caller's ``contextvars`` context.
- A thread delivers the answer of a call to the caller's event loop.
- A forked child starts with no threads and no calls.
- The first call starts the first thread. A thread that has been idle for 30 s ends.
- The threads are daemon threads. The interpreter's exit waits up to a second for calls that are being made.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import itertools
import logging
import threading
import time
import weakref
from _thread import start_new_thread
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

from .driverkit.fork import forks
from .errors import BackendTimeout, BackendUnavailable, MultiqError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

THREADS = 16
"""The largest number of threads for the calls to one backend."""

MOST_WAIT = 10.0
"""The longest time, in seconds, that a call waits for a thread or for earlier calls. A call that would wait longer is
not made."""

_IDLE = 30.0  # seconds after which an idle thread ends
_EXIT_PATIENCE = 1.0  # seconds for which the interpreter's exit waits
_EXIT_CHECK = 0.005  # seconds
_ANSWERS_AT_ONCE = 100
_CHUNK = 100  # the number of items that one call reads from an iterator

_log = logging.getLogger("multiq.async")


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop. Raises ``MultiqError`` if asyncio does not run here."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise MultiqError(
            "multiq's coroutines must be awaited on an asyncio event loop, and none runs here: with trio, run the "
            "plain method on a thread, as in trio.to_thread.run_sync(task.enqueue, ...)"
        ) from None


def start_daemon(function: Callable[[], object], name: str) -> None:
    """Call *function* on a new daemon thread, without waiting until the thread runs. Raises ``RuntimeError``.

    ``Thread.start`` waits until the thread runs. On a busy machine, a thread's start takes many milliseconds, and would
    block the event loop. To avoid the wait, another thread calls ``Thread.start``.
    """

    def start() -> None:
        try:
            threading.Thread(target=function, name=name, daemon=True).start()
        except RuntimeError:  # the system has refused to start another thread
            function()

    start_new_thread(start, ())


class Threads:
    """Up to *most* daemon threads, which carry out calls in the order of their submission."""

    def __init__(self, most: int, name: str, idle: float) -> None:
        """*name* is the prefix of the threads' names. *idle*: seconds after which an idle thread ends."""
        self._most = most
        self._name = name
        self._idle_limit = idle
        self._lock = threading.Lock()
        self._idle: list[_IdleThread] = []
        self._count = 0
        self._backlog: deque[Callable[[], object]] = deque()

    def submit(self, call: Callable[[], object]) -> None:
        """Carry out *call*, which must not raise. Raises ``BackendUnavailable`` if the system refuses to start the
        first thread.

        An event loop calls ``submit``, so ``submit`` starts only the first thread. A thread that becomes busy starts
        the next thread.
        """
        with self._lock:
            if self._idle:
                self._idle.pop().begin(call)
                return
            self._backlog.append(call)
            if self._count == 0:
                try:
                    self._start_thread()
                except RuntimeError as exc:
                    self._backlog.remove(call)
                    raise BackendUnavailable(
                        f"the call was not made, because no thread could be started: {exc}"
                    ) from exc

    @property
    def is_busy(self) -> bool:
        return len(self._idle) < self._count

    def end_idle(self) -> None:
        """Let the idle threads end now."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._count -= len(idle)
        for thread in idle:
            thread.begin(None)

    def _serve(self) -> None:
        idle = _IdleThread()
        while True:
            with self._lock:
                call = self._backlog.popleft() if self._backlog else None
                if call is None:
                    self._idle.append(idle)
            if call is None:
                call = self._wait(idle)
                if call is None:
                    return
            self._start_spare()
            call()
            del call  # without this line, the call's objects would stay in memory until the next call

    def _start_spare(self) -> None:
        """If no other thread is free, start another thread. The calling thread may be busy for long."""
        if self._idle or self._count == self._most:
            return
        with self._lock:
            if not self._idle and self._count < self._most:
                # if the system refuses to start a thread, calls wait for this thread
                with contextlib.suppress(RuntimeError):
                    self._start_thread()

    def _start_thread(self) -> None:
        self._count += 1
        try:
            start_daemon(self._serve, f"{self._name}-{self._count}")
        except RuntimeError:
            self._count -= 1
            raise

    def _wait(self, idle: _IdleThread) -> Callable[[], object] | None:
        """Return the next call. None means that the thread must end."""
        if not idle.has_call.acquire(timeout=self._idle_limit):
            with self._lock:
                if idle in self._idle:
                    self._idle.remove(idle)
                    self._count -= 1
                    return None
            idle.has_call.acquire()  # a call was submitted at the last moment
        call, idle.call = idle.call, None
        return call


class _IdleThread:
    """The data by which ``submit`` hands a call to a waiting thread."""

    __slots__ = ("call", "has_call")

    def __init__(self) -> None:
        self.call: Callable[[], object] | None = None
        self.has_call = threading.Lock()
        self.has_call.acquire()

    def begin(self, call: Callable[[], object] | None) -> None:
        self.call = call
        self.has_call.release()


class PerOwner(Generic[T]):
    """Keeps one object for each owner in this process. An owner's object is made at its first use. The object must not
    refer to its owner."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._inherited: list[object] = []
        self.start_over_in_child()
        forks.watch(self)

    def of(self, owner: object) -> T:
        try:
            return self._objects[owner]
        except KeyError:
            with self._lock:
                return self._objects.setdefault(owner, self._make())

    def all(self) -> list[T]:
        with self._lock:
            return list(self._objects.values())

    def start_over_in_child(self) -> None:
        # keep the objects: a child's garbage collector would report the parent's tasks as destroyed
        if hasattr(self, "_objects"):
            self._inherited.append(list(self._objects.values()))
        self._objects: weakref.WeakKeyDictionary[object, T] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()


_threads = PerOwner(functools.partial(Threads, THREADS, "multiq-async", _IDLE))
_single_threads = PerOwner(functools.partial(Threads, 1, "multiq-open", 0.1))


class Level:
    """Owns the threads for the calls that a job makes while it runs within an enqueue. The thread of the enqueue waits
    for the job."""

    MOST = 100
    """The largest depth. Without a limit, a job that enqueues itself would start threads without end."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self._below: Level | None = None

    def below(self) -> Level:
        """Return the level of a job that this level's job enqueues. Raises ``RecursionError``."""
        if self.depth == self.MOST:
            raise RecursionError(f"jobs that run within an enqueue must be nested at most {self.MOST} deep")
        if self._below is None:
            self._below = Level(self.depth + 1)
        return self._below


level: contextvars.ContextVar[Level | None] = contextvars.ContextVar("multiq_level", default=None)
"""The nesting level of the running job. Only a job that runs within a call of a backend has a level."""


def threads_of(backend: object) -> Threads:
    """Return the threads for the calls to *backend*."""
    return _threads.of(level.get() or backend)


def _finish_calls() -> None:
    """Wait for the calls that are being made, so that the exit does not cut off an enqueue or an ack."""
    give_up_at = time.monotonic() + _EXIT_PATIENCE
    while any(threads.is_busy for threads in _threads.all()) and time.monotonic() < give_up_at:
        time.sleep(_EXIT_CHECK)


atexit.register(_finish_calls)


async def run(backend: object, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call *function* on a thread of *backend*, and return its result.

    If the caller is cancelled before a thread has begun the call, the call is not made. A call that has begun continues
    after a cancellation.
    """
    call = _submit(threads_of(backend), function, args, kwargs)
    try:
        return await call.future  # type: ignore[no-any-return]
    except (asyncio.CancelledError, GeneratorExit) as exc:
        if not call.withdraw():
            exc.add_note("multiq: the call had begun, and goes on")
        raise
    finally:
        del call  # without this line, the error and this frame would form a reference cycle


async def run_to_end(backend: object, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Like ``run``, but a cancellation waits until the call has ended.

    Use ``run_to_end`` for a call that uses an object of the caller. The caller must not use the object before the call
    has ended.
    """
    future = _submit(threads_of(backend), function, args, kwargs).future
    cancelled: asyncio.CancelledError | None = None
    try:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is not None:
            raise cancelled from future.exception()
        return future.result()  # type: ignore[no-any-return]
    finally:
        del cancelled, future  # as in run


async def run_in_order(owner: object, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Like ``run``, but on a single thread of *owner*. The calls are made, and return, in the order in which the
    callers asked."""
    return await _submit(_single_threads.of(owner), function, args, kwargs).future  # type: ignore[no-any-return]


async def iterate(backend: object, items: Iterable[T]) -> AsyncIterator[T]:
    """Yield *items*, whose iterator calls the backend. If the iterator raises an error, the items before the error are
    yielded first."""
    iterator = iter(items)
    while True:
        chunk, error = await run(backend, _next_items, iterator)
        for item in chunk:
            yield item
        if error is not None:
            raise error
        if len(chunk) < _CHUNK:
            return


def _next_items(iterator: Iterator[T]) -> tuple[list[T], Exception | None]:
    items: list[T] = []
    try:
        for item in itertools.islice(iterator, _CHUNK):
            items.append(item)  # noqa: PERF402 - the items before an error must be kept
    except Exception as exc:  # noqa: BLE001 - the caller raises it
        return items, exc
    return items, None


def end_threads(backend: object) -> None:
    """Let the idle threads of *backend* end now."""
    threads_of(backend).end_idle()


class Answer(NamedTuple):
    """The result or the error of a call, and the future that waits for the call."""

    future: asyncio.Future[Any]
    value: Any
    error: BaseException | None = None


def deliver(loop: asyncio.AbstractEventLoop, answers: list[Answer]) -> None:
    """Complete futures of *loop*. If the caller of a future has gone, the future's error is logged."""
    try:
        loop.call_soon_threadsafe(_complete, answers)
    except RuntimeError:  # the loop is closed
        for answer in answers:
            _log_failure(answer)


def _complete(answers: list[Answer]) -> None:
    if len(answers) > _ANSWERS_AT_ONCE:  # answer in parts, so that the loop can run other callbacks between two parts
        asyncio.get_running_loop().call_soon(_complete, answers[_ANSWERS_AT_ONCE:])
        answers = answers[:_ANSWERS_AT_ONCE]
    for answer in answers:
        if answer.future.done():
            _log_failure(answer)
        elif answer.error is None:
            answer.future.set_result(answer.value)
        elif isinstance(answer.error, StopIteration):  # a future refuses this exception
            answer.future.set_exception(RuntimeError(f"the call raised {answer.error!r}"))
        else:
            answer.future.set_exception(answer.error)


def _log_failure(answer: Answer) -> None:
    if answer.error is not None:
        _log.warning("a call failed after its coroutine was cancelled: %s", answer.error, exc_info=answer.error)


class _Call:
    """A call that a coroutine waits for."""

    __slots__ = ("_asked_at", "_context", "_function", "_is_begun", "_is_withdrawn", "_loop", "future")

    def __init__(self, function: Callable[[], Any]) -> None:
        self._loop = running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self._function = function
        self._context = contextvars.copy_context()
        self._asked_at = time.monotonic()
        self._is_begun = False
        self._is_withdrawn = False

    def withdraw(self) -> bool:
        """Withdraw the call, so that it is not made. Returns False if the call has begun."""
        self._is_withdrawn = True
        return not self._is_begun

    def __call__(self) -> None:
        """Make the call, on a thread."""
        self._is_begun = True  # set before the check: withdraw() also sets its flag first and checks second
        if self._is_withdrawn:
            return
        if time.monotonic() - self._asked_at > MOST_WAIT:
            error = BackendTimeout(
                f"the call was not made: for {MOST_WAIT:g} s, {THREADS} other calls have been waiting for the backend"
            )
            deliver(self._loop, [Answer(self.future, None, error)])
            return
        try:
            value = self._context.run(self._function)
        except BaseException as exc:  # noqa: BLE001 - the caller gets the error
            deliver(self._loop, [Answer(self.future, None, exc)])
        else:
            deliver(self._loop, [Answer(self.future, value)])
        finally:
            del self  # without this line, an error and this frame would form a reference cycle


def _submit(threads: Threads, function: Callable[..., Any], args: Any, kwargs: Any) -> _Call:
    call = _Call(functools.partial(function, *args, **kwargs))
    threads.submit(call)
    return call


def copy_error(error: BaseException) -> BaseException:
    """Return a copy of *error* for one caller, because raising an error changes its traceback."""
    if not isinstance(error, MultiqError):
        return error
    copy = type(error).__new__(type(error))
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy.with_traceback(error.__traceback__)
