"""Several worker processes under one: started, replaced when they die, told to stop.

Children are forked: the app with its tasks is there already, whatever way it was made. The supervisor opens no
connection and starts no thread, so there is nothing that a fork could copy half-done.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from .child import EXIT_CUT_SHORT, EXIT_OK
from .signals import SignalInbox

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("multiq.supervisor")

EXIT_CRASHED = 1

_HEALTHY = 5.0  # seconds: a child that lived so long did not die of its start
_FIRST_BRAKE = 0.1  # seconds before a child that died young is replaced, doubling...
_LONGEST_BRAKE = 30.0  # ...up to this
_LOOK = 0.5  # seconds between looks at the children, should a SIGCHLD not arrive
_OVERTIME = 5.0  # seconds beyond the grace after which a child that does not end is killed

FORWARDED = (signal.SIGUSR2, signal.SIGCONT)


class Slot:
    """One place for a child, with the history that the brake needs."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.started_at = 0.0
        self.start_at = 0.0
        self.early_deaths = 0


class Supervisor:
    """Keeps *processes* children running *work*, a function that returns the child's exit code.

    With *once*, a child that ends with 0 is through with its work and is not replaced.
    """

    def __init__(self, work: Callable[[int], int], processes: int, *, grace: float, once: bool) -> None:
        self._work = work
        self._slots = [Slot() for _ in range(processes)]
        self._grace = grace
        self._once = once
        self._stops = 0
        self._kill_at = float("inf")
        self._codes: list[int] = []
        self._inbox = SignalInbox([signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, *FORWARDED])

    def run(self) -> int:
        """Returns 0 when all children ended well, 130 when jobs were cut short, 1 when a last child crashed."""
        with self._inbox:
            while True:
                self._reap()
                self._fill()
                if not any(slot.pid for slot in self._slots) and (self._stops or self._is_through()):
                    break
                if time.monotonic() >= self._kill_at:
                    self._signal_all(signal.SIGKILL)
                for number in self._inbox.wait(self._nap()):
                    self._heed(number)
        return max(self._codes, key=(EXIT_OK, EXIT_CRASHED, EXIT_CUT_SHORT).index, default=EXIT_OK)

    def stop(self) -> None:
        """From any thread: as SIGTERM does; a second time: now."""
        self._inbox.put(signal.SIGTERM)

    def _heed(self, number: signal.Signals) -> None:
        if number in {signal.SIGTERM, signal.SIGINT}:
            self._stops += 1
            self._kill_at = time.monotonic() + _OVERTIME + (self._grace if self._stops == 1 else 0)
            self._signal_all(signal.SIGTERM)
        elif number in FORWARDED:
            self._signal_all(number)

    def _fill(self) -> None:
        """Start what should run and does not."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.pid is None and not self._stops and slot.start_at <= now:
                slot.started_at = now
                slot.pid = self._fork()

    def _fork(self) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # until the child has an inbox of its own, what is sent to it would end up in ours
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, *FORWARDED})
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return pid
        signal.set_wakeup_fd(-1)
        # the terminal sends Ctrl-C to the whole group; the supervisor passes it on once, as SIGTERM
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = EXIT_CRASHED
        try:
            code = self._work(parent)
        except BaseException:  # noqa: BLE001 - reported, and told by the exit code
            _log.exception("a worker process crashed")
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)  # past the parent's own cleanup, which is not ours to run

    def _reap(self) -> None:
        """Note which children ended, and when their places may be filled again."""
        for slot in self._slots:
            if slot.pid is None:
                continue
            pid, status = os.waitpid(slot.pid, os.WNOHANG)
            if pid:
                slot.pid = None
                self._note_end(slot, pid, os.waitstatus_to_exitcode(status))

    def _note_end(self, slot: Slot, pid: int, code: int) -> None:
        if self._stops or (self._once and code == EXIT_OK):
            slot.start_at = float("inf")
            self._codes.append(code if code in {EXIT_OK, EXIT_CUT_SHORT} else EXIT_CRASHED)
            return
        died_young = time.monotonic() - slot.started_at < _HEALTHY
        slot.early_deaths = slot.early_deaths + 1 if died_young else 0
        brake = min(_LONGEST_BRAKE, _FIRST_BRAKE * 2 ** (slot.early_deaths - 1)) if died_young else 0.0
        slot.start_at = time.monotonic() + brake
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        _log.warning("worker process %d %s; another one starts in %.1f s", pid, how, brake)

    def _is_through(self) -> bool:
        return all(slot.start_at == float("inf") for slot in self._slots)

    def _nap(self) -> float:
        now = time.monotonic()
        starts = [slot.start_at - now for slot in self._slots if slot.pid is None]
        return max(0.0, min([_LOOK, *starts]))

    def _signal_all(self, number: signal.Signals) -> None:
        for slot in self._slots:
            if slot.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(slot.pid, number)
