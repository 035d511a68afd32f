"""The inbox of signals gets its signals beside many open files and other handlers in this process."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from multiq.worker.processes import fork, signal_handlers
from multiq.worker.processes.lifeline import Lifeline
from multiq.worker.processes.signal_inbox import SignalInbox

if TYPE_CHECKING:
    from collections.abc import Iterator

TAKEN = [signal.SIGTERM, signal.SIGUSR2]


@contextlib.contextmanager
def many_open_files() -> Iterator[None]:
    """Open so many files that the next file descriptor is above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while stack.enter_context(open(os.devnull)).fileno() < 1100:  # noqa: PTH123
            pass
        yield


def test_signals_arrive_beside_many_open_files() -> None:
    with many_open_files(), SignalInbox(TAKEN) as inbox:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert inbox.wait(10) == [signal.SIGUSR2]
        assert inbox.wait(0) == []


def test_a_supervisor_that_dies_counts_as_sigterm_beside_many_open_files() -> None:
    with many_open_files():
        lifeline = Lifeline()
        with SignalInbox(TAKEN, lifeline) as inbox:
            assert inbox.wait(0) == []
            lifeline.let_go()
            assert inbox.wait(10) == [signal.SIGTERM]
            assert inbox.wait(0) == []
        lifeline.close()


@pytest.mark.parametrize("other", [signal.SIGRTMIN + 2, signal.SIGALRM, signal.SIGRTMAX])
def test_signals_that_other_code_handles_do_not_reach_the_inbox(other: int) -> None:
    # Given a program's handler for another signal, which may be a real-time signal without a name
    heard: list[int] = []
    before = signal.signal(other, lambda number, _: heard.append(number))
    try:
        with SignalInbox(TAKEN) as inbox:
            # When that signal arrives, and then one of the inbox's
            os.kill(os.getpid(), other)
            os.kill(os.getpid(), signal.SIGTERM)
            # Then each signal reaches its own handler
            arrived: list[signal.Signals] = []
            while not arrived:
                arrived += inbox.wait(10)
            assert (heard, arrived) == ([other], [signal.SIGTERM])
    finally:
        signal.signal(other, before)


def test_an_event_loop_that_has_taken_the_wake_up_socket_keeps_no_signal_from_the_inbox() -> None:
    async def use() -> None:
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGALRM, heard.set)
        os.kill(os.getpid(), signal.SIGTERM)
        assert inbox.wait(10) == [signal.SIGTERM]
        assert inbox.wait(0) == []  # the signal is returned only once
        os.kill(os.getpid(), signal.SIGALRM)  # the other handler still gets its signal
        await asyncio.wait_for(heard.wait(), 10)

    with SignalInbox(TAKEN) as inbox:
        asyncio.run(use())
        # When the loop is closed, then it gives up the wake-up socket, and the inbox still gets its signals
        os.kill(os.getpid(), signal.SIGUSR2)
        assert inbox.wait(10) == [signal.SIGUSR2]
        assert inbox.wait(0) == []


def test_a_signal_handler_that_a_job_has_replaced_is_restored_afterwards() -> None:
    def theirs(_number: int, _frame: object) -> None:
        pytest.fail("it is not theirs any more")

    with socket.socket() as other, SignalInbox(TAKEN) as inbox:
        # Given a job that has taken a signal, and the wake-up socket
        other.setblocking(False)
        signal.signal(signal.SIGTERM, theirs)
        signal.set_wakeup_fd(other.fileno(), warn_on_full_buffer=False)
        # When the job has ended
        inbox.reclaim_signals(also_wakeups=True)
        # Then the inbox has its signal and the socket again
        os.kill(os.getpid(), signal.SIGTERM)
        assert inbox.wait(10) == [signal.SIGTERM]
        assert inbox.wait(0) == []


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGUSR2])
def test_a_forked_process_has_the_original_signals_and_its_parent_gets_none(kind: signal.Signals) -> None:
    signal.signal(kind, signal.SIG_DFL)  # another test may have left a handler
    with SignalInbox(TAKEN) as inbox:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
        child.start()
        assert child.pid is not None
        os.kill(child.pid, kind)  # at once, because even an early signal must not reach this inbox
        child.join(10)
        code = child.exitcode
        child.kill()
        child.join()
        assert code == -kind
        assert inbox.wait(0) == []
        # And the parent's handlers are unchanged
        os.kill(os.getpid(), kind)
        assert inbox.wait(10) == [kind]


def test_a_forked_process_has_the_handler_that_the_program_had_and_nothing_blocked() -> None:
    # Given a program with its own handler and its own blocked signal, and a worker in it
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        with SignalInbox(TAKEN):
            signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)
            pid = os.fork()
            if pid == 0:
                blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
                if blocked == {signal.SIGALRM} and signal.set_wakeup_fd(-1) == -1:  # the program's own settings stay
                    os.kill(os.getpid(), signal.SIGTERM)
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, TAKEN)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_the_worker_s_own_forks_keep_its_signals() -> None:
    with SignalInbox(TAKEN):
        pid = fork.fork_worker_process()
        if pid == 0:
            kept = callable(signal.getsignal(signal.SIGTERM)) and signal.set_wakeup_fd(-1) >= 0
            os._exit(0 if kept else 1)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_parent_s_inbox_gets_no_signals_of_a_child() -> None:
    # A child keeps the supervisor's handlers until it has its own, because Ctrl-C reaches the whole group.
    with SignalInbox(TAKEN) as inbox:
        pid = fork.fork_worker_process()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert inbox.wait(0) == []


def test_after_the_block_everything_is_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SignalInbox(TAKEN):
        pass
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
    assert signal_handlers._previous_handlers == {}
