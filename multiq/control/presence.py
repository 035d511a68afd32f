"""Presence is the list of a connection's workers, on every host, and of the workers' running jobs.

A viewer (``multiq top``) asks the workers through the backend. Without a viewer, nothing is stored.

1. The viewer takes one of a few reserved queues. The viewer adds a request, which is a job delayed by 15 seconds, and
   renews the request every 5 seconds.
2. While the queue has a delayed job, each worker adds its answer to the queue once a second.
3. When the viewer has ended, its last request becomes due. When the request is due, the workers stop answering, and
clear the queue.

Only the server's clock decides when a request is due. A flag (``Control``) tells the workers that there is a viewer.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import TTR_MIN, Ack, NewJob, State
from multiq.errors import MultiqError
from multiq.ids import new_id

from .flags import PRESENCE_QUEUES, Control

if TYPE_CHECKING:
    from multiq.backend import Backend

FIRST_ANSWERS = 6.5
"""Seconds until every worker that can answer has answered. Workers check for viewers every five seconds."""

_CALL_SECONDS = 15.0  # seconds until a request is due if the viewer does not renew it
_RENEW_EVERY = 5.0  # seconds
_FORGET_AFTER = 10.0  # seconds without an answer, after which a worker is removed from the list
_BATCH = 100  # answers


class Run(msgspec.Struct, frozen=True):
    queue: str
    id: str
    seconds: float


class Process(msgspec.Struct, frozen=True):
    pid: int
    held: int
    """The number of jobs that the process holds, including running jobs."""
    runs: list[Run]
    """The running jobs. The job that has run longest comes first. If very many jobs run, only the first jobs are
    listed."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    """The worker's name: ``host:pid``, where ``pid`` is the process id of the worker's supervisor."""
    state: str
    """``working``, ``paused``, ``down`` (``multiq down``) or ``draining``."""
    up_for: float
    """Seconds since the worker started."""
    queues: list[str]
    at_a_time: int
    """The number of jobs that each process can run at the same time."""
    processes: list[Process]
    running: int
    """The number of running jobs, including jobs that ``processes`` does not list."""


class TooManyViewers(MultiqError):
    """All reserved queues for viewers are in use."""


class Viewer:
    """Reads the list of the workers. Call ``start`` first and ``close`` last. Each method may raise
    ``BackendError``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._control = Control(backend)
        self._answers: dict[str, tuple[Answer, float]] = {}  # by worker, the last answer and the time of its arrival
        self._renew_at = 0.0

    def start(self) -> None:
        """Take a queue for viewers, and add the first request. Raises ``TooManyViewers``."""
        for queue in random.sample(PRESENCE_QUEUES, len(PRESENCE_QUEUES)):
            if self._backend.stats(queue).delayed:
                continue
            self._queue = queue
            job_id = self._renew()
            if self._backend.stats(queue).delayed == 1:
                self._consumer = self._backend.consumer((queue,))
                return
            self._backend.delete(queue, job_id)  # another viewer has taken the queue at the same moment
        raise TooManyViewers(
            f"the workers of this connection have {len(PRESENCE_QUEUES)} viewers already: try again when one has ended"
        )

    def read(self) -> list[Answer]:
        """Return the last answer of each worker, sorted by worker. Also renews the viewer's request when needed."""
        if time.monotonic() >= self._renew_at:
            self._renew()
        while leases := self._consumer.reserve(_BATCH, 0):
            for lease in leases:
                self._note(lease.body)
            self._consumer.settle([Ack(lease) for lease in leases])
        oldest = time.monotonic() - _FORGET_AFTER
        self._answers = {worker: answers for worker, answers in self._answers.items() if answers[1] >= oldest}
        return [answer for _, (answer, _) in sorted(self._answers.items())]

    def close(self) -> None:
        self._consumer.close()
        self._backend.purge(self._queue, [State.READY, State.DELAYED])

    def _renew(self) -> str:
        self._renew_at = time.monotonic() + _RENEW_EVERY
        self._control.ask_presence(_CALL_SECONDS)
        return self._backend.enqueue(self._queue, [NewJob(b"", new_id(), delay=_CALL_SECONDS)])[0]

    def _note(self, body: bytes) -> None:
        if not body:
            return  # an earlier request that is due now, and not an answer
        try:
            answer = msgspec.json.decode(body, type=Answer)
        except msgspec.DecodeError:  # the body is not an answer, or is from another version of multiq
            return
        self._answers[answer.worker] = answer, time.monotonic()


class Responder:
    """Answers the viewers on behalf of a worker, and clears the queues of viewers that have ended."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._viewers: list[str] = []
        self._to_clear: set[str] = set()

    @property
    def is_idle(self) -> bool:
        return not self._viewers and not self._to_clear

    def find_viewers(self) -> None:
        """Find all viewers. Raises ``BackendError``."""
        self._check(PRESENCE_QUEUES)

    def answer(self, answer: Answer) -> None:
        """Send *answer* to all viewers. Raises ``BackendError``."""
        self._check([*self._viewers, *self._to_clear])
        body = msgspec.json.encode(answer)
        for queue in self._viewers:
            self._backend.enqueue(queue, [NewJob(body, new_id(), ttr=TTR_MIN)])

    def _check(self, queues: list[str] | tuple[str, ...]) -> None:
        viewers, to_clear = [], set()
        for queue in queues:
            stats = self._backend.stats(queue)
            if stats.delayed:
                viewers.append(queue)
            # if a viewer was killed, the answers that it had reserved become ready again
            elif stats.ready or stats.reserved:
                self._backend.purge(queue, [State.READY])
                to_clear.add(queue)
        self._viewers, self._to_clear = viewers, to_clear
