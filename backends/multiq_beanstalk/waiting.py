"""Waiting for a job, on a connection that holds none, until another thread says that it is enough.

A command that waits cannot be taken back, and nothing else is heard on its connection until it is answered. So a wait
that has to end early ends with its connection: what comes in that very moment goes back.
"""

from __future__ import annotations

import math
import select
import time
from typing import TYPE_CHECKING

from multiq.driverkit.wakeup import Wakeup

from .clock import now
from .errors import FAILURES, explain, refused
from .records import NOTHING_READY, Reserved

if TYPE_CHECKING:
    from .connection import Wire
    from .pool import Wires

_LONGEST = 60  # seconds that one command waits
_ABOUT = 0.2  # seconds that a wait may last longer, as the server counts whole ones


class Waiter:
    """The waits of one consumer. ``interrupt`` may come from any thread."""

    def __init__(self, wires: Wires, tubes: tuple[str, ...]) -> None:
        self._wires = wires
        self._tubes = tubes
        self._wakeup = Wakeup()
        self._interrupted = False
        self._spares: list[Wire] = []

    def wait(self, main: Wire | None, give_up_at: float) -> tuple[Wire, Reserved] | None:
        """The next job and the connection that it hangs on; on *main*, if that will do. Raises ``BackendError``."""
        ear = self._wakeup.open()
        has_failed = False
        while not self._interrupted and (left := give_up_at - time.monotonic()) > 0:
            deadline = self._wires.deadline()
            wire = self._wire(main, deadline)
            try:
                wire.catch_up(deadline)
                job = self._wait_on(wire, ear, left, give_up_at)
            except ConnectionError as exc:
                if has_failed:  # one that breaks is no news; one that breaks again is
                    raise explain(exc, self._wires.address, self._wires.timeout) from exc
                has_failed = True
            except FAILURES as exc:
                raise explain(exc, self._wires.address, self._wires.timeout) from exc
            else:
                if job is not None:
                    return wire, job
                if left < _ABOUT:
                    break
        return None

    def interrupt(self) -> None:
        """End the wait, or else the next one."""
        self._interrupted = True
        self._wakeup.notify()

    def forget(self) -> None:
        """An interruption until now was for a wait that is over."""
        self._interrupted = False
        self._wakeup.drain()

    def forget_wires(self) -> None:
        """In a forked child: they are the parent's."""
        self._spares = []

    def close(self) -> None:
        """Drop all connections."""
        for wire in self._spares:
            wire.close()
        self._spares = []
        self._wakeup.close()

    # --- how ---

    def _wire(self, main: Wire | None, deadline: float) -> Wire:
        """A connection that holds nothing, and watches all tubes."""
        if main is not None and len(self._tubes) == 1 and not main.held and not main.is_closed:
            return main
        self._spares = [wire for wire in self._spares if not wire.is_closed]
        for wire in self._spares:
            if not wire.held and wire.is_alive():
                return wire
        wire = self._wires.open(deadline, to_keep=True)
        try:
            packet, count = wire.watch(self._tubes)
            for line, _ in wire.ask(packet, count, deadline):
                if not line.startswith(b"WATCHING "):
                    raise refused(line, self._wires.address)
        except FAILURES as exc:
            raise explain(exc, self._wires.address, self._wires.timeout) from exc
        self._spares.append(wire)
        return wire

    def _wait_on(self, wire: Wire, ear: int, left: float, give_up_at: float) -> Reserved | None:
        """One command's wait. None: nobody came, or another thread has ended it."""
        seconds = min(math.floor(left + _ABOUT), _LONGEST)
        drop_at = give_up_at if seconds == 0 else math.inf  # the server waits for whole seconds
        asked_at, deadline = now(), time.monotonic() + max(1, seconds) + self._wires.timeout
        try:
            wire.send(b"reserve-with-timeout %d\r\n" % max(1, seconds), deadline)
            if not self._is_answered(wire, ear, min(drop_at, deadline)) and time.monotonic() < deadline:
                wire.drop()
                return None
            line, body = wire.read(deadline)
        except BaseException:
            wire.drop()
            raise
        if line.startswith(b"RESERVED "):
            return Reserved(line.split()[1], body, asked_at)
        if line not in NOTHING_READY:
            wire.close()
            raise refused(line, self._wires.address)
        return None

    def _is_answered(self, wire: Wire, ear: int, until: float) -> bool:
        """Sleep until the server answers. False: it has not, and time is up, or somebody interrupts."""
        poll = select.poll()
        poll.register(wire.sock, select.POLLIN)
        poll.register(ear, select.POLLIN)
        while True:
            left = until - time.monotonic()
            stirred = [number for number, _ in poll.poll(max(0.0, left * 1000))]
            if wire.sock.fileno() in stirred:
                return True
            self._wakeup.drain()
            if self._interrupted or left <= 0:
                return False
