"""The permits of running jobs. A worker asks for a job's permits before the task starts, extends them together with the
lease, and frees them after the verdict.

If the jobs of a worker need no permits, the worker starts no thread for permits, and makes no call.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING

from multiq.errors import BackendError, MultiqError
from multiq.outage_log import Outage
from multiq.permit_notes import PermitBook, Refused, are_possible, places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Backend
    from multiq.envelope import PermitGate
    from multiq.permit_notes import Granted, PermitPlace
    from multiq.worker.processes.inflight import Held

    from .fetcher import Fetcher

_log = logging.getLogger("multiq.worker")

_SOONEST = 0.1  # seconds until a refused job is reserved again; grows with each successive refusal of its limit and key
_SOONEST_MOST = 2.0
_LATEST = 15.0  # the longest delay of a refused job; a changed limit takes effect after this time
_APART = 0.05  # seconds between two refused jobs of one limit and key in one process; grows as _SOONEST does
_APART_MOST = 0.5
_GROWTH = 1 / 10  # the part by which these times grow with each successive refusal
_AGAIN = 2.0  # seconds until a job is reserved again, if the store could not be asked
_LOOK_SHARE = 1 / 10  # time between two checks of the leases of jobs with permits, as a part of the shortest ttr
_LONGEST_LOOK = 1.0  # seconds
_RETRY = 0.5  # seconds until the next call after an error of the store
_CLOSED_FOR = 0.02  # seconds for which the other jobs of a limit and key are refused without a look at the slots
_RATE_CLOSED_FOR = 1.0  # as _CLOSED_FOR, for a rate; it ends at the latest with the rate's next turn
_MARGIN = 0.5  # seconds for which a permit outlives the lease; the lease ends a little later than this process knows
_END_WAIT = 2.0  # seconds that the end of a process waits for permits to be freed
_SPACINGS = 10_000  # limits and keys of refused jobs that are remembered; at this number, all are forgotten


class Permits:
    """The permits of one worker process. ``ask`` is called on the jobs' threads. A separate thread does the rest.

    The thread extends a permit after the fetcher has extended the lease. The thread sees the extension at
    ``Held.ends_at``. So if a process hangs, its permits end when its leases end.
    """

    def __init__(self, backend: Backend, fetcher: Fetcher) -> None:
        self._backend = backend
        self._fetcher = fetcher
        self._book = PermitBook(backend)
        self._changed = threading.Condition()
        # by job: its permits, and the end of its lease at the time when the permits were given or last extended
        self._held: dict[Held, tuple[Granted, float]] = {}
        self._ended: list[Granted] = []
        self._freeing = False
        self._warned: set[Held] = set()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._next: dict[PermitPlace, float] = {}  # the monotonic time at which the last refused job comes back
        self._refusals: dict[PermitPlace, int] = {}  # in a row
        self._outage = Outage()
        self._closed: dict[PermitPlace, tuple[float, Refused]] = {}  # the time until which the slots are not examined

    def ask(self, held: Held, gates: Sequence[PermitGate]) -> float | None:
        """Ask for the permits of a job that is about to start. Returns None if the job has its permits. If not, returns
        the delay with which the job is given back."""
        lease = held.lease
        if not are_possible(self._backend):
            return None  # such a job was moved here from another backend
        wanted = places(gates, lease.queue)
        now = time.monotonic()
        for place in wanted:
            closed_until, refused = self._closed.get(place, (0.0, None))
            if refused is not None and now < closed_until:
                return self._delay(refused)
        covered = held.ends_at  # read before the call: after a touch during the call, the permits must be extended
        try:
            answer = self._book.ask(lease, wanted)
        except BackendError as exc:
            self._log_outage(exc)
            return _AGAIN * (0.5 + random.random())  # noqa: S311 - spreads load, guards nothing
        if isinstance(answer, Refused):
            self._note_closed(answer)
            return self._delay(answer)
        if self._refusals:
            for place in wanted:
                self._refusals.pop(place, None)
        if answer.held:
            with self._changed:
                self._fetcher.settling.on_settled = self._note_settled
                self._held[held] = answer, covered
                held.has_permit = True
                if self._thread is None and not self._is_over:
                    self._thread = threading.Thread(target=self._run, name="multiq-permits", daemon=True)
                    self._thread.start()
                self._changed.notify()
        return None

    def close(self) -> None:
        """Free the permits of jobs that are settled. Waits only a short time for the store."""
        held = set(self._fetcher.held())
        with self._changed:
            self._is_over = True
            self._ended += [granted for one, (granted, _) in self._held.items() if one not in held]
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_END_WAIT)

    def _note_closed(self, refused: Refused) -> None:
        """Refuse the next jobs of this limit and key without a call, because a worker may have reserved many of them
        together."""
        seconds = _CLOSED_FOR if not refused.interval else min(_RATE_CLOSED_FOR, refused.opens_in or 0.0)
        if max(len(self._closed), len(self._refusals)) >= _SPACINGS:
            self._closed, self._refusals = {}, {}
        self._refusals[refused.gate] = self._refusals.get(refused.gate, 0) + 1
        self._closed[refused.gate] = time.monotonic() + seconds, refused

    def _delay(self, refused: Refused) -> float:
        """Return the delay of a refused job, in seconds. Refused jobs of one limit come back one after another, not all
        at the same time."""
        now = time.monotonic()
        opens_in = _LATEST if refused.opens_in is None else refused.opens_in
        # a verdict may free a slot at any time, so only a rate has a next turn to wait for
        growth = 1 + _GROWTH * self._refusals.get(refused.gate, 0)  # a slot that was in use for long may stay in use
        first = now + max(min(_SOONEST * growth, _SOONEST_MOST), opens_in if refused.interval else 0.0)
        apart = max(min(_APART * growth, _APART_MOST), refused.interval)
        with self._changed:
            at = max(first, self._next.get(refused.gate, 0.0) + apart)
            at = min(at, now + _LATEST)
            if len(self._next) >= _SPACINGS:
                self._next.clear()
            self._next[refused.gate] = at
        return (at - now) * (1 + 0.1 * random.random())  # noqa: S311 - spreads load

    def _note_settled(self, settled: Sequence[Held]) -> None:
        """The fetcher calls this under its lock, with all jobs that are settled."""
        with self._changed:
            ended = [self._held.pop(held)[0] for held in settled if held in self._held]
            if ended:
                self._ended += ended
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._ended and not self._is_over:
                    self._changed.wait(self._look_in())
                ended, self._ended = self._ended, []
                due = [(held, granted, held.ends_at) for held, (granted, at) in self._held.items() if held.ends_at > at]
                if self._is_over and not ended:
                    return
            try:
                if ended:
                    self._book.free(ended)
                    ended = []
                if due and not self._is_over:
                    self._extend(due)
                self._outage.reset()
            except MultiqError as exc:
                self._log_outage(exc)
                with self._changed:
                    self._ended += ended
                    if self._is_over:
                        return  # the permits end with the ttr
                    self._changed.wait(_RETRY)

    def _log_outage(self, error: MultiqError) -> None:
        if self._outage.should_log(str(error)):
            _log.warning("permits could not be requested, extended or freed, and the worker tries again: %s", error)

    def _look_in(self) -> float | None:
        if not self._held:
            return None
        return min(_LONGEST_LOOK, min(held.lease.ttr for held in self._held) * _LOOK_SHARE)

    def _extend(self, due: Sequence[tuple[Held, Granted, float]]) -> None:
        lost = self._book.extend([(granted, ends_at + _MARGIN) for _, granted, ends_at in due])
        with self._changed:
            for held, granted, ends_at in due:
                if held in self._held:
                    self._held[held] = granted, ends_at
                    if any(granted is one for one in lost) and held not in self._warned:
                        self._warned.add(held)
                        _log.warning(
                            "[%s] %s continues to run without a permit: the worker could not reach the store for "
                            "longer than the job's ttr, and other jobs now have the slots",
                            held.lease.queue,
                            held.lease.id,
                        )
            self._warned.intersection_update(self._held)
