"""Checks that the tests of several drivers call: what must hold during and after a fault of a server or connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from processes import until, worker
from servers.process import HOST
from worker_app import app, quick, read_diary

import multiq
from multiq.backend import Ack, Bury, NewJob, Release, State, Touch
from multiq.errors import BackendTimeout, BackendUnavailable, EnqueueUncertain
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import Self

    from servers.process import Server

    from multiq.backend import Backend, Consumer, Lease

QUEUE = "mail"
DEADLINE = 1.0  # seconds, as ?timeout= says it
GRACE = 10.0  # seconds that a busy machine may add; a call without a deadline hangs as long as the server


def new(body: bytes = b"x", **options: Any) -> NewJob:
    return NewJob(body, new_id(), **options)


def numbers(diary: Path, word: str) -> list[int]:
    """The numbers of the jobs that have a line with this word in the worker's diary."""
    return [number for said, number, _, _ in read_diary(diary) if said == word]


# --- the server does not answer --------------------------------------------------------------------------


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Stop the server for the duration of the block. The kernel still accepts data, and no call is answered."""
    server.pause()
    try:
        yield
    finally:
        server.go_on()


def verbs(backend: Backend, consumer: Consumer, lease: Lease) -> dict[str, Callable[[], object]]:
    """The calls of all operations, by name, except ``reserve``, which has tests of its own."""
    return {
        "enqueue": lambda: backend.enqueue(QUEUE, [new()]),
        "settle": lambda: consumer.settle([Ack(lease)]),
        "peek": lambda: backend.peek(QUEUE, lease.id),
        "jobs": lambda: backend.jobs(QUEUE, State.READY, limit=1),
        "delete": lambda: backend.delete(QUEUE, lease.id),
        "reschedule": lambda: backend.reschedule(QUEUE, lease.id, 5),
        "kick": lambda: backend.kick(QUEUE, 5),
        "kick_job": lambda: backend.kick_job(QUEUE, lease.id),
        "pause": lambda: backend.pause(QUEUE, 5),
        "resume": lambda: backend.resume(QUEUE),
        "purge": lambda: backend.purge(QUEUE, [State.READY]),
        "stats": lambda: backend.stats(QUEUE),
        "queues": backend.queues,
    }


def timed_out(call: Callable[[], object], deadline: float = DEADLINE) -> None:
    """The call ends with a timeout, not much after its deadline. (After an enqueue the effect may be uncertain.)"""
    start = time.monotonic()
    with pytest.raises((BackendTimeout, EnqueueUncertain)) as told:
        call()
    assert isinstance(told.value, BackendTimeout) or isinstance(told.value.__cause__, BackendTimeout)
    took = time.monotonic() - start
    assert took < deadline + GRACE, f"{took:.1f} s is long after the deadline of {deadline} s"


def all_timed_out(calls: Iterable[Callable[[], object]]) -> None:
    """All calls, made at the same time, end with a timeout as in ``timed_out``."""
    together = list(calls)
    with ThreadPoolExecutor(len(together)) as pool:
        list(pool.map(timed_out, together))


def an_enqueue_in_doubt_can_be_repeated(server: Server, url: str) -> None:
    """A stopped server carries out an enqueue when it continues; a repetition of the enqueue adds no second job."""
    with multiq.App(url) as app:
        queue = app.queue("uncertain")
        app.queue("other").enqueue_many(["a", "b"], delay=3600)  # so that the server has the script loaded
        with stopped(server), pytest.raises(EnqueueUncertain, match=r"error\.repeat\(\)") as told:
            queue.enqueue_many(["one", "two"], delay=3600)
        until(lambda: queue.stats().delayed == 2, what=lambda: f"it did what it was sent: {queue.stats()}")
        handles = told.value.repeat()
        assert [handle.id for handle in handles] == [*told.value.ids] == [job.id for job in queue.jobs("delayed")]


def outlives_a_stop(server: Server, url: str, folder: Path, *, seconds: float = 0.0) -> None:
    """A worker on this URL runs the jobs enqueued before and after a stop of the server.

    The stop lasts until the worker has noticed the stop, and *seconds* longer.
    """
    with worker(folder, url, "threads=2") as process:
        process.wait_until_working()
        quick.enqueue_many([(number,) for number in range(20)])
        until(lambda: len(numbers(process.diary, "end")) >= 20)
        with stopped(server):
            until(lambda: process.log.count("BackendTimeout") >= 2, what=lambda: f"it is noticed\n{process.log}")
            time.sleep(seconds)
        quick.enqueue_many([(number,) for number in range(20, 40)])
        until(lambda: set(numbers(process.diary, "end")) == set(range(40)), what=lambda: process.log)
        until(lambda: app.backend.queues() == [])


# --- no server is there, or another program --------------------------------------------------------------


@contextlib.contextmanager
def somebody_else(says: bytes, *, unasked: bool = False) -> Iterator[int]:
    """A port that sends each client this text and closes the connection, *unasked* or after the client's request."""
    with socket.create_server((HOST, 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    if not unasked:
                        client.recv(1000)
                    client.sendall(says)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def waits_for_its_server(server: Server, url: str, folder: Path) -> None:
    """A worker that starts while its server does not run logs that, and works once the server runs."""
    server.stop()
    with worker(folder, url) as process:
        until(lambda: "BackendUnavailable" in process.log, what=lambda: process.log)
        server.start()
        quick.enqueue(1)
        until(lambda: numbers(process.diary, "end") == [1], what=lambda: process.log)


# --- connections and servers go away, and come back ------------------------------------------------------


def leaves_no_open_file(turn: Callable[[], None]) -> None:
    """The number of open files does not grow over a hundred turns, in each of which connections end."""
    us = psutil.Process()
    opened = []
    for _ in range(100):
        turn()
        opened.append(us.num_fds())
    until(lambda: us.num_fds() <= max(opened[:10]) + 4, what=lambda: f"files are closed: {opened}")  # and the proxy's


class Load:
    """A thread that enqueues ``quick`` jobs one after the other while the block lasts, and records each answer."""

    def __init__(self) -> None:
        self.acknowledged: list[int] = []
        self.uncertain: list[int] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._produce)

    def goes_on(self, jobs: int = 100, what: Callable[[], str] | None = None) -> None:
        """Wait until more than *jobs* further jobs were acknowledged."""
        known = len(self.acknowledged)
        until(lambda: len(self.acknowledged) > known + jobs, what=what)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _is_repeated(self, error: EnqueueUncertain) -> bool:
        while error.ids and not self._is_over.wait(0.02):
            with contextlib.suppress(EnqueueUncertain):
                error.repeat()
                return True
        return False

    def _produce(self) -> None:
        number = 0
        while not self._is_over.is_set():
            try:
                quick.enqueue(number)
            except EnqueueUncertain as error:
                (self.acknowledged if self._is_repeated(error) else self.uncertain).append(number)
            except BackendUnavailable:
                time.sleep(0.02)
                continue
            else:
                self.acknowledged.append(number)
                time.sleep(0.001)
            number += 1


def no_acknowledged_job_is_lost(server: Server, url: str, folder: Path, end: str) -> None:
    """An enqueue without an answer is repeated under the same ids, so no job stays uncertain, either."""
    with worker(folder, url, "threads=2") as process:
        with Load() as load:
            # When the server ends in the middle of the load, three times
            for _ in range(3):
                load.goes_on()
                getattr(server, end)()
                time.sleep(0.2)
                server.start()
            load.goes_on(what=lambda: process.log)
        # Then the worker continues by itself, and does every job whose enqueue was acknowledged
        until(lambda: set(load.acknowledged) <= set(numbers(process.diary, "end")), what=lambda: process.log)
        until(lambda: app.backend.queues() == [])
    assert load.uncertain == []


def delays_leases_and_counts_outlive_a_kill(server: Server, backend: Backend, consumer: Consumer) -> None:
    job_ids = backend.enqueue(QUEUE, [new(ttr=600), new(ttr=600), new(delay=3600), new()])
    held, failed, spoilt = [consumer.reserve(1, 0)[0] for _ in range(3)]
    assert consumer.settle([Release(failed, delay=3600, reason="try later"), Bury(spoilt, "bad")]) == [None, None]
    server.kill()
    server.start()
    records = [backend.peek(QUEUE, job_id) for job_id in job_ids]
    assert [job.state for job in records] == [State.RESERVED, State.DELAYED, State.DELAYED, State.BURIED]
    assert [job.attempt for job in records] == [1, 1, 0, 1]
    assert [job.reason for job in records] == [None, "try later", None, "bad"]
    assert all(3500 < (job.due_in or 0) <= 3600 for job in records[1:3])
    assert consumer.settle([Touch(held), Ack(held)]) == [None, None]
