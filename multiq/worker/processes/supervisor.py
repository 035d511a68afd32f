"""Several worker processes under one: started, replaced when they die, killed when they must, rolled, told to stop.

Children are forked: the app with its tasks is there already, whatever way it was made. The supervisor opens no
connection and starts no thread, so there is nothing that a fork could copy half-done; what has to be said to the
backend about a child's jobs is said by the keeper, a process of its own.

A roll (SIGHUP) begins the same program anew in the same process, with whatever code is there now. The children of
before do not notice until the new ones run: then they are told to stop, as if their supervisor had died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from multiq.formatting import many
from multiq.worker.execution.recycling import EXIT_MEMORY, EXIT_RECYCLED

from . import fork
from .inflight import DEAD, NEVER, WAITING
from .process import EXIT_CUT_SHORT, EXIT_OK, EXIT_OVERDUE, EXIT_STUCK
from .reload import HELD_BACK, Before, is_child, noted, rolled_environment, taking_over
from .signals import SignalInbox
from .slot import Post, Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import NoReturn

    from .inflight import Table
    from .shared_state import Board

_log = logging.getLogger("multiq.supervisor")

EXIT_CRASHED = 1

_HEALTHY = 5.0  # seconds: a child that lived so long did not die of its start
_FIRST_BRAKE = 0.1  # seconds before a child that died young is replaced, doubling...
_LONGEST_BRAKE = 30.0  # ...up to this,
_WORKING_BRAKE = 1.0  # or to this if it got as far as a job: then the job is to blame, and max_crashes ends that
_LOOK = 0.5  # seconds between looks at the children, should a SIGCHLD not arrive
OVERTIME = 5.0  # seconds beyond the grace after which a child that does not end is killed
_LAST_WORDS = 5.0  # seconds that the keeper has to hand on the jobs of children that died at the very end

_FORK_BRAKE = 1.0  # seconds until a fork that the system has refused is tried again
_KEEPER_LIMIT = 60.0  # seconds without a round: a subscriber of the user's hangs, and dead children's jobs wait
_TABLE_BRAKE = 0.25  # seconds until it is looked whether a table is free
_ASLEEP = 1.5  # seconds without a round: this process was stopped, or starved, and so were its children, perhaps
_TIME_TO_TELL = 1.0  # seconds after that in which children can tell their jobs before anything is killed

FORWARDED = (signal.SIGUSR2, signal.SIGCONT)
HEEDED = tuple(HELD_BACK)
NOW = signal.SIGUSR1
"""What the supervisor says to children that were told to stop already. Not SIGTERM: service managers send that one to
every process of the group, so that children get it twice, and it must not count twice."""


_REPLACED = {
    EXIT_OVERDUE: "had a job that did not heed its time limit",
    EXIT_STUCK: "had an event loop that was held for longer than any job on it may run",
    EXIT_MEMORY: "used more memory than it may",
    EXIT_RECYCLED: "has worked for long enough",
}


_NAMED = frozenset(map(int, signal.Signals))
_ENDED_WELL = frozenset({EXIT_OK, EXIT_MEMORY, EXIT_RECYCLED})


class Supervisor:
    """Keeps a child for each place of *board* running *work*, and one process *keep*; both return exit codes.

    *work* gets its post, *keep* the socket that tells it to look at the tables, and the pipe
    that ends when the children are to end. With *once*, a child that ends with 0
    is through with its work and is not replaced. *check* is a command that ends with 0 if the program would start:
    without that, a roll does not begin.
    """

    def __init__(
        self,
        work: Callable[[Post], int],
        keep: Callable[[socket.socket, int], int],
        board: Board,
        *,
        grace: float,
        once: bool,
        check: Sequence[str] | None = None,
        reaps_all: bool = False,
    ) -> None:
        self._work = work
        self._keep = keep
        self._tables = board
        self._board = board.worker
        self._slots = [Slot(place, row) for place, row in enumerate(board.children)]
        self._grace = grace
        self._once = once
        self._check = check
        self._reaps_all = reaps_all
        self._checking: subprocess.Popen[bytes] | None = None
        self._is_check_stale = False
        self._stops = 0
        self._was_down = 0.0
        self._restarts = 0.0
        self._round_at = NEVER
        self._kill_none_before = 0.0
        self._kill_at = NEVER
        self._are_keepers_told = False
        self._codes: list[int] = []
        self._inbox = SignalInbox(HEEDED)
        self._had_terminal = _has_terminal()
        self._is_waiting_for_table = False
        self._keeper: int | None = None
        self._keeper_at = 0.0

    def run(self) -> int:
        """Returns 0 when all children ended well, 130 when jobs were cut short, 1 when a last child crashed."""
        self._before = Before.take()  # told to stop just when the new ones start
        self._board.is_paused = self._before.is_paused
        self._lifeline, self._life = os.pipe()
        self._bell, self._keepers_bell = socket.socketpair()
        self._bell.setblocking(False)
        with taking_over(), self._inbox:
            for number in noted():
                self._inbox.put(number)
            while True:
                self._note_time()
                self._reap()
                self._heed_keeper()
                self._fill()
                if self._before.is_gone() and self._is_over():
                    break
                self._roll_if_it_would_start()
                self._kill_the_late()
                for number in self._inbox.wait(self._nap()):
                    self._heed(number)
            self._end_check()
            if self._keeper is None and any(table.state == DEAD for table in self._tables.tables):
                self._start_keeper()  # it died just before what a last child held was handed on
            self._end_keeper()
        if {EXIT_CUT_SHORT, -signal.SIGKILL} & set(self._before.codes):
            self._codes.append(EXIT_CUT_SHORT)
        return max(self._codes, key=(EXIT_OK, EXIT_CRASHED, EXIT_CUT_SHORT).index, default=EXIT_OK)

    def stop(self) -> None:
        """From any thread: as SIGTERM does; a second time: now."""
        self._inbox.put(signal.SIGTERM)

    def _heed(self, number: signal.Signals) -> None:
        if number in {signal.SIGTERM, signal.SIGINT}:
            self._stops += 1
            self._board.stops = self._stops
            if self._stops == 1:
                tell_of_waiting(sum(entry.is_running for slot in self._slots for entry in slot.entries()), self._grace)
            self._kill_at = time.monotonic() + OVERTIME + (self._grace if self._stops == 1 else 0)
            self._signal_all(signal.SIGTERM if self._stops == 1 else NOW)
        elif number in FORWARDED:
            self._board.is_paused = number == signal.SIGUSR2
            self._signal_all(number)  # to look at the board
        elif number == signal.SIGQUIT:
            self._tell_what_runs()
            self._signal_all(number)
        elif number == signal.SIGHUP and self._had_terminal and not _has_terminal():
            self._heed(signal.SIGTERM)  # it was closed
        elif number == signal.SIGHUP and not self._stops:
            self._begin_roll()

    def _note_time(self) -> None:
        """A group that was stopped goes on with limits that are over: jobs are told before any process is killed."""
        now = time.monotonic()
        if now - self._round_at > _ASLEEP:
            self._kill_none_before = now + _TIME_TO_TELL
        self._round_at = self._board.supervisor_beat = now

    def _heed_keeper(self) -> None:
        """The keeper writes on the board what all workers of the connection are told."""
        if self._board.is_down != self._was_down:
            self._was_down = self._board.is_down
            self._signal_all(signal.SIGCONT)  # to look at the board
        if self._board.restarts > self._restarts:
            self._restarts = self._board.restarts
            if not self._stops:
                self._heed(signal.SIGTERM)

    def _tell_what_runs(self) -> None:
        """A line for each job; the children themselves show where in its code each one is."""
        now = time.monotonic()
        for slot in self._slots:
            running = [entry for entry in slot.entries() if entry.is_running]
            _log.warning("worker process %s runs %s", slot.pid, many(len(running), "job") if running else "no job")
            for entry in running:
                _log.warning("  [%s] %s for %.1f s", entry.held.queue, entry.held.id, now - entry.mark)

    # --- rolling ---

    def _begin_roll(self) -> None:
        if self._check is None:
            self._roll()
        elif self._checking is None:
            self._is_check_stale = False
            try:
                self._checking = subprocess.Popen(self._check, stdin=subprocess.DEVNULL)  # noqa: S603 - our own command
            except OSError:  # a deployment is replacing the interpreter, or the system has no room for a process
                _log.exception("the new code cannot be tried: the old one goes on")
        else:
            self._is_check_stale = True  # it may have read what has changed since

    def _roll_if_it_would_start(self) -> None:
        if self._checking is None or self._checking.poll() is None:
            return
        code, self._checking = self._checking.returncode, None
        if self._is_check_stale and not self._stops:
            self._begin_roll()
        elif code == 0 and not self._stops:
            self._roll()
        elif code:
            _log.error("the new code does not start (exit code %d): the old one goes on", code)

    def _end_check(self) -> None:
        """The worker ends: a trial that still runs is of no use."""
        if self._checking is not None:
            self._checking.kill()
            self._checking.wait()
            self._checking = None

    def _roll(self) -> None:
        """Become the same program, begun anew. Signals wait until it can take them."""
        _log.warning("rolling: the same command is begun anew, with the code that is there now")
        fork.flush()
        children = [*self._before.children, *(slot.pid for slot in self._slots if slot.pid is not None)]
        keepers = [*self._before.keepers, *([] if self._keeper is None else [self._keeper])]
        os.set_inheritable(self._life, True)
        environment = rolled_environment(self._life, children, keepers, is_paused=bool(self._board.is_paused))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
        try:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - ourselves
        except OSError:
            _log.exception("the program cannot be begun anew: the old one goes on")
            os.set_inheritable(self._life, False)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # --- starting ---

    def _fill(self) -> None:
        """Start what should run and does not."""
        now = time.monotonic()
        if self._keeper is None and self._keeper_at <= now:
            self._keeper_at = now + _HEALTHY
            self._start_keeper()
        for slot in self._slots:
            if slot.pid is None and not self._stops and slot.start_at <= now:
                slot.started_at = now
                slot.start_at = now + _FORK_BRAKE  # should it fail
                with self._trying_again():
                    self._start(slot)

    def _start_keeper(self) -> None:
        self._board.keeper_beat = time.monotonic()
        with self._trying_again():
            self._keeper = self._fork(lambda: self._keep(self._keepers_bell, self._lifeline), is_child=False)

    def _start(self, slot: Slot) -> None:
        table = self._tables.free_table()
        if table is None:  # the keeper cannot settle what dead children held; it gives up when their leases are over
            if not self._is_waiting_for_table:
                _log.error("no process is started until the jobs of those that died are handed on")
            self._is_waiting_for_table = True
            slot.start_at = slot.started_at + _TABLE_BRAKE
            return
        self._is_waiting_for_table = False
        table.give()
        slot.row.beat = time.monotonic()
        slot.row.table = table.number

        def work() -> int:
            table.pid = os.getpid()
            return self._work(Post(self._lifeline, table, slot.place))

        try:
            slot.fill(self._fork(work, is_child=True, table=table), table)
        except OSError:
            table.free()
            raise

    @contextlib.contextmanager
    def _trying_again(self) -> Iterator[None]:
        """A fork that the system refuses (too many processes, no memory) is tried again."""
        try:
            yield
        except OSError as exc:
            _log.error("a process cannot be forked: %s; another try in %g s", exc, _FORK_BRAKE)

    def _fork(self, work: Callable[[], int], *, is_child: bool, table: Table | None = None) -> int:
        fork.flush()
        # until the child has an inbox of its own, what is sent to it would end up in ours
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, NOW, *FORWARDED})
        pid = -1
        try:
            pid = fork.fork()
        finally:
            if pid:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pid:
            return pid
        return self._be(work, table, is_child=is_child)

    def _be(self, work: Callable[[], int], table: Table | None, *, is_child: bool) -> NoReturn:
        """In the new process: whatever happens, nothing gets back from here into the supervisor's own code."""
        code = EXIT_CRASHED
        try:
            self._let_go_of_supervisor(is_child=is_child)
            code = work()
        except BaseException:  # noqa: BLE001 - reported, and told by the exit code
            _log.exception("a worker process crashed")
            table = None
        finally:
            fork.flush()
            if table is not None:
                table.leave(code)
            os._exit(code)  # past the parent's own cleanup, which is not ours to run

    def _let_go_of_supervisor(self, *, is_child: bool) -> None:
        # the handlers of our inbox stay, and do nothing in a child: the terminal sends Ctrl-C to the whole group, and
        # the supervisor passes it on once, as SIGTERM. Programs that jobs start would inherit that it is ignored
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._life)  # the supervisor's must be the only one: its end tells the others that it is gone
        self._bell.close()
        if is_child:
            self._keepers_bell.close()

    # --- ending ---

    def _reap(self) -> None:
        """Note which processes ended, and when their places may be filled again."""
        for slot in self._slots:
            if slot.pid is not None:
                pid, status = os.waitpid(slot.pid, os.WNOHANG)
                if pid:
                    self._note_end(slot, pid, os.waitstatus_to_exitcode(status))
        if self._keeper is not None and os.waitpid(self._keeper, os.WNOHANG)[0]:
            self._keeper = None
            _log.error("the keeper died; another one starts")
        if self._reaps_all:
            self._reap_orphans()

    def _reap_orphans(self) -> None:
        """What the processes of jobs have left behind is a child of process 1."""
        ours = {self._keeper, *(slot.pid for slot in self._slots), *self._before.pids}
        if self._checking is not None:
            ours.add(self._checking.pid)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in ours:
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _note_end(self, slot: Slot, pid: int, status: int) -> None:
        table, now = slot.table, time.monotonic()
        assert table is not None, "a child has a table as long as it lives"  # noqa: S101 - for the reader, and mypy
        left, has_held, was_late = table.left, table.has_held, slot.is_timed_out or table.left == EXIT_OVERDUE
        # what it took and never began counts for those that fill its place from now on
        slot.row.taken -= sum(entry.mark == WAITING for entry in slot.entries())
        # a job may have left SIGTERM to the system: then it is our stop that has ended its process
        is_cut = left is None and (slot.is_cut or bool(self._stops and status == -signal.SIGTERM))
        table.bury(status, now, is_late=slot.is_timed_out, is_cut=is_cut)
        self._leave_to_keeper(table)
        died_young = now - slot.started_at < _HEALTHY
        slot.forget()
        if self._stops or (self._once and left == EXIT_OK):
            slot.start_at = NEVER
            ended_well = left in _ENDED_WELL or was_late
            was_cut = is_cut or left == EXIT_CUT_SHORT
            self._codes.append(EXIT_OK if ended_well else EXIT_CUT_SHORT if was_cut else EXIT_CRASHED)
            return
        is_too_large = left == EXIT_MEMORY and not has_held
        if (was_late or left in _REPLACED) and not is_too_large:
            self._board.replaced += 1
            slot.early_deaths = slot.early_deaths + 1 if died_young and left == EXIT_MEMORY else 0
            slot.start_at = now + _brake(slot.early_deaths, _WORKING_BRAKE)
            why = EXIT_OVERDUE if was_late else left or 0
            level = logging.INFO if why == EXIT_RECYCLED else logging.WARNING
            _log.log(level, "worker process %d %s; another one starts", pid, _REPLACED[why])
            return
        self._board.crashed += 1
        slot.early_deaths = slot.early_deaths + 1 if died_young else 0
        # the first one may have been somebody's doing: its jobs wait
        longest = _WORKING_BRAKE if has_held else _LONGEST_BRAKE
        brake = _brake(slot.early_deaths, longest)
        slot.start_at = now + brake
        how = (
            "needs more memory than it may use before it has run any job"
            if is_too_large
            else describe_end(status, left)
        )
        _log.log(
            logging.ERROR if is_too_large else logging.WARNING,
            "worker process %d %s; another one starts in %.1f s",
            pid,
            how,
            brake,
        )

    def _leave_to_keeper(self, table: Table) -> None:
        """What a dead child held is settled by the keeper."""
        if not table.entries():
            table.free()
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it will look anyway
            self._bell.send(b"\0")

    def _kill_the_late(self) -> None:
        """Kill who does not end after the grace, and who cannot end a job that is over its time limit."""
        now = time.monotonic()
        if now >= self._kill_at:
            self._kill_at = now + _HEALTHY  # and again, should it be of no use
            for slot in self._slots:
                slot.is_cut = True
            self._kill_all()
            return
        if now < self._kill_none_before:
            return
        if self._keeper is not None and now - self._board.keeper_beat > _KEEPER_LIMIT:
            _log.error("the keeper has not gone round for %g s: it is killed", _KEEPER_LIMIT)
            self._board.keeper_beat = now
            os.kill(self._keeper, signal.SIGKILL)
        for slot in self._slots:
            if slot.pid is not None and slot.kill_at() <= now:
                slot.is_timed_out = True
                os.kill(slot.pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        """Kill the children. Those of before a roll are their own keeper's to kill at first, which knows then why."""
        if not self._are_keepers_told:
            self._are_keepers_told = True
            _signal(filter(is_child, self._before.keepers), NOW)
            if self._before.keepers:
                self._signal_slots(signal.SIGKILL)
                return
        self._signal_all(signal.SIGKILL)

    def _end_keeper(self) -> None:
        """Wait until it has handed on what the last children held."""
        self._bell.close()
        os.close(self._life)
        give_up_at = time.monotonic() + _LAST_WORDS
        while self._keeper is not None and not os.waitpid(self._keeper, os.WNOHANG)[0]:
            if time.monotonic() > give_up_at:
                os.kill(self._keeper, signal.SIGKILL)
                os.waitpid(self._keeper, 0)
                break
            time.sleep(0.01)
        self._keepers_bell.close()
        os.close(self._lifeline)

    # --- small things ---

    def _is_over(self) -> bool:
        """Whether nobody works any more, and nobody is to."""
        is_through = all(slot.start_at == NEVER for slot in self._slots)
        return not any(slot.pid for slot in self._slots) and bool(self._stops or is_through)

    def _nap(self) -> float:
        now = time.monotonic()
        starts = [slot.start_at - now for slot in self._slots if slot.pid is None]
        return max(0.0, min([_LOOK, self._kill_at - now, *starts]))

    def _signal_all(self, number: signal.Signals) -> None:
        self._signal_slots(number)
        if number in {NOW, signal.SIGKILL}:  # that they are to end, those of before a roll know already
            _signal(filter(is_child, self._before.children), number)

    def _signal_slots(self, number: signal.Signals) -> None:
        _signal([slot.pid for slot in self._slots if slot.pid is not None], number)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _brake(early_deaths: int, longest: float) -> float:
    """Seconds until a child is replaced that was, with those before it, the so manieth that ended young."""
    return min(longest, _FIRST_BRAKE * 2.0 ** min(early_deaths - 2, 20)) if early_deaths > 1 else 0.0


def tell_of_waiting(running: int, grace: float) -> None:
    """Say what a worker does that was told to stop while jobs run."""
    if running:
        what = "them" if running > 1 else "it"
        verb = "run" if running > 1 else "runs"
        _log.info(
            "stopping: waits for %s that %s, up to %.1f s; a second signal (Ctrl-C) gives %s back at once",
            many(running, "job"),
            verb,
            grace,
            what,
        )


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def describe_end(status: int, left: int | None) -> str:
    """How a child ended that did not end in order; *status* is its exit code or, less than 0, a signal."""
    if status < 0:
        return (
            f"was killed by {signal.Signals(-status).name}" if -status in _NAMED else f"was killed by signal {-status}"
        )
    return f"ended with code {status}" if left is not None else f"ended with code {status} in the middle of its work"
