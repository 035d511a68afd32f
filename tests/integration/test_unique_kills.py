"""kill -9 at each system call of an enqueue or an ack of a job with a unique key: each key in the store has its job.

The killed process is traced with ptrace, which stops it at the beginning and at the end of each system call.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import strace
from stores import STORES

from multiq import open_backend
from multiq.backend import Ack, NewJob, Terms, UniqueKey
from multiq.errors import JobNotFound
from multiq.ids import new_id

if TYPE_CHECKING:
    from pathlib import Path

    from multiq.backend import Backend

MOST_CALLS = 400  # an enqueue takes fewer system calls on each store

#: takes a step on a job, and stops before it, so that its parent can trace the step
TAKES_A_STEP = """
import ctypes, os, signal, sys
from multiq import open_backend
from multiq.backend import Ack, NewJob, Terms, UniqueKey

_, url, step, name = sys.argv
TRACE_ME = 0
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]

def stop():
    ptrace(TRACE_ME, 0, None, None)
    os.kill(os.getpid(), signal.SIGSTOP)

def terms(key):
    return Terms(unique=UniqueKey(key))

backend = open_backend(url)
consumer = backend.consumer(["q", "warm"])
leases = consumer.reserve(1, 0)
# the same calls on another queue, which load what they need
backend.enqueue("warm", [NewJob(b"x", os.urandom(8).hex(), terms=terms(os.urandom(8)))])
consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)])
if step == "enqueue":
    stop()
    backend.enqueue("q", [NewJob(b"x", name, terms=terms(b"key"))])
else:
    stop()
    consumer.settle([Ack(lease) for lease in leases])
os.kill(os.getpid(), signal.SIGKILL)
"""

#: the tracer: kills the process after so many stops, and prints whether the step had ended before
TRACES = """
import ctypes, os, signal, sys

UNTIL_SYSTEM_CALL = 24
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]

stops, code, *arguments = sys.argv[1:]
child = os.fork()
if child == 0:
    os.execv(sys.executable, [sys.executable, "-c", code, *arguments])
_, status = os.waitpid(child, os.WUNTRACED)
assert os.WIFSTOPPED(status), status
is_over = False
for _ in range(int(stops)):
    assert ptrace(UNTIL_SYSTEM_CALL, child, None, None) == 0
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        is_over = True
        break
    assert os.WIFSTOPPED(status), status
else:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print("over" if is_over else "killed")
"""


def step_killed(url: str, step: str, name: str, stops: int) -> bool:
    """Kill a process that takes a step after so many stops. Returns whether the step was over before."""
    command = [sys.executable, "-c", TRACES, str(stops), TAKES_A_STEP, url, step, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout == "over\n"


def is_there(backend: Backend, name: str) -> bool:
    try:
        backend.peek("q", name)
    except JobNotFound:
        return False
    return True


@pytest.mark.parametrize("step", ["enqueue", "ack"])
@pytest.mark.parametrize(
    "store",
    [
        pytest.param("redis", marks=pytest.mark.long),
        pytest.param("sqlite", marks=pytest.mark.exhaustive),
        pytest.param("mysql", marks=pytest.mark.exhaustive),
    ],
)
def test_a_process_killed_at_any_system_call_leaves_no_key_without_its_job(
    tmp_path: Path, store: str, step: str
) -> None:
    strace.require()
    found = []
    with STORES[store](tmp_path) as url, open_backend(url) as backend, backend.consumer(["q"]) as consumer:
        for stops in range(MOST_CALLS):
            # When a process is killed at a system call of its enqueue, or of its ack of the job with the key
            name = new_id()
            if step == "ack":
                backend.enqueue("q", [NewJob(b"x", name, ttr=1, terms=Terms(unique=UniqueKey(b"key")))])
            is_over = step_killed(url, step, name, stops)
            # Then the key belongs to the job if the job is there, and is free at once if it is not
            other = new_id()
            has_job = is_there(backend, name)
            (owner,) = backend.enqueue("q", [NewJob(b"x", other, terms=Terms(unique=UniqueKey(b"key")))])
            # The server may carry out the request of a killed process after the first look
            assert owner == (name if is_there(backend, name) else other), (stops, has_job)
            found.append(owner == name)
            leases = consumer.reserve(1, 5)
            assert [lease.id for lease in leases] == [owner]
            assert consumer.settle([Ack(lease) for lease in leases]) == [None]
            if is_over:
                break
        else:
            pytest.fail(f"the step took more than {MOST_CALLS} system calls")
    # And there were kills before and after the step had its effect
    print(f"{len(found)} kills, {found.count(True)} of them with a job")
    assert set(found) == {True, False}
    assert found[0] is (step == "ack")
    assert found[-1] is (step == "enqueue")
