"""Sleeping at the server until the bell rings (lua/include/bell.lua), time is up, or another thread says so.

The bell's marker is popped by BZPOPMIN and carries nothing, so that a lost reply loses no job. Redis looks at its
block timeouts ten times a second only: where that is too coarse, we wake ourselves by CLIENT UNBLOCK.

A call may be sent along. The server makes it in the moment in which the sleep ends, however that comes about, and both
answers arrive together: a round trip less until the job that woke us begins.
"""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING, Any

import hiredis

from multiq.ear import Ear
from multiq.errors import BackendError, BackendTimeout

from . import keys
from .failures import ELSEWHERE, FAILURES, PASSING, code_of, explain
from .wire import pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .caller import Call, Caller, Callers
    from .lines import Lines
    from .wire import Wire

_COARSE = 0.5  # seconds: what the server's own timeouts may be late by
_SHORTEST = 0.02  # seconds to ask the server to block for; 0 would be for ever
_RINGS_WITHIN = 1.0  # seconds that waking somebody else may take
_TROUBLED = 0.1  # seconds to sleep without a bell, where there is none to be had at the moment
_HARMLESS = PASSING | ELSEWHERE | {"MOVED", "ASK", "UNBLOCKED"}


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
        self._places: list[tuple[Caller, str, tuple[bytes, ...]]] = []
        self._ear = Ear()

    def sleep(self, seconds: float, *, exact: bool, then: Call | None = None) -> bool:
        """Sleep at most *seconds*; *exact*: to the millisecond, else somewhat longer. *Then* make this call.

        Returns whether to look at the queues: the bell rang, or nobody can tell. Raises ``BackendError``.
        """
        until = time.monotonic() + seconds
        asleep: list[Wire] = []
        self.rang, self.heard = [], None
        self._find_bells()
        try:
            self._fall_asleep(asleep, seconds + (_COARSE if exact else 0), then)
            answered = self._wait(asleep, until if exact else until + _COARSE)
            return self._wake(asleep, answered, then)
        except hiredis.ReplyError as exc:
            self._abandon(asleep)
            if code_of(exc) not in _HARMLESS:
                raise explain(exc, "the server", self._servers.timeout) from exc
        except (TimeoutError, BackendTimeout) as exc:
            self._abandon(asleep)
            self._servers.suspect(None)  # another may have taken its place
            raise explain(exc, "the server", self._servers.timeout) from exc
        except (*FAILURES, BackendError):
            self._abandon(asleep)  # looking at the queues will tell what it is
        except BaseException:
            self._abandon(asleep)
            raise
        self._servers.suspect(None)
        self._wait([], min(time.monotonic() + _TROUBLED, until))
        return True

    def can_call(self, line: str) -> bool:
        """Whether a call for this line can be sent along: it is the only one whose bell is waited for."""
        self._find_bells()
        return list(self._bells.values()) == [line] and not self._servers.is_cluster

    def nudge(self) -> None:
        """From any thread: end the sleep, if there is one."""
        self._ear.nudge()

    def ring(self, line: str) -> None:
        """Wake somebody else who sleeps there."""
        with contextlib.suppress(*FAILURES, hiredis.ReplyError, BackendError):
            deadline = time.monotonic() + _RINGS_WITHIN
            wire = self._caller.wire(line, deadline)
            wire.ask(pack(("ZADD", self._bell(line), 0, "1")), deadline)

    def close(self) -> None:
        """Close all connections and the ear; they open again when they are needed."""
        for caller, *_ in self._places:
            caller.close()
        self._ear.close()

    def __del__(self) -> None:
        if self._ear.is_open:
            self.close()

    # --- how ---

    def _deadline(self) -> float:
        return self._servers.one_try(time.monotonic() + self._servers.timeout)

    def _bell(self, line: str) -> bytes:
        return keys.hint(keys.base(self._callers.prefix, line)).encode()

    def _find_bells(self) -> None:
        """Those of all lines that are known by now: there may be more than last time, and there are never fewer."""
        lines = [line for queue in self._queues for line in self._lines.of(queue)]
        if len(lines) == len(self._bells):
            return
        self._bells = {self._bell(line): line for line in lines}
        if self._servers.is_cluster:
            callers = {line: caller for caller, line, _ in self._places}
            self._places = [
                (callers.get(line) or self._callers.own(), line, (bell,)) for bell, line in self._bells.items()
            ]
        else:
            self._places = [(self._caller, lines[0], tuple(self._bells))]

    def _fall_asleep(self, asleep: list[Wire], seconds: float, then: Call | None) -> None:
        deadline = self._deadline()
        for caller, line, bells in self._places:
            wire = caller.wire(line, deadline)
            asleep.append(wire)
            packet = pack(("BZPOPMIN", *bells, f"{max(seconds, _SHORTEST):.3f}"))
            if then is None:
                wire.send(packet, deadline, replies=1)
            else:
                wire.send(packet + caller.packed(then, wire), deadline, replies=2)

    def _wait(self, asleep: Sequence[Wire], until: float) -> set[int]:
        """Wait for an answer, a nudge or the end of time. Returns the file numbers of what answered."""
        ear = self._ear.open()
        poll = select.poll()
        poll.register(ear, select.POLLIN)
        for wire in asleep:
            poll.register(wire.sock, select.POLLIN)
        stirred = {number for number, _ in poll.poll(max(0.0, (until - time.monotonic()) * 1000))}
        if ear in stirred:
            self._ear.forget()
        return stirred

    def _wake(self, asleep: Sequence[Wire], answered: set[int], then: Call | None) -> bool:
        """End what is left of the sleep, and hear whether a bell rang in the meantime."""
        is_to_look = False
        for (_, line, _), wire in zip(self._places, asleep, strict=True):
            if wire.sock.fileno() not in answered and not self._unblock(line, wire):
                wire.close()
                continue
            popped = wire.read(self._deadline())
            if popped is not None:
                self.rang.append(self._bells[popped[0]])
                is_to_look = True
            if then is not None:
                with contextlib.suppress(hiredis.ReplyError):  # made again, it will tell what is wrong
                    self.heard = wire.read(self._deadline())
        return is_to_look

    def _unblock(self, line: str, wire: Wire) -> bool:
        """Whether the server let it go. It may not be allowed to: then the connection has to be closed."""
        if not wire.client_id:
            return False
        deadline = self._deadline()
        with self._callers.borrowed() as caller, contextlib.suppress(hiredis.ReplyError):
            caller.wire(line, deadline).ask(pack(("CLIENT", "UNBLOCK", wire.client_id)), deadline)
            return True
        return False

    def _abandon(self, asleep: Sequence[Wire]) -> None:
        for wire in asleep:
            wire.close()
