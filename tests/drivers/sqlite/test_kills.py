"""kill -9 at each system call of a settle or of ``carry_out``: the call was carried out as a whole, or not at all.

The killed process is traced with ptrace, which stops it at the beginning and at the end of each system call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import strace

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

#: kills a child at each system call of its settle or carry_out, and prints whether this was carried out
SETTLES_AND_DIES = """
import ctypes, traceback
from multiq.backend import After, Arrive, Enqueue, Put, Terms

TRACE_ME, UNTIL_SYSTEM_CALL = 0, 24
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]

backend = SqliteBackend(sys.argv[1])
consumer = backend.consumer(["q"])

def prepare(before):
    consumer.settle([Ack(lease) for lease in before])
    backend.purge("q", [State.READY, State.DELAYED, State.BURIED, State.HELD])
    backend.purge("other", [State.READY, State.HELD])
    backend.forget("q", ["acked"])
    backend.carry_out([Put("flows", "key", b"old")])
    for queue, name in (("q", "next"), ("other", "then")):
        backend.enqueue(queue, [NewJob(b"x" * 5000, name, terms=Terms(2))])
        backend.carry_out([Arrive(queue, name, "first")])
    backend.enqueue("q", [NewJob(b"x", name, ttr=3600) for name in ("acked", "released", "buried")])
    return consumer.reserve(3, 0)

STEPS = (
    Arrive("q", "next", "second"), Arrive("other", "then", "second"), Put("flows", "key", b"new" * 2000),
    Enqueue("other", NewJob(b"x", "new", terms=Terms(1))),
)

def call(leases):
    if sys.argv[2] == "settle":
        settle(leases)
    else:
        backend.stats("q")  # opens the file
        stop()
        backend.carry_out(STEPS)
    os.kill(os.getpid(), signal.SIGKILL)

def stop():
    ptrace(TRACE_ME, 0, None, None)
    os.kill(os.getpid(), signal.SIGSTOP)

def settle(leases):
    consumer.reserve(1, 0)  # opens the file
    acked, released, buried = leases
    verdicts = [
        Ack(acked, After(keep=60, outcome=b"y" * 5000, steps=STEPS)),
        Release(released, 60, None, "why", After(memo=b"memo", detail=b"detail")),
        Bury(buried, "why", After(detail=b"detail")),
    ]
    stop()
    consumer.settle(verdicts)

def left():
    note = backend.note("flows", "key").value
    then = {job.id: (job.state.value, job.awaits) for state in ("held", "ready")
            for queue in ("q", "other") for job in backend.jobs(queue, State(state)).jobs}
    is_done = note != b"old"
    if is_done:
        assert then == {"next": ("ready", 0), "then": ("ready", 0), "new": ("held", 1)}, then
        assert note == b"new" * 2000
    else:
        assert then == {"next": ("held", 1), "then": ("held", 1)}, then
    if sys.argv[2] == "settle":
        assert is_done == verdicts_done()
    return "done" if is_done else "nothing"

def verdicts_done():
    jobs = {job.id: job for state in ("reserved", "delayed", "buried") for job in backend.jobs("q", State(state)).jobs}
    (outcome,) = backend.outcomes("q", ["acked"])
    assert ("acked" in jobs) == (outcome is None), (jobs.keys(), outcome is None)
    assert outcome is None or (outcome.body, outcome.attempt) == (b"y" * 5000, 1)
    released, buried = jobs["released"], jobs["buried"]
    found = [(job.state.value, job.reason, job.memo, job.detail) for job in (released, buried)]
    is_done = outcome is not None
    assert found == ([
        ("delayed", "why", b"memo", b"detail"), ("buried", "why", b"", b"detail")
    ] if is_done else [("reserved", None, b"", b"")] * 2), found
    return is_done

leases, calls, is_over = [], 0, False
while not is_over:
    leases = prepare(leases)
    child = os.fork()
    if child == 0:
        try:
            call(leases)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSTOPPED(status)
    for _ in range(calls):
        assert ptrace(UNTIL_SYSTEM_CALL, child, None, None) == 0
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            is_over = True
            break
        assert os.WIFSTOPPED(status), status
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    say(left())
    calls += 1
"""


@pytest.mark.long
@pytest.mark.parametrize("call", ["settle", "carry_out"])
def test_process_killed_at_any_system_call_leaves_all_of_the_call_or_nothing(
    path: Path, spawn: Callable[..., subprocess.Popen[str]], call: str
) -> None:
    strace.require()
    process = spawn(SETTLES_AND_DIES, path, call)
    assert process.stdout is not None
    found = process.stdout.read().split()
    # Then each call was carried out as a whole or not at all, and there were kills before and after the commit
    assert process.wait() == 0
    print(f"{len(found)} kills, {found.count('done')} of them after the commit")
    assert found[0] == "nothing"
    assert found[-1] == "done"
    assert found.count("nothing") > 20
