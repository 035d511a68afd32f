"""The keeper: a process beside the children that does for their jobs what a child cannot do itself any more.

It also hears what is said to all workers of the connection, and passes it on to its supervisor.

It touches the leases of a child that is stuck (one call into C may keep an interpreter to itself for minutes), and
settles those of a child that died: who ran is a crash, who waited was never begun. It knows of both from the
children's ledgers, files in one folder: ``<pid>.held`` while a child lives, ``<pid>.dead.<how>`` once it is dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from multiq.backend import Abandon, Ack, GiveBack, Lease, Touch
from multiq.control import Control
from multiq.errors import BackendError, MultiqError
from multiq.events import JobCrashed
from multiq.roll_call import Answering

from .ledger import ACKED, WAITING, LedgerReader
from .limits import Limits
from .runner import Runner

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from multiq.app import App
    from multiq.backend import Consumer, Verdict

    from .board import WorkerRow
    from .health import HealthFile
    from .ledger import Entry
    from .serving import Server
    from .vitals import Vitals

_log = logging.getLogger("multiq.keeper")

TIMED_OUT = "timeout"
"""How a child died that was killed for a job over its time limit."""
CUT_SHORT = "asked to"
"""How a child ended that was told to end now."""

_LOOK = 0.25  # seconds: a lease of the shortest ttr, a second, is not lost in between
_SLACK = 0.1  # of a ttr: a child is not stuck because it touches a little late
_TOUCH_SHARE = 1 / 3
_ASK_EVERY = 5.0  # seconds
_ANSWER_EVERY = 1.0  # seconds, while somebody looks at the workers
_LAST_EVENTS = 2.0  # seconds that subscribers which are coroutines get at the end
_TRY_AGAIN = 0.2  # seconds, when the backend was not there


class Keeper:
    """Runs until the supervisor is gone and all children's jobs are settled, *patience* seconds more at most."""

    def __init__(
        self,
        app: App,
        folder: Path,
        bell: socket.socket,
        patience: float,
        *,
        force: bool,
        row: WorkerRow,
        vitals: Vitals,
        health_file: HealthFile | None,
        server: Server | None,
    ) -> None:
        self._folder = folder
        self._bell = bell
        self._supervisor = os.getppid()
        self._patience = patience
        self._events = app.events
        self._backend = app.backend
        self._can_settle = bool(app.backend.capabilities.portable_leases)  # else a child's leases end with the child
        self._runner = Runner(app, Limits(0.0, ()))
        self._consumer: Consumer | None = None
        self._living: dict[Path, LedgerReader] = {}
        self._touched: dict[tuple[Path, str], float] = {}  # a held lease by its token and id -> when
        self._lost: set[tuple[Path, str]] = set()
        self._control = Control(app.backend)
        self._listens_to_down = not force
        self._is_down: bool | None = None
        self._last_restart: str | None = ""
        self._ask_at = 0.0
        self._row = row
        self._vitals = vitals
        self._answering = Answering(app.backend)
        self._answer_at = 0.0
        self._health_file = health_file
        self._server = server

    def run(self) -> int:
        """The process's work. Returns its exit code."""
        kill_at = float("inf")
        while True:
            if kill_at == float("inf") and not self._supervisor_lives():
                kill_at = time.monotonic() + self._patience
                if self._server is not None:
                    self._server.close()  # after a roll, its address is for the next one
            self._hand_on()
            if self._can_settle:
                self._touch_for_the_stuck()
            if kill_at == float("inf"):
                self._listen(time.monotonic())
            if kill_at < float("inf"):
                self._bury_orphans(killing=time.monotonic() >= kill_at)
                if not any(self._folder.iterdir()):
                    shutil.rmtree(self._folder, ignore_errors=True)
                    self._events.finish(_LAST_EVENTS)
                    return 0
                time.sleep(_LOOK)

    def _listen(self, now: float) -> None:
        """Heed what is said to all workers, and tell those who look at them of this one."""
        is_time = now >= self._ask_at
        with contextlib.suppress(MultiqError):  # the children tell of it
            if is_time:
                self._ask_at = now + _ASK_EVERY
                said, is_down = self._control.hear(), self._listens_to_down and self._control.is_down()
                self._row.contact = time.monotonic()
                self._pass_on(said.last_restart, is_down=is_down)
                if said.is_roll_called:
                    self._answering.look()
            if now >= self._answer_at and not self._answering.is_over:
                self._answer_at = now + _ANSWER_EVERY
                self._answering.answer(self._vitals.answer())
        if is_time and self._health_file is not None:
            self._health_file.write(self._vitals.report())

    def _pass_on(self, last_restart: str | None, *, is_down: bool) -> None:
        """Tell the supervisor, by signals, what the workers of this connection are told."""
        if os.getppid() != self._supervisor:
            return  # it has died meanwhile, and whoever has adopted this process is not to be told
        supervisor = self._supervisor
        if is_down != self._is_down:
            if is_down or self._is_down:
                _log.warning("the connection is %s", "down: no more jobs are taken" if is_down else "up again")
                os.kill(supervisor, signal.SIGUSR2 if is_down else signal.SIGCONT)
            self._is_down = is_down
            self._row.is_down = is_down
        if last_restart != self._last_restart:
            if self._last_restart != "" and last_restart is not None:
                _log.warning("all workers of this connection are to restart: this one ends")
                os.kill(supervisor, signal.SIGTERM)
            self._last_restart = last_restart

    def _supervisor_lives(self) -> bool:
        """Wait for its bell. False: it is gone."""
        ready, _, _ = select.select([self._bell], [], [], _LOOK)
        return not ready or bool(self._bell.recv(64))

    # --- the dead ---

    def _hand_on(self) -> None:
        """Settle what dead children held. While the backend is away, their ledgers stay for the next time."""
        for path in sorted(self._folder.glob("*.dead.*")):
            with contextlib.closing(LedgerReader(path)) as reader:
                entries = reader.entries()
            _, _, how = path.name.split(".", 2)
            if not self._can_settle or not entries or self._settle(path, how, entries):
                path.unlink()

    def _settle(self, path: Path, how: str, entries: list[Entry]) -> bool:
        ends_at = path.stat().st_mtime + max(entry.held.ttr for entry in entries)
        try:
            verdicts = [self._verdict(entry, how) for entry in entries]
            lost = self._settler().settle(verdicts)
        except MultiqError as exc:
            _log.warning("the jobs of a dead worker process cannot be handed on yet: %s", exc)
            time.sleep(_TRY_AGAIN)
            return time.time() > ends_at  # the leases have ended by themselves
        for verdict, error in zip(verdicts, lost, strict=True):
            if isinstance(verdict, Abandon) and error is None:
                lease = verdict.lease
                self._events.emit(JobCrashed(queue=lease.queue, job_id=lease.id, reason=verdict.reason or how))
        return True

    def _verdict(self, entry: Entry, how: str) -> Verdict:
        lease = _lease(entry)
        if entry.mark == ACKED:
            return Ack(lease)
        if entry.mark == WAITING or how == CUT_SHORT:
            return GiveBack(lease)
        if how != TIMED_OUT:
            return Abandon(lease, f"its worker process died: {how}")
        if entry.is_running and entry.kill_at > time.monotonic():
            return GiveBack(lease)  # a neighbour of the one that was over its limit
        return self._timed_out(lease)

    def _timed_out(self, lease: Lease) -> Verdict:
        """What its task's policy says of a job that did not end in time."""
        try:
            record = self._backend.peek(lease.queue, lease.id)
        except BackendError:
            raise
        except MultiqError:
            return Abandon(lease)  # it is gone: whatever is said of it is refused
        return self._runner.timed_out(
            Lease(
                queue=lease.queue,
                id=lease.id,
                token=lease.token,
                body=record.body,
                priority=record.priority,
                ttr=record.ttr,
                attempt=record.attempt or 1,
                crashes=record.crashes or 0,
                kicks=record.kicks or 0,
                age=record.age or 0.0,
            )
        )

    # --- the stuck ---

    def _touch_for_the_stuck(self) -> None:
        now = time.monotonic()
        for path, reader in self._ledgers():
            if reader.next_touch > now or _is_stopped(path):
                continue
            due = [entry for entry in reader.entries() if self._is_due(path, entry, reader.next_touch, now)]
            if due:
                self._touch(path, due, now)

    def _is_due(self, path: Path, entry: Entry, next_touch: float, now: float) -> bool:
        key = path, entry.held.token + entry.held.id
        if entry.mark < 0 or key in self._lost:
            return False
        late_from = next_touch + _SLACK * entry.held.ttr
        return now >= max(late_from, self._touched.get(key, 0.0) + _TOUCH_SHARE * entry.held.ttr)

    def _touch(self, path: Path, entries: list[Entry], now: float) -> None:
        try:
            lost = self._settler().settle([Touch(_lease(entry)) for entry in entries])
        except MultiqError as exc:
            _log.warning("the leases of a stuck worker process cannot be touched: %s", exc)
            return
        for entry, error in zip(entries, lost, strict=True):
            key = path, entry.held.token + entry.held.id
            self._touched[key] = now
            if error is not None:
                self._lost.add(key)  # it was settled, or is over: nothing is to be kept alive

    def _ledgers(self) -> Iterator[tuple[Path, LedgerReader]]:
        """The living children's, those of the dead forgotten."""
        paths = set(self._folder.glob("*.held"))
        for path in self._living.keys() - paths:
            self._living.pop(path).close()
            self._touched = {key: at for key, at in self._touched.items() if key[0] != path}
            self._lost = {key for key in self._lost if key[0] != path}
        for path in paths:
            if path not in self._living:
                try:
                    self._living[path] = LedgerReader(path)
                except (OSError, ValueError):  # just made, or just gone
                    continue
            yield path, self._living[path]

    # --- the orphans ---

    def _bury_orphans(self, *, killing: bool) -> None:
        """The supervisor is gone: nobody else notices when a child ends, or does not."""
        for path in self._folder.glob("*.held"):
            pid = int(path.name.partition(".")[0])
            try:
                os.kill(pid, signal.SIGKILL if killing else 0)
            except ProcessLookupError:
                path.rename(path.with_name(f"{pid}.dead.without a supervisor"))

    def _settler(self) -> Consumer:
        """Reserves nothing: it has leases of others to settle."""
        if self._consumer is None:
            self._consumer = self._backend.consumer(("default",))
        return self._consumer


def _lease(entry: Entry) -> Lease:
    held = entry.held
    return Lease(held.queue, held.id, held.token, b"", 0, held.ttr, 1, 0, 0, 0.0)


def _is_stopped(path: Path) -> bool:
    """Whether somebody has stopped the child (SIGSTOP, a debugger): its jobs do not go on, so they are not kept."""
    try:
        stat = Path("/proc", path.name.partition(".")[0], "stat").read_text()
    except OSError:  # no such process, or no such file system
        return False
    return stat.rpartition(")")[2].split()[0] in {"T", "t"}
