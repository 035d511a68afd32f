"""Enqueues jobs, many in one packet. Reports the jobs that were stored, the jobs that were refused, and the uncertain
jobs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NoReturn

from multiq.errors import BackendError, BackendFull, EnqueuePartial, EnqueueUncertain, MultiqError, PayloadTooLarge

from .errors import CONNECTION_ERRORS, explain, is_refusal, reply_error
from .records import whole_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import NewJob

    from .connection import Connection
    from .pool import Pool
    from .stats import ServerInfo

MIN_TTR = 3  # seconds; during the last second of a lease, a reserve on the same connection gets DEADLINE_SOON
_MOST_JOBS = 1000  # jobs in one packet
_MOST_BYTES = 4_000_000  # a packet ends with the job that brings its bodies to this number of bytes


#: replies to a refused put. If any other reply arrives, the next replies may belong to other commands
_REFUSALS = (b"BURIED ", b"DRAINING", b"JOB_TOO_BIG", b"OUT_OF_MEMORY", b"INTERNAL_ERROR")


def enqueue(pool: Pool, queue: str, jobs: Sequence[NewJob]) -> list[str]:
    """Put *jobs* in their order, and return their ids. Raises the errors of ``Backend.enqueue``."""
    deadline = pool.deadline()
    connection = pool.take(deadline)
    try:
        server_info = connection.server_info
        if server_info is None:
            connection, server_info = pool.fetch_server_info(connection, deadline)
        for job in jobs:
            if len(job.body) > server_info.max_body:
                raise _too_large(len(job.body), server_info.max_body)  # noqa: TRY301 - nothing was sent
        if len(jobs) == 1 and connection.used == queue:
            return _put_alone(pool, connection, queue, jobs[0], deadline)
        return _Batch(pool, queue, jobs, server_info).put(connection, deadline)
    except MultiqError:
        raise
    except BaseException:  # a signal handler has raised it; a reply may be unread
        connection.abort()
        raise
    finally:
        pool.release(connection)


def put(job: NewJob) -> bytes:
    """Return the command that adds a job to the tube in use."""
    body = job.body
    delay = whole_seconds(job.delay) if job.delay else 0
    return b"put %d %d %d %d\r\n%b\r\n" % (job.priority, delay, _lease_seconds(job.ttr), len(body), body)


@functools.lru_cache(maxsize=64)
def _lease_seconds(ttr: float) -> int:
    """Return the ttr in whole seconds, at least ``MIN_TTR``."""
    return max(MIN_TTR, whole_seconds(ttr))


def _put_alone(pool: Pool, connection: Connection, queue: str, job: NewJob, deadline: float) -> list[str]:
    """Put one job. This path must be fast, because it is the most frequent call."""
    try:
        connection.send(put(job), deadline)
        line = connection.read_line(deadline)
    except CONNECTION_ERRORS as exc:
        error = explain(exc, pool.address, pool.timeout)
        if getattr(exc, "unsent", 0):
            raise error from exc
        raise EnqueueUncertain(queue, [job], str(error)) from exc
    if _is_inserted(line):
        return [line[9:].decode()]
    assert connection.server_info is not None  # noqa: S101 - enqueue() has asked for it
    return _Batch(pool, queue, [job], connection.server_info).refuse(connection, {0: line})


class _Batch:
    def __init__(self, pool: Pool, queue: str, jobs: Sequence[NewJob], server_info: ServerInfo) -> None:
        self._pool = pool
        self._queue = queue
        self._jobs = jobs
        self._server_info = server_info
        self._accepted: dict[int, str] = {}
        self._refused: dict[int, bytes] = {}

    def put(self, connection: Connection, deadline: float) -> list[str]:
        """Put the jobs in packets. Each packet has its own deadline. *deadline*: the deadline of the first packet."""
        self._use(connection, deadline)
        for at, count in _packets(self._jobs):
            self._put(connection, at, list(map(put, self._jobs[at : at + count])), deadline)
            if self._refused:
                self.refuse(connection, self._refused)
            deadline = self._pool.deadline()
        return list(self._accepted.values())

    def refuse(self, connection: Connection, refused: dict[int, bytes]) -> NoReturn:
        """Raise the error for refused jobs. *refused* maps each job's index to the server's reply."""
        self._refused = refused
        if all(line.startswith(_REFUSALS) for line in refused.values()):
            self._delete_buried(connection)
        else:
            connection.abort()
        raise self._refusal()

    def _use(self, connection: Connection, deadline: float) -> None:
        """Send ``use`` in a separate packet. If the server refused a ``use``, puts in the same packet would go to the
        previous tube."""
        if connection.used == self._queue:
            return
        try:
            ((line, _),) = connection.ask(b"use %b\r\n" % self._queue.encode(), 1, deadline)
        except CONNECTION_ERRORS as exc:
            raise explain(exc, self._pool.address, self._pool.timeout) from exc
        if not line.startswith(b"USING "):
            connection.close()
            raise reply_error(line, self._pool.address)
        connection.used = self._queue

    def _put(self, connection: Connection, at: int, commands: Sequence[bytes], deadline: float) -> None:
        try:
            connection.send(b"".join(commands), deadline)
            lines = connection.read_lines(len(commands), deadline)
        except CONNECTION_ERRORS as exc:
            self._sort(at, getattr(exc, "partly_read", None) or connection.received_lines())
            raise self._error(exc, at + _sent(commands, getattr(exc, "unsent", 0))) from exc
        self._sort(at, lines)

    def _sort(self, at: int, lines: Sequence[bytes]) -> None:
        for index, line in enumerate(lines, at):
            if _is_inserted(line):
                self._accepted[index] = line[9:].decode()
            else:
                self._refused[index] = line

    def _error(self, exc: Exception, unsent: int) -> BackendError:
        """Return the error after a connection error. The job at index *unsent* and all later jobs were not sent.

        Earlier jobs without a reply are uncertain, because they may be stored. Jobs that the server buried are
        uncertain, too, because this call could not delete them, and the server may have lost them in a restart.
        """
        error = explain(exc, self._pool.address, self._pool.timeout)
        jobs = self._jobs
        first = len(self._accepted) + len(self._refused)
        buried = {index for index, line in self._refused.items() if line.startswith(b"BURIED ")}
        uncertain = [*sorted(buried), *range(first, unsent)]
        if uncertain:
            certain = [*sorted(self._refused.keys() - buried), *range(max(first, unsent), len(jobs))]
            return EnqueueUncertain(
                self._queue,
                [jobs[index] for index in uncertain],
                str(error),
                accepted=self._accepted,
                unsent=[jobs[index] for index in certain],
            )
        if self._accepted:
            return EnqueuePartial(self._accepted, len(jobs), str(error))
        return error

    def _delete_buried(self, connection: Connection) -> None:
        """Delete jobs that the server buried when they were put, because the call reports these jobs as refused.

        On a server with a log, these jobs are not deleted. The log would have their deletion but not their put. At its
        next start, the server would stop reading the log at this deletion, and would lose all later jobs.
        """
        buried = [line[7:] for line in self._refused.values() if line.startswith(b"BURIED ")]
        if buried and not self._server_info.has_log:
            packet = b"".join(b"delete %b\r\n" % job_id for job_id in buried)
            try:
                connection.ask(packet, len(buried), self._pool.deadline())
            except CONNECTION_ERRORS as exc:
                raise self._error(exc, 0) from exc

    def _refusal(self) -> BackendError | PayloadTooLarge:
        if unexpected := [index for index in sorted(self._refused) if not is_refusal(self._refused[index])]:
            return self._uncertain(unexpected)
        index, line = next(iter(self._refused.items()))
        error: BackendError | PayloadTooLarge = reply_error(line, self._pool.address)
        if line == b"JOB_TOO_BIG":
            cause = error.__cause__
            error = _too_large(len(self._jobs[index].body), self._server_info.max_body)
            error.__cause__ = cause
        elif line.startswith(b"BURIED ") and self._server_info.has_log:
            cause = error.__cause__
            error = BackendFull(
                f"{error}: buried jobs of this call: {self._shown_buried()}; when the server has memory again, kick "
                "them, or kick and then delete them"
            )
            error.__cause__ = cause
        if self._accepted:
            partial = EnqueuePartial(self._accepted, len(self._jobs), str(error))
            partial.__cause__ = error
            return partial
        return error

    def _uncertain(self, unexpected: Sequence[int]) -> EnqueueUncertain:
        """Return the error for replies that do not belong to a put. Such a reply does not show whether the job was
        stored."""
        error = reply_error(self._refused[unexpected[0]], self._pool.address)
        received = len(self._accepted) + len(self._refused)
        certain = [*sorted(self._refused.keys() - set(unexpected)), *range(received, len(self._jobs))]
        uncertain = EnqueueUncertain(
            self._queue,
            [self._jobs[index] for index in unexpected],
            str(error),
            accepted=self._accepted,
            unsent=[self._jobs[index] for index in certain],
        )
        uncertain.__cause__ = error
        return uncertain

    def _shown_buried(self) -> str:
        return ", ".join(line[7:].decode() for line in self._refused.values() if line.startswith(b"BURIED "))


def _is_inserted(line: bytes) -> bool:
    return line.startswith(b"INSERTED ") and line[9:].isdigit()


def _too_large(size: int, limit: int) -> PayloadTooLarge:
    advice = "start beanstalkd with a larger -z, or store the data elsewhere and enqueue its address"
    return PayloadTooLarge(size, limit, advice)


def _sent(commands: Sequence[bytes], unsent: int) -> int:
    """Return the number of commands that were sent completely. *unsent*: this number of bytes at the end was not
    sent."""
    count = len(commands)
    while unsent > 0:
        count -= 1
        unsent -= len(commands[count])
    return count


def _packets(jobs: Sequence[NewJob]) -> Iterator[tuple[int, int]]:
    """Yield the index of each packet's first job and the number of the packet's jobs."""
    at = size = 0
    for index, job in enumerate(jobs):
        if index - at >= _MOST_JOBS or size >= _MOST_BYTES:
            yield at, index - at
            at, size = index, 0
        size += len(job.body)
    yield at, len(jobs) - at
