"""The write lock: calls on the pool's connections while a transaction of the caller has the file locked."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux lists the owners of locks")

SCRIPT = """
    from multiq import errors
    path, how = sys.argv[1:]
    backend = SqliteBackend(path, timeout=60.0)
    backend.stats("q")
    if how == "first use":
        path += ".new"
        backend = SqliteBackend(path, timeout=60.0)
    app = sqlite3.connect(path, isolation_level=None)
    app.execute("CREATE TABLE IF NOT EXISTS orders (number)")
    app.execute("BEGIN")
    app.execute("INSERT INTO orders VALUES (7)")
    start = time.monotonic()
    call = {
        "enqueue": lambda: backend.enqueue("q", [NewJob(b"x", "1")]),
        "first use": lambda: backend.enqueue("q", [NewJob(b"x", "1")]),
        "batch": lambda: backend.enqueue("q", [NewJob(b"x", str(n)) for n in range(3)]),
        "pause": lambda: backend.pause("q", 60),
    }[how]
    try:
        call()
    except errors.LockedByCaller as exc:
        say(time.monotonic() - start < 30, isinstance(exc, errors.BackendUnavailable), exc)
    backend.enqueue("q", [NewJob(b"x", "2")], connection=app)
    app.execute("COMMIT")
    backend.enqueue("q", [NewJob(b"x", "3")])
    say(backend.stats("q").ready)
"""


@pytest.mark.parametrize("how", ["enqueue", "batch", "pause", "first use"])
def test_callers_transaction_is_detected_at_once(
    spawn: Callable[..., subprocess.Popen[str]], line: Callable[[subprocess.Popen[str]], str], path: Path, how: str
) -> None:
    # Given a program with one thread, whose own transaction locks the file, and with a timeout of a minute
    program = spawn(SCRIPT, path, how)
    # When it uses the queue without connection=, then it gets an error at once, which names the cause and the way out
    answer = line(program)
    assert answer.startswith("True False ")
    assert "connection=" in answer
    assert str(path) in answer
    # and after the error the program can continue
    assert line(program) == "2"


LOCKER = """
    app = sqlite3.connect(sys.argv[1], isolation_level=None)
    app.execute("BEGIN IMMEDIATE")
    say(os.getpid())
    sys.stdin.readline()
    app.execute("COMMIT")
"""

ENQUEUE = """
    backend = SqliteBackend(sys.argv[1], timeout=float(sys.argv[2]))
    app = sqlite3.connect(sys.argv[1], isolation_level=None)
    app.execute("BEGIN")
    app.execute("SELECT * FROM multiq_jobs").fetchall()
    say("waits")
    try:
        backend.enqueue("q", [NewJob(b"x", "1")])
        say("done")
    except Exception as exc:
        say(type(exc).__name__, exc)
"""


def test_lock_of_another_process_is_waited_for_and_named(
    spawn: Callable[..., subprocess.Popen[str]],
    line: Callable[[subprocess.Popen[str]], str],
    path: Path,
    backend: object,
) -> None:
    backend.stats("q")  # type: ignore[attr-defined]
    # Given another process with the lock, while a transaction of this process only reads
    locker = spawn(LOCKER, path)
    pid = line(locker)
    # Then the error after the timeout names the process that has the lock
    impatient = spawn(ENQUEUE, path, 1.0)
    assert line(impatient) == "waits"
    assert re.match(rf"BackendTimeout .*process {pid}\b.*1 s", line(impatient))
    # and an enqueue succeeds after the other process has ended its transaction
    patient = spawn(ENQUEUE, path, 60.0)
    assert line(patient) == "waits"
    time.sleep(0.5)  # until it has read the lock's owner
    locker.communicate("\n")
    assert line(patient) == "done"


THREADS = """
    backend = SqliteBackend(sys.argv[1], timeout=float(sys.argv[2]))
    backend.stats("q")
    app = sqlite3.connect(sys.argv[1], isolation_level=None, check_same_thread=False)
    app.execute("BEGIN IMMEDIATE")
    commit = threading.Timer(0.7 if sys.argv[3] == "yes" else 5.0, app.execute, ("COMMIT",))
    commit.start()
    try:
        backend.enqueue("q", [NewJob(b"x", "1")])
        say("done")
    except Exception as exc:
        say(type(exc).__name__, exc)
"""


def test_lock_of_another_thread_is_waited_for(
    spawn: Callable[..., subprocess.Popen[str]], line: Callable[[subprocess.Popen[str]], str], path: Path
) -> None:
    # Given a transaction that another thread commits in time
    assert line(spawn(THREADS, path, 60.0, "yes")) == "done"
    # If that thread commits too late, the error says that this process has the lock, and what the cause may be
    answer = line(spawn(THREADS, path, 0.5, "no"))
    assert answer.startswith("BackendTimeout ")
    assert "this very process" in answer
    assert "connection=" in answer


def test_lock_of_another_thread_is_never_taken_for_the_callers(path: Path, backend: object) -> None:
    from multiq.backend import NewJob
    from multiq_sqlite.backend import SqliteBackend

    assert isinstance(backend, SqliteBackend)
    errors: list[BaseException] = []

    def enqueue(thread: int) -> None:
        try:
            for number in range(20):
                backend.enqueue("q", [NewJob(b"x", f"{thread}-{number}")])
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=enqueue, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert backend.stats("q").ready == 120


GARBAGE = """
    import gc

    class Garbage:
        def __init__(self):
            self.me = self

        def __del__(self):
            time.sleep(0)  # lets another thread run

    from multiq_sqlite import write_lock
    write_lock._CHECK_OWNER_AFTER = write_lock._CHECK_OWNER_EVERY = 0.0  # many looks at the lock's owner
    owner = write_lock.write_lock_owner

    def owner_and_garbage(path):
        pid = owner(path)
        Garbage()
        return pid

    write_lock.write_lock_owner = owner_and_garbage
    path, seconds = sys.argv[1], 1.5
    backend = SqliteBackend(path)
    backend.stats("q")
    app = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    app.execute("BEGIN IMMEDIATE")
    gc.set_threshold(1)

    def enqueue():
        backend.enqueue("q", [NewJob(b"x", f"{threading.get_ident()}")])

    def start_threads():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            thread = threading.Thread(target=Garbage)
            thread.start()
            thread.join()

    threads = [threading.Thread(target=enqueue) for _ in range(12)] + [threading.Thread(target=start_threads)]
    for thread in threads:
        thread.start()
    threads[-1].join()
    app.execute("COMMIT")
    for thread in threads:
        thread.join()
    say(backend.stats("q").ready)
"""


def test_threads_that_wait_for_the_lock_do_not_hang_the_process(
    spawn: Callable[..., subprocess.Popen[str]], line: Callable[[subprocess.Popen[str]], str], path: Path
) -> None:
    # Given threads that look for the owner of the lock, while others start and garbage lets threads run
    # Then all of them get the lock when it is free
    assert line(spawn(GARBAGE, path)) == "12"
