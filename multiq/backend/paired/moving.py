"""Puts released jobs to the primary. The store's ready jobs are the outbox.

====================  ======================================================================
step                  what a crash right after it leaves
====================  ======================================================================
1 reserve in store    the lease ends after 10 seconds; then another process begins again
2 put to the primary  the same; the job is put again, and one of both copies is not run
3 note its number     the same, but the job is not put again
4 ack in the store    nothing
====================  ======================================================================

If a job was put more than once, only one copy is run: the copy whose number is noted first. Either this module notes
the number, or the consumer that has reserved the copy.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend.effects import Version
from multiq.backend.types import Ack, Bury, NewJob, Release
from multiq.driverkit.fork import forks
from multiq.errors import (
    BackendError,
    BackendUnavailable,
    EnqueuePartial,
    EnqueueUncertain,
    JobNotFound,
    PayloadTooLarge,
)

from .layout import (
    JobNote,
    Tracked,
    decode_note,
    doomed_body,
    home_of,
    job_key,
    kick_key,
    put_note,
    queue_of,
    read_body,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from multiq.backend.base import Backend, Consumer
    from multiq.backend.types import Lease, Verdict

    from .layout import Header

_AT_ONCE = 100  # jobs
_MOST_CONSUMERS = 32  # open consumers of the store: each may have a connection, and a program may use many queues
_PATIENCE = 1.0  # seconds that a thread waits for another thread of its process that moves jobs


class _Move(NamedTuple):
    """A released job that is to be put."""

    lease: Lease
    tracked: Tracked
    job: NewJob
    version: str
    """The version of the note about the job before the put. Empty if there is no note."""


class Mover:
    """Moves the jobs of one backend. Any thread may call it, and only one thread moves jobs at a time."""

    def __init__(self, primary: Backend, store: Backend) -> None:
        self._primary = primary
        self._store = store
        self.start_over_in_child()
        forks.watch(self)

    def start_over_in_child(self) -> None:
        self._lock = threading.Lock()
        self._consumers: dict[str, Consumer] = {}

    def move(self, queues: Iterable[str]) -> None:
        """Put all jobs of these queues that the store has released. Raises ``BackendError``.

        If another thread moves jobs for longer than a second, this method leaves the jobs to the next call of any
        thread or process. If the primary does not answer, many threads would otherwise wait one after the other.
        """
        failure: BackendError | None = None
        for queue in dict.fromkeys(queues):
            home = home_of(queue)
            try:
                while self._move_some(home):
                    pass
            except BackendUnavailable:  # the jobs of the other queues could not be put, either
                raise
            except BackendError as exc:
                failure = exc
        if failure is not None:
            raise failure

    def close(self) -> None:
        with self._lock:
            consumers, self._consumers = self._consumers, {}
        for consumer in consumers.values():
            consumer.close()

    def _move_some(self, home: str) -> bool:
        """Put up to a hundred jobs. Returns whether there may be more."""
        if not self._lock.acquire(timeout=_PATIENCE):
            return False
        try:
            consumer = self._consumer(home)
            leases = consumer.reserve(_AT_ONCE, 0)
            if not leases:
                return False
            done: list[Verdict] = []
            left = {lease.token: lease for lease in leases}
            try:
                moves = []
                for lease in leases:
                    move = self._plan(lease)
                    if isinstance(move, _Move):
                        moves.append(move)
                    else:
                        done.append(move)
                done += self._put(home, moves)
            except _PutError as exc:
                done += exc.done
                raise exc.cause from exc.cause.__cause__
            finally:
                for verdict in done:
                    left.pop(verdict.lease.token, None)
                consumer.settle([*done, *(Release(lease) for lease in left.values())])
        finally:
            self._lock.release()
        return len(leases) == _AT_ONCE

    def _consumer(self, home: str) -> Consumer:
        """Return the consumer of a home. If there are too many consumers, close the one that was not used for the
        longest time. The caller has the lock."""
        consumer = self._consumers.pop(home, None)
        if consumer is None:
            if len(self._consumers) >= _MOST_CONSUMERS:
                self._consumers.pop(next(iter(self._consumers))).close()
            consumer = self._store.consumer([home])
        self._consumers[home] = consumer  # the last one in the order of the dict
        return consumer

    def _plan(self, lease: Lease) -> _Move | Verdict:
        """Return the job that is to be put, or the verdict on a job that need not be put."""
        tracked = read_body(lease.body)
        queue = queue_of(lease.queue)
        if not isinstance(tracked, Tracked) or queue is None:
            return Bury(lease, "it is not a job of a pair: another program has enqueued it here")
        header = tracked.header
        note = self._store.note(lease.queue, job_key(header.id))
        if note is not None and self._is_known(queue, decode_note(note), header):
            return Ack(lease)
        delay = 0.0 if lease.doomed else header.delay
        if delay and self._store.note(lease.queue, kick_key(header.id)) is not None:
            delay = 0.0
        limit = self._primary.capabilities.max_body or 2**31
        body = doomed_body(tracked, lease.doomed, lease.age, limit)
        job = NewJob(body, header.id, lease.priority, delay, header.ttr)
        return _Move(lease, tracked, job, "" if note is None else note.version)

    def _is_known(self, queue: str, note: JobNote, header: Header) -> bool:
        """Whether the job was put before, or the queue has another job of the same id."""
        if note.nonce == header.nonce:
            return True
        if note.ended:
            return bool(header.once) and note.once == header.once
        return is_there(self._primary, queue, note) and note.nonce != header.nonce

    def _put(self, home: str, moves: Sequence[_Move]) -> list[Verdict]:
        """Put jobs. Returns the verdicts on the jobs that need not be put again. Raises ``_PutError``."""
        if not moves:
            return []
        queue = queue_of(home) or ""
        error: BackendError | None = None
        try:
            with _calling_primary():
                numbers = dict(enumerate(self._primary.enqueue(queue, [move.job for move in moves])))
        except PayloadTooLarge as exc:
            if len(moves) == 1:
                return [Bury(moves[0].lease, f"it cannot be put: {exc}")]
            return [verdict for move in moves for verdict in self._put(home, [move])]
        except (EnqueuePartial, EnqueueUncertain) as exc:
            numbers, error = exc.accepted, exc
        except BackendError as exc:
            numbers, error = {}, exc
        done = [moves[at] for at in numbers]
        self._note(home, [(moves[at], number) for at, number in numbers.items()])
        verdicts: list[Verdict] = [Ack(move.lease) for move in done]
        if error is not None:
            raise _PutError(verdicts, error)
        return verdicts

    def _note(self, home: str, put: Sequence[tuple[_Move, str]]) -> None:
        """Store the numbers of jobs in their notes. A number that a consumer has already stored is not stored again."""
        steps, conditions = [], []
        for move, number in put:
            header = move.tracked.header
            steps.append(put_note(home, header.id, JobNote(header.nonce, number, header.once)))
            conditions.append(Version(home, job_key(header.id), move.version))
        if steps and not self._store.carry_out(steps, when=conditions):
            for step, condition in zip(steps, conditions, strict=True):
                self._store.carry_out([step], when=[condition])


class _PutError(Exception):
    """Some jobs could not be put."""

    def __init__(self, done: list[Verdict], cause: BackendError) -> None:
        super().__init__(str(cause))
        self.done = done
        self.cause = cause


@contextlib.contextmanager
def _calling_primary() -> Iterator[None]:
    """Mark the errors of the primary. A consumer stops calling the store only after errors of the store."""
    try:
        yield
    except BackendError as exc:
        exc.is_of_primary = True
        raise


def is_there(primary: Backend, queue: str, note: JobNote) -> bool:
    """Whether the primary has the tracked job that a note is about. Raises ``BackendError``."""
    try:
        with _calling_primary():
            record = primary.peek(queue, note.number)
    except JobNotFound:
        return False
    found = read_body(record.body)
    return isinstance(found, Tracked) and found.header.nonce == note.nonce
