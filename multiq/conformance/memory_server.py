"""The memory backend behind a real socket. Subclasses of this backend have planted bugs about lost replies. The suite
must find all of these bugs.

A request is the number of a call, and the reply is the same number. The call itself and its answer stay in this
process, and are not sent. A correct server remembers its answer to each call, so a repeated call is carried out only
once.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from multiq.backend.memory import MemoryBackend, MemoryConsumer
from multiq.errors import BackendError, BackendTimeout, BackendUnavailable, EnqueueUncertain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from multiq.backend import (
        After,
        JobRecord,
        Lease,
        NewJob,
        Note,
        NotePage,
        Outcome,
        OutcomeKind,
        OutcomePage,
        Page,
        QueueStats,
        State,
        Step,
        Verdict,
        Version,
    )
    from multiq.driverkit.clock import Clock
    from multiq.errors import JobNotFound, JobReserved, LeaseLost

_SIZE = 20  # bytes of a request and of a reply
_TRIES = 2

_E = TypeVar("_E", bound=BackendError)

_numbers = itertools.count(1)
_calls: dict[int, tuple[str, Callable[[], Any]]] = {}  # call number -> the name of the operation, and the call
_answers: dict[int, Any] = {}  # call number -> the answer or the error


class WireServer:
    """Carries out the calls whose numbers it receives.

    *on_repeat*: maps the name of an operation to a planted bug. The planted bug is a function that is called when a
    client repeats a call of this operation. The planted bug gets the first answer and the call, and returns a wrong
    answer.
    """

    def __init__(self, on_repeat: Mapping[str, Callable[[Any, Callable[[], Any]], Any]]) -> None:
        self._on_repeat = on_repeat
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            request = _read(client)
            if request:
                self._do(int(request))
                client.sendall(request)

    def _do(self, number: int) -> None:
        verb, call = _calls[number]
        if number not in _answers:
            _answers[number] = _outcome(call)
        elif verb in self._on_repeat:
            _answers[number] = _outcome(partial(self._on_repeat[verb], _answers[number], call))


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as exc:  # noqa: BLE001 - raised again where the call was made
        return exc


def _outcome_unknown(error: _E) -> _E:
    error.may_be_done = True
    return error


def _read(connection: socket.socket) -> bytes:
    """Read a whole request or reply. Returns ``b""`` if the connection ends before the message is complete."""
    data = b""
    while len(data) < _SIZE:
        piece = connection.recv(_SIZE - len(data))
        if not piece:
            return b""
        data += piece
    return data


class WiredBackend(MemoryBackend):
    """Calls the store directly until ``connect`` is called. After ``connect``, the calls go to a ``WireServer``."""

    on_repeat: ClassVar[Mapping[str, Callable[[Any, Callable[[], Any]], Any]]] = {}
    on_silence: ClassVar[Mapping[str, Any]] = {}
    """Maps an operation to the wrong result (a planted bug) that it returns if the server does not answer."""
    on_loss: ClassVar[Mapping[str, Any]] = {}
    """Maps an operation to the wrong result (a planted bug) that it returns if the connection is lost."""
    names_uncertain_enqueues: ClassVar[bool] = True
    """Whether an enqueue that may have been carried out raises ``EnqueueUncertain``. The value False is a planted bug.
    """
    deadlines: ClassVar[float] = 1.0
    """The factor by which a call's deadline is multiplied. Any factor except 1 is a planted bug."""

    def __init__(self, *, name: str = "", clock: Clock = time.monotonic_ns) -> None:
        super().__init__(name=name, clock=clock)
        self._address: tuple[str, int] | None = None
        self._deadline = 0.0
        # Verdicts that may have been carried out -> the number of the call that had them.
        self._unconfirmed: dict[tuple[Verdict, ...], int] = {}

    def connect(self, address: tuple[str, int], deadline: float) -> None:
        """Send all calls to *address* from now on, with a deadline of *deadline* seconds each."""
        self._address, self._deadline = address, deadline * self.deadlines

    def run(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return getattr(MemoryBackend, verb)(self, *arguments, **options)

    def ask(
        self, verb: str, call: Callable[[], Any], patience: float = 0.0, *, verdicts: Sequence[Verdict] = ()
    ) -> Any:
        """Let the server carry out a call. The call is repeated if its reply is lost.

        *verdicts*: the verdicts of a settle. If an earlier call may have carried out the same verdicts, the new call
        gets the number of the earlier call. By the number, the server recognizes the repeated verdicts.
        """
        if self._address is None:
            return call()
        said = tuple(verdicts)
        number = self._unconfirmed.pop(said, None) or next(_numbers)
        _calls[number] = verb, call
        until = time.monotonic() + self._deadline + patience
        try:
            for _ in range(_TRIES):
                with contextlib.suppress(ConnectionError):
                    if self._is_answered(number, until):
                        break
                if verb in self.on_loss:
                    return self.on_loss[verb]
            else:
                if said:
                    self._unconfirmed[said] = number
                raise _outcome_unknown(
                    BackendUnavailable("both the reply and the reply to the repeated call were lost")
                )
        except TimeoutError as exc:
            if verb in self.on_silence:
                return self.on_silence[verb]
            raise _outcome_unknown(BackendTimeout(f"no answer within {self._deadline:g} s")) from exc
        finally:
            if said not in self._unconfirmed:
                del _calls[number]
                answer = _answers.pop(number, None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _is_answered(self, number: int, until: float) -> bool:
        assert self._address is not None
        with socket.create_connection(self._address, max(0.001, until - time.monotonic())) as connection:
            connection.sendall(b"%0*d" % (_SIZE, number))
            connection.settimeout(max(0.001, until - time.monotonic()))
            return bool(_read(connection))

    # --- the operations ---

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        try:
            ids: list[str] = self.ask("enqueue", partial(self.run, "enqueue", queue, jobs, connection=connection))
        except BackendUnavailable as exc:
            if exc.may_be_done and self.names_uncertain_enqueues:
                raise EnqueueUncertain(queue, jobs, str(exc), client_ids=True) from exc
            raise
        return ids

    def consumer(self, queues: Sequence[str]) -> WiredConsumer:
        return WiredConsumer(self, queues)

    def peek(self, queue: str, job_id: str) -> JobRecord:
        record: JobRecord = self.ask("peek", partial(self.run, "peek", queue, job_id))
        return record

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        page: Page = self.ask("jobs", partial(self.run, "jobs", queue, state, limit=limit, after=after))
        return page

    def delete(self, queue: str, job_id: str) -> None:
        self.ask("delete", partial(self.run, "delete", queue, job_id))

    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        answers: list[JobNotFound | JobReserved | None] = self.ask(
            "delete_many", partial(self.run, "delete_many", queue, ids, after=after)
        )
        return answers

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        new: str = self.ask("reschedule", partial(self.run, "reschedule", queue, job_id, delay))
        return new

    def kick(self, queue: str, limit: int) -> int:
        count: int = self.ask("kick", partial(self.run, "kick", queue, limit))
        return count

    def kick_job(self, queue: str, job_id: str) -> None:
        self.ask("kick_job", partial(self.run, "kick_job", queue, job_id))

    def queues(self) -> list[str]:
        names: list[str] = self.ask("queues", partial(self.run, "queues"))
        return names

    def stats(self, queue: str) -> QueueStats:
        stats: QueueStats = self.ask("stats", partial(self.run, "stats", queue))
        return stats

    def pause(self, queue: str, seconds: float) -> None:
        self.ask("pause", partial(self.run, "pause", queue, seconds))

    def resume(self, queue: str) -> None:
        self.ask("resume", partial(self.run, "resume", queue))

    def purge(self, queue: str, states: Sequence[State]) -> int:
        count: int = self.ask("purge", partial(self.run, "purge", queue, states))
        return count

    def outcomes(self, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
        found: list[Outcome | None] = self.ask("outcomes", partial(self.run, "outcomes", queue, ids))
        return found

    def history(
        self, queue: str, *, kind: OutcomeKind | None = None, limit: int = 100, after: str | None = None
    ) -> OutcomePage:
        page: OutcomePage = self.ask(
            "history", partial(self.run, "history", queue, kind=kind, limit=limit, after=after)
        )
        return page

    def forget(self, queue: str, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
        count: int = self.ask("forget", partial(self.run, "forget", queue, ids, limit=limit))
        return count

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        held: bool = self.ask("carry_out", partial(self.run, "carry_out", steps, when=when))
        return held

    def relay(self, queues: Sequence[str]) -> int:
        left: int = self.ask("relay", partial(self.run, "relay", queues))
        return left

    def note(self, home: str, key: str) -> Note | None:
        found: Note | None = self.ask("note", partial(self.run, "note", home, key))
        return found

    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        page: NotePage = self.ask("notes", partial(self.run, "notes", home, prefix, limit=limit, after=after))
        return page


class WiredConsumer(MemoryConsumer):
    def __init__(self, backend: WiredBackend, queues: Sequence[str]) -> None:
        super().__init__(backend._store, queues)
        self._backend = backend

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        leases: list[Lease] = self._backend.ask("reserve", partial(super().reserve, limit, timeout, queues), timeout)
        return leases

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        answers: list[LeaseLost | None] = self._backend.ask(
            "settle", partial(super().settle, verdicts), verdicts=verdicts
        )
        return answers
