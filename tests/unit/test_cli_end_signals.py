"""Two signals end a command, at whatever moments they arrive."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from multiq.cli.end_signals import EndSignals

_ENDED_BY_SECOND = 7
_PATIENCE = 60  # seconds after which a child that hangs is killed


def _begin_waiting(ready: int) -> int:
    """Fork a child that waits for a signal, and then makes a long call. Returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(_PATIENCE)
        with EndSignals() as signals:
            os.write(ready, b"\0")
            signals.wait()
            while True:
                time.sleep(0.001)
    except KeyboardInterrupt:
        status = _ENDED_BY_SECOND
    finally:
        os._exit(status)


@pytest.mark.parametrize("rounds", [100, pytest.param(2_000, marks=pytest.mark.long)])
def test_the_second_signal_ends_a_command_at_whatever_moment_it_comes(rounds: int) -> None:
    # Given a process of its own, because a fork of the tests' process takes a hundred times as long
    command = [sys.executable, __file__, str(rounds)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    # Then each second signal has ended its process
    assert ended.stdout == f"{rounds} of {rounds}\n"


def _send_two_signals(rounds: int) -> int:
    """Return how many children were ended by their second signal."""
    reader, writer = os.pipe()
    rng = random.Random(1)
    ended = 0
    for _ in range(rounds):
        child = _begin_waiting(writer)
        os.read(reader, 1)
        os.kill(child, signal.SIGINT)
        for _ in range(rng.randrange(500)):  # the second signal comes a few microseconds after the first
            pass
        os.kill(child, signal.SIGTERM)
        ended += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == _ENDED_BY_SECOND
    return ended


def test_the_end_of_a_command_leaves_the_signals_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    files = psutil.Process().num_fds()
    with EndSignals() as signals:
        assert not signals.wait(0)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert psutil.Process().num_fds() == files


if __name__ == "__main__":
    print(f"{_send_two_signals(int(sys.argv[1]))} of {sys.argv[1]}")
