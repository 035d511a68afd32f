"""Who works on a connection, on whichever host, and what runs there: asked through the backend while somebody looks.

Nothing is kept for the case that somebody looks. A viewer takes one of a few queues and puts a call into it: a job
that is delayed by a quarter of a minute. As long as that one is delayed, workers put their answers beside it, one a
second; then it is due, nobody answers any more, and whoever answered last clears the queue. The server's clock alone
says when. That there are calls at all, workers learn from what they ask anyway (``Control``).
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
"""Seconds: workers ask every five whether anybody calls; after so many, who has not answered does not."""

_CALL_SECONDS = 15.0  # seconds that a call stands if nobody renews it
_RENEW_EVERY = 5.0  # seconds
_FORGET_AFTER = 10.0  # seconds after which a worker that says no more is left out
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
    """Jobs, those that run included."""
    runs: list[Run]
    """The longest first; of very many, the first ones."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself."""

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
    """Jobs that run, those that are not listed included."""


class TooManyViewers(MultiqError):
    """As many people look at the workers of this connection as can."""


class Viewer:
    """A viewer's side. Each method may raise ``BackendError``; ``begin`` comes first, ``end`` last."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._control = Control(backend)
        self._answers: dict[str, tuple[Answer, float]] = {}  # by worker: what it said last, and when
        self._renew_at = 0.0

    def start(self) -> None:
        """Call. Raises ``TooManyViewers``."""
        for queue in random.sample(PRESENCE_QUEUES, len(PRESENCE_QUEUES)):
            if self._backend.stats(queue).delayed:
                continue
            self._queue = queue
            job_id = self._renew()
            if self._backend.stats(queue).delayed == 1:
                self._consumer = self._backend.consumer((queue,))
                return
            self._backend.delete(queue, job_id)  # somebody else took it at the same moment
        raise TooManyViewers(
            f"{len(PRESENCE_QUEUES)} others look at the workers of this connection: try again when one is done"
        )

    def read(self) -> list[Answer]:
        """What each worker that answers said last, by their names. Calls again when it is time."""
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
        """Leave nothing."""
        self._consumer.close()
        self._backend.purge(self._queue, [State.READY, State.DELAYED])

    def _renew(self) -> str:
        self._renew_at = time.monotonic() + _RENEW_EVERY
        self._control.ask_presence(_CALL_SECONDS)
        return self._backend.enqueue(self._queue, [NewJob(b"", new_id(), delay=_CALL_SECONDS)])[0]

    def _note(self, body: bytes) -> None:
        if not body:
            return  # a call of before
        try:
            answer = msgspec.json.decode(body, type=Answer)
        except msgspec.DecodeError:  # another version's, or nobody's
            return
        self._answers[answer.worker] = answer, time.monotonic()


class Responder:
    """A worker's side: says what it is given to say wherever a call stands, and clears what calls have left."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._viewers: list[str] = []
        self._to_clear: set[str] = set()

    @property
    def is_idle(self) -> bool:
        """Whether there is nobody to answer and nothing to clear: nothing needs to be looked at."""
        return not self._viewers and not self._to_clear

    def find_viewers(self) -> None:
        """Find all calls that stand. Raises ``BackendError``."""
        self._check(PRESENCE_QUEUES)

    def answer(self, answer: Answer) -> None:
        """Say it to all who call. Raises ``BackendError``."""
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
            elif stats.ready or stats.reserved:  # what a viewer that was killed held comes back
                self._backend.purge(queue, [State.READY])
                to_clear.add(queue)
        self._viewers, self._to_clear = viewers, to_clear
