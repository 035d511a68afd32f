"""Sleeping at the server until the bell rings (lua/include/bell.lua), time is up, or another thread says so.

The bell's marker is popped by BZPOPMIN and carries nothing, so that a lost reply loses no job. Redis looks at its
block timeouts ten times a second only: where that is too coarse, we wake ourselves by a marker in a key of our own, for
which the same BZPOPMIN waits. CLIENT UNBLOCK would do that, too, and is never sent: during a failover (CLIENT PAUSE
WRITE) it ends servers before Redis 8.2 (redis PR 14164), and after one its number may be that of another connection.

A call may be sent along. The server makes it in the moment in which the sleep ends, however that comes about, and both
answers arrive together: a round trip less until the job that woke us begins.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import hiredis

from multiq.driverkit.fork import forks
from multiq.driverkit.wakeup import Wakeup
from multiq.errors import BackendError, BackendTimeout

from . import keys
from .connection import pack
from .errors import ELSEWHERE, FAILURES, PASSING, code_of, explain
from .scripts import script

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from .client import Call, Caller, Callers
    from .connection import Wire
    from .partitions import Lines

_COARSE = 0.5  # seconds: what the server's own timeouts may be late by
_SHORTEST = 0.02  # seconds to ask the server to block for; 0 would be for ever
_RINGS_WITHIN = 0.5  # seconds that waking a sleeper may take; of our own, the connection is closed then
_WAKEUP_LASTS = 60  # seconds until a marker goes that came when its sleeper was awake already
_NAME_SIZE = 7  # random bytes
_TROUBLED = 0.1  # seconds to sleep without a bell, where there is none to be had at the moment
_HARMLESS = PASSING | ELSEWHERE | {"MOVED", "ASK", "UNBLOCKED"}  # the last: by whom it may be, or by a failover


class _Place(NamedTuple):
    """One connection to sleep on."""

    caller: Caller
    line: str
    bells: tuple[bytes, ...]
    wakeup: bytes
    """The key by which we wake ourselves."""


class Sleeper:
    """Where one consumer sleeps: on its own connection, or in a cluster on one for each line."""

    def __init__(self, callers: Callers, caller: Caller, lines: Lines, queues: Sequence[str]) -> None:
        self.rang: list[str] = []
        """The lines whose bells ended the last sleep. Nobody else was told."""
        self.heard: Any = None
        """The reply to the call that was sent along with the last sleep; None if it has none, or an error."""
        self._callers = callers
        self._servers = callers.servers
        self._caller = caller
        self._lines = lines
        self._queues = queues
        self._bells: dict[bytes, str] = {}  # key -> line
        self._places: list[_Place] = []
        self._name = ""
        self._generation = -1
        self._wakeup = Wakeup()

    def sleep(
        self, seconds: float, *, exact: bool, then: Call | None = None, without: Collection[str] = frozenset()
    ) -> bool:
        """Sleep at most *seconds*; *exact*: to the millisecond, else somewhat longer. *Then* make this call.

        *Without*: lines in a cluster whose servers are not to be asked. Returns whether to look at the queues: the bell
        rang, or nobody can tell. Raises ``BackendError``.
        """
        until = time.monotonic() + seconds
        self.rang, self.heard = [], None
        self._find_bells()
        asleep: dict[str, Wire] = {}
        try:
            places = [place for place in self._places if place.line not in without]
            is_troubled = not places or not self._fall_asleep(places, asleep, seconds + (_COARSE if exact else 0), then)
            if is_troubled:
                until = min(time.monotonic() + _TROUBLED, until)
            answered = self._wait(asleep.values(), until if exact or is_troubled else until + _COARSE)
            is_to_look = self._wake(places, asleep, answered, then)
        except BaseException:
            for wire in asleep.values():
                wire.close()
            raise
        if is_troubled:
            self._servers.suspect(None)
        return is_to_look or is_troubled

    def pause(self, until: float) -> None:
        """Sleep here, without a bell, until then or until a nudge."""
        self._wait((), until)

    def can_call(self, line: str) -> bool:
        """Whether a call for this line can be sent along: it is the only one whose bell is waited for."""
        self._find_bells()
        return list(self._bells.values()) == [line] and not self._servers.is_cluster

    def nudge(self) -> None:
        """From any thread: end the sleep, if there is one."""
        self._wakeup.notify()

    def ring(self, line: str) -> None:
        """Wake somebody else who sleeps there."""
        self._leave_marker(self._caller, line, self._bell(line), 0)

    def close(self) -> None:
        """Close all connections and the ear; they open again when they are needed."""
        for place in self._places:
            place.caller.close()
        self._wakeup.close()

    def __del__(self) -> None:
        if self._wakeup.is_open:
            self.close()

    # --- how ---

    def _deadline(self) -> float:
        return self._servers.one_try(time.monotonic() + self._servers.timeout)

    def _bell(self, line: str) -> bytes:
        return keys.hint(keys.base(self._callers.prefix, line)).encode()

    def _wakeup_key(self, line: str) -> bytes:
        return keys.wakeup(keys.base(self._callers.prefix, line), self._name).encode()

    def _find_bells(self) -> None:
        """Those of all lines that are known by now: there may be more than last time, and there are never fewer."""
        if self._generation != forks.generation:  # a child is not to be woken in its parent's place
            self._generation, self._name = forks.generation, os.urandom(_NAME_SIZE).hex()
            self._bells.clear()
        lines = [line for queue in self._queues for line in self._lines.of(queue)]
        if len(lines) == len(self._bells):
            return
        self._bells = {self._bell(line): line for line in lines}
        if self._servers.is_cluster:
            callers = {place.line: place.caller for place in self._places}
            self._places = [
                _Place(callers.get(line) or self._callers.own(), line, (bell,), self._wakeup_key(line))
                for bell, line in self._bells.items()
            ]
        else:
            self._places = [_Place(self._caller, lines[0], tuple(self._bells), self._wakeup_key(lines[0]))]

    def _fall_asleep(
        self, places: Sequence[_Place], asleep: dict[str, Wire], seconds: float, then: Call | None
    ) -> bool:
        """Returns whether it went well everywhere: elsewhere, looking at the queues will tell what it is."""
        deadline = self._deadline()
        went_well = True
        for place in places:
            try:
                wire = place.caller.wire(place.line, deadline)
                asleep[place.line] = wire
                packet = pack(("BZPOPMIN", *place.bells, place.wakeup, f"{max(seconds, _SHORTEST):.3f}"))
                if then is None:
                    wire.send(packet, deadline, replies=1)
                else:
                    wire.send(packet + place.caller.packed(then, wire), deadline, replies=2)
            except (*FAILURES, hiredis.ReplyError, BackendError) as exc:
                self._went_wrong(asleep.pop(place.line, None), exc)
                went_well = False
        return went_well

    def _wait(self, asleep: Iterable[Wire], until: float) -> set[int]:
        """Wait for an answer, a nudge or the end of time. Returns the file numbers of what answered."""
        ear = self._wakeup.open()
        poll = select.poll()
        poll.register(ear, select.POLLIN)
        for wire in asleep:
            poll.register(wire.sock, select.POLLIN)
        stirred = {number for number, _ in poll.poll(max(0.0, (until - time.monotonic()) * 1000))}
        if ear in stirred:
            self._wakeup.drain()
        return stirred

    def _wake(self, places: Sequence[_Place], asleep: dict[str, Wire], answered: set[int], then: Call | None) -> bool:
        """End what is left of the sleep, and hear whether a bell rang in the meantime, or nobody can tell."""
        is_to_look = False
        for place in places:
            wire = asleep.get(place.line)
            if wire is None:
                continue
            if wire.sock.fileno() not in answered and not self._end(place):
                wire.close()
                self._servers.suspect(None)  # another may have taken its place
                continue
            try:
                popped = wire.read(self._deadline())
                if popped is not None and popped[0] != place.wakeup:
                    self.rang.append(self._bells[popped[0]])
                    is_to_look = True
                if then is not None:
                    with contextlib.suppress(hiredis.ReplyError):  # made again, it will tell what is wrong
                        self.heard = wire.read(self._deadline())
            except (*FAILURES, hiredis.ReplyError) as exc:
                self._went_wrong(wire, exc)
                self._servers.suspect(None)
                self._wait((), time.monotonic() + _TROUBLED)
                is_to_look = True
        return is_to_look

    def _went_wrong(self, wire: Wire | None, exc: Exception) -> None:
        """Raises what looking at the queues might not tell: ``BackendError``."""
        if wire is not None:
            wire.close()
        if isinstance(exc, hiredis.ReplyError) and code_of(exc) not in _HARMLESS:
            raise explain(exc, "the server", self._servers.timeout) from exc
        if isinstance(exc, (TimeoutError, BackendTimeout)) and len(self._places) == 1:
            self._servers.suspect(None)  # another may have taken its place
            raise explain(exc, "the server", self._servers.timeout) from exc

    def _end(self, place: _Place) -> bool:
        """Whether the server let it go. Where it does not in time, the connection has to be closed."""
        with self._callers.borrowed() as caller:
            return self._leave_marker(caller, place.line, place.wakeup, _WAKEUP_LASTS)

    def _leave_marker(self, caller: Caller, line: str, key: bytes, lasts: int) -> bool:
        deadline = min(time.monotonic() + _RINGS_WITHIN, self._deadline())
        with contextlib.suppress(*FAILURES, hiredis.ReplyError, BackendError):
            wire = caller.wire(line, deadline)
            jobs = keys.jobs(keys.base(self._callers.prefix, line))
            wire.ask(pack(("EVAL", script("ring", before_7=wire.is_before_7).text, 2, key, jobs, lasts)), deadline)
            return True
        return False
