"""Forks: no child inherits an open database, even if a thread uses it at that moment."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from multiq.backend import NewJob, State
from multiq.conformance.threads import HANGS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from multiq_sqlite.backend import SqliteBackend

    Spawn = Callable[..., subprocess.Popen[str]]
    Line = Callable[[subprocess.Popen[str]], str]

pytestmark = pytest.mark.skipif(not hasattr(sys, "getswitchinterval") or sys.platform == "win32", reason="needs fork")

FORKS = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, on forks beside threads: they are what is tested

def fork(work):
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException as exc:
        say("child failed:", type(exc).__name__, exc)
    finally:
        os._exit(0)

def interrupt_next_fork(then=lambda: None):
    # a signal handler raises in the main thread while the hook of its next fork waits for a lock
    def interrupt(*_):
        raise KeyboardInterrupt

    def watch(main=threading.get_ident()):
        while sys._current_frames()[main].f_code.co_name not in ("_before", "close_for_fork"):
            time.sleep(0.01)
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGALRM)
        time.sleep(0.1)
        then()

    signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = lambda _: None  # Python prints what a hook raises, and forks
    threading.Thread(target=watch, daemon=True).start()

backend = SqliteBackend(sys.argv[1], timeout=60)  # three threads write beside the children: some wait long
"""


def test_parent_and_child_both_use_the_backend_after_a_fork(backend: SqliteBackend, spawn: Spawn, line: Line) -> None:
    process = spawn(
        FORKS
        + """
backend.enqueue("q", [NewJob(b"x", str(number)) for number in range(4)])
consumer = backend.consumer(["q"])
held, = consumer.reserve(1, 0)

def child():
    mine, = consumer.reserve(1, 0)
    backend.enqueue("q", [NewJob(b"x", "child")])
    say("child", mine.id, *consumer.settle([Ack(mine), Ack(held)]))

os.waitpid(fork(child), 0)
say("parent", consumer.reserve(1, 0)[0].id, backend.stats("q").ready)
    """,
        backend.path,
    )
    assert line(process) == "child 1 None None"
    assert line(process) == "parent 2 2"


def test_forked_child_takes_locks_of_its_own(backend: SqliteBackend, spawn: Spawn, line: Line) -> None:
    """If a child inherited SQLite's record of locks, it would rely on its parent's locks, and take none itself."""
    process = spawn(
        FORKS
        + """
backend.stats("q")
consumer = backend.consumer(["q"])
consumer.reserve(1, 0)

def child():
    backend.enqueue("q", [NewJob(b"x", "1")])
    files = {os.stat(sys.argv[1] + end).st_ino for end in ("", "-shm")}
    mine = [line.split() for line in open("/proc/locks") if f" {os.getpid()} " in line]
    say("child", len({words[5].split(":")[2] for words in mine} & set(map(str, files))))

os.waitpid(fork(child), 0)
    """,
        backend.path,
    )
    if sys.platform != "linux":
        pytest.skip("only Linux lists its locks")
    assert line(process) == "child 2"


def test_fork_that_a_signal_interrupts_leaves_nothing_locked(backend: SqliteBackend, spawn: Spawn, line: Line) -> None:
    # Given a fork that waits for another thread's call, and a signal handler that raises during this wait
    process = spawn(
        FORKS
        + """
backend.enqueue("q", [NewJob(b"x", "1")])
idle = [SqliteBackend(f"{sys.argv[1]}-{number}") for number in range(8)]  # the fork closes some before the busy one
for one in idle:
    one.enqueue("q", [NewJob(b"x", "1")])
lock = sqlite3.connect(sys.argv[1], isolation_level=None)
lock.execute("BEGIN IMMEDIATE")
thread = threading.Thread(target=backend.enqueue, args=("q", [NewJob(b"x", "2")]))
thread.start()
while not any(connection._lock.locked() for connection in backend._pool._connections):
    time.sleep(0.01)
interrupt_next_fork()
os.waitpid(fork(lambda: SqliteBackend(f"{sys.argv[1]}-new").enqueue("q", [NewJob(b"x", "1")])), 0)
lock.execute("ROLLBACK")
lock.close()
thread.join()
# Then all connections work, and so does the next fork
say("parent", backend.stats("q").ready, sum(one.stats("q").ready for one in idle))
os.waitpid(fork(lambda: say("child", backend.stats("q").ready)), 0)
    """,
        backend.path,
    )
    assert line(process) == "parent 2 8"
    assert line(process) == "child 2"


@pytest.mark.long
def test_fork_that_is_interrupted_beside_another_fork_leaves_a_child_that_works(
    backend: SqliteBackend, spawn: Spawn, line: Line
) -> None:
    # Given a thread that forks, closes connections, and waits for the call of another thread
    process = spawn(
        FORKS
        + """
from multiq_sqlite.forks import fork_guard

backend.enqueue("q", [NewJob(b"x", "1")])
idle = [SqliteBackend(f"{sys.argv[1]}-{number}") for number in range(24)]
for one in idle:
    one.enqueue("q", [NewJob(b"x", "1")])
lock = sqlite3.connect(sys.argv[1], isolation_level=None, check_same_thread=False)
lock.execute("BEGIN IMMEDIATE")
busy = threading.Thread(target=backend.enqueue, args=("q", [NewJob(b"x", "2")]))
busy.start()
while not any(connection._lock.locked() for connection in backend._pool._connections):
    time.sleep(0.01)
other = threading.Thread(target=lambda: os.waitpid(fork(lambda: None), 0))
other.start()
while not fork_guard.lock.locked():
    time.sleep(0.01)

def use():
    return sum(one.stats("q").ready for one in idle)

def child():
    used = use()
    os.waitpid(fork(lambda: say("grandchild", use())), 0)
    new = SqliteBackend(f"{sys.argv[1]}-new")
    new.enqueue("q", [NewJob(b"x", "1")])
    say("child", used, use(), new.stats("q").ready)

# When the main thread forks, too, a signal handler raises while it waits for its turn, and the call ends after that
interrupt_next_fork(then=lambda: lock.execute("ROLLBACK"))
os.waitpid(fork(child), 0)
lock.close()
busy.join()
other.join()
say("parent", backend.stats("q").ready, use())
        """,
        backend.path,
    )
    # Then the child forks and works, and so does the parent
    assert line(process) == "grandchild 24"
    assert line(process) == "child 24 24 1"
    assert line(process) == "parent 2 24"


@pytest.mark.long
def test_fork_while_other_threads_work(backend: SqliteBackend, spawn: Spawn, line: Line) -> None:
    process = spawn(
        FORKS
        + """
stop = False
def produce(name):
    number = 0
    while not stop:
        backend.enqueue("q", [NewJob(b"x", f"{name}-{number}")])
        number += 1

def wait():
    consumer = backend.consumer(["idle"])
    while not stop:
        consumer.reserve(1, 0.5)

threads = [threading.Thread(target=produce, args=(name,)) for name in "ab"] + [threading.Thread(target=wait)]
for thread in threads:
    thread.start()

def child(number):
    backend.enqueue("children", [NewJob(b"x", f"child-{number}")])
    consumer = backend.consumer(["children"])
    consumer.settle([Ack(lease) for lease in consumer.reserve(1, 5)])
    backend.enqueue("done", [NewJob(b"x", f"{number}")])

for number in range(20):
    os.waitpid(fork(lambda: child(number)), 0)
stop = True
for thread in threads:
    thread.join()
say("done", backend.stats("done").ready, backend.stats("children").ready)
    """,
        backend.path,
    )
    assert line(process) == "done 20 0"


def test_fork_during_a_transaction_of_another_thread(backend: SqliteBackend, spawn: Spawn, line: Line) -> None:
    process = spawn(
        FORKS
        + """
backend.stats("q")
inside, go_on = threading.Event(), threading.Event()

def slowly():
    def clock():
        inside.set()
        go_on.wait()
        return time.time_ns()
    SqliteBackend(sys.argv[1], clock=clock).enqueue("q", [NewJob(b"x", str(number)) for number in range(50)])

def child():
    for call in (lambda: backend.stats("q"), lambda: backend.enqueue("q", [NewJob(b"x", "child")])):
        try:
            call()
        except BackendUnavailable as exc:
            say("child:", exc)

from multiq.errors import BackendUnavailable
from multiq_sqlite import forks
forks._FORK_PATIENCE = 0.5
thread = threading.Thread(target=slowly)
thread.start()
inside.wait()
pid = fork(child)
os.waitpid(pid, 0)
go_on.set()
thread.join()
say("parent sees", backend.stats("q").ready)
    """,
        backend.path,
    )
    for _ in ("a look", "an enqueue"):
        answer = line(process)
        assert answer.startswith(f"child: {backend.path} cannot be used in this process: when its parent"), answer
    assert line(process) == "parent sees 50"
    assert len(backend.jobs("q", State.READY).jobs) == 50
    backend.enqueue("q", [NewJob(b"x", "after")])


def test_a_consumer_that_the_collector_closes_during_a_fork_does_not_hang(tmp_path: Path) -> None:
    # given a program in which a consumer is closed in the thread that forks, between the hooks of the fork. Python's
    # garbage collector does this at any allocation
    program = """
import os, sys
victims = []

def collect():
    for victim in victims:
        victim.close()

os.register_at_fork(after_in_child=collect, after_in_parent=collect)  # called before multiq's own hooks
import multiq
app = multiq.App(sys.argv[1])
queue = app.queue()
queue.enqueue(1)
queue.reserve(0).ack()
victims.append(queue)

# when it forks
child = os.fork()
victims.clear()
queue.enqueue(2)
queue.reserve(0).ack()
if child == 0:
    os._exit(0)

# then parent and child go on
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    ended = subprocess.run([sys.executable, "-c", program, f"sqlite:///{tmp_path}/jobs.db"], timeout=HANGS, check=False)
    assert ended.returncode == 0
