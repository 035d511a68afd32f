"""Presence: which workers a connection has, on every host, and what they run.

Viewers (``multiq top``) ask the workers through the backend. Without a viewer, nothing is stored. A viewer takes one of
a few reserved queues and puts a request there: a job delayed by 15 seconds. The viewer renews the request. While there
is a delayed request, each worker puts its answer into the same queue, once a second. When the viewer has gone, its last
request becomes due: the workers then stop answering, and clear the queue. Only the server's clock decides when a
request is due. Workers learn from the counts that they read anyway (``Control``) that there is a viewer.
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
"""Seconds after which each worker that can answer has answered: workers check for viewers every five seconds."""

_CALL_SECONDS = 15.0  # seconds that a request lasts if it is not renewed
_RENEW_EVERY = 5.0  # seconds
_FORGET_AFTER = 10.0  # seconds after a worker's last answer until the worker is left out
_BATCH = 100  # answers


class Run(msgspec.Struct, frozen=True):
    """A job that runs."""

    queue: str
    id: str
    seconds: float


class Process(msgspec.Struct, frozen=True):
    """One of a worker's processes."""

    pid: int
    held: int
    """Jobs, including those that run."""
    runs: list[Run]
    """The longest run first. Of very many runs, only the first ones."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer."""

    worker: str
    """``host:pid`` of its supervisor."""
    state: str
    """``working``, ``paused``, ``down`` (``multiq down``) or ``draining``."""
    up_for: float
    """Seconds since it began."""
    queues: list[str]
    at_a_time: int
    """Jobs that each process runs at a time."""
    processes: list[Process]
    running: int
    """Jobs that run, including those that are not listed."""


class TooManyViewers(MultiqError):
    """All queues for viewers of the connection's workers are taken."""


class Viewer:
    """A viewer of the workers. Each method may raise ``BackendError``; ``start`` comes first, ``close`` last."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._control = Control(backend)
        self._answers: dict[str, tuple[Answer, float]] = {}  # by worker: its last answer, and when it came
        self._renew_at = 0.0

    def start(self) -> None:
        """Take a queue and put the first request there. Raises ``TooManyViewers``."""
        for queue in random.sample(PRESENCE_QUEUES, len(PRESENCE_QUEUES)):
            if self._backend.stats(queue).delayed:
                continue
            self._queue = queue
            job_id = self._renew()
            if self._backend.stats(queue).delayed == 1:
                self._consumer = self._backend.consumer((queue,))
                return
            self._backend.delete(queue, job_id)  # another viewer took it at the same moment
        raise TooManyViewers(
            f"the workers of this connection have {len(PRESENCE_QUEUES)} viewers already: try again when one has ended"
        )

    def read(self) -> list[Answer]:
        """The last answer of each worker, in the order of their names. Renews the request when it is time."""
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
        """Clear the queue."""
        self._consumer.close()
        self._backend.purge(self._queue, [State.READY, State.DELAYED])

    def _renew(self) -> str:
        self._renew_at = time.monotonic() + _RENEW_EVERY
        self._control.ask_presence(_CALL_SECONDS)
        return self._backend.enqueue(self._queue, [NewJob(b"", new_id(), delay=_CALL_SECONDS)])[0]

    def _note(self, body: bytes) -> None:
        if not body:
            return  # an earlier request, now due
        try:
            answer = msgspec.json.decode(body, type=Answer)
        except msgspec.DecodeError:  # of another version, or no answer at all
            return
        self._answers[answer.worker] = answer, time.monotonic()


class Responder:
    """A worker's side of presence: answers each viewer, and clears what viewers have left behind."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._viewers: list[str] = []
        self._to_clear: set[str] = set()

    @property
    def is_idle(self) -> bool:
        """Whether there is no viewer to answer and no queue to clear."""
        return not self._viewers and not self._to_clear

    def find_viewers(self) -> None:
        """Find all viewers. Raises ``BackendError``."""
        self._check(PRESENCE_QUEUES)

    def answer(self, answer: Answer) -> None:
        """Send the answer to all viewers. Raises ``BackendError``."""
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
            elif stats.ready or stats.reserved:  # a job that a killed viewer had reserved becomes ready again
                self._backend.purge(queue, [State.READY])
                to_clear.add(queue)
        self._viewers, self._to_clear = viewers, to_clear
