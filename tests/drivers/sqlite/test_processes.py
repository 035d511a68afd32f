"""Many processes on one file, and processes that die with a reserved job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, NewJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq_sqlite.backend import SqliteBackend

SOAK = Path(__file__).parents[2] / "soak" / "sqlite_processes.py"
SECONDS = os.environ.get("MULTIQ_TEST_SECONDS", "3")


@pytest.mark.long
def test_eight_processes_lose_nothing_and_do_nothing_twice() -> None:
    """The long run is ``python tests/soak/sqlite_processes.py --seconds 60``."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SOAK), "--seconds", SECONDS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 lost, 0 doubled" in done.stdout


def test_job_of_a_killed_process_comes_back_when_its_lease_ends(
    backend: SqliteBackend,
    spawn: Callable[..., subprocess.Popen[str]],
    line: Callable[[subprocess.Popen[str]], str],
) -> None:
    backend.enqueue("q", [NewJob(b"x", "1", ttr=1.0)])
    holder = spawn(
        """
        lease, = SqliteBackend(sys.argv[1]).consumer(["q"]).reserve(1, 5)
        say("holding", lease.attempt)
        time.sleep(100)
        """,
        backend.path,
    )
    assert line(holder) == "holding 1"
    before = time.monotonic()
    holder.kill()
    holder.wait()
    consumer = backend.consumer(["q"])
    (lease,) = consumer.reserve(1, 30)
    assert time.monotonic() - before > 0.5
    assert (lease.attempt, lease.crashes) == (2, 1)
    assert consumer.settle([Ack(lease)]) == [None]


@pytest.mark.long
def test_batch_of_a_killed_process_is_stored_whole_or_not_at_all(
    backend: SqliteBackend,
    spawn: Callable[..., subprocess.Popen[str]],
    line: Callable[[subprocess.Popen[str]], str],
) -> None:
    for attempt in range(5):
        producer = spawn(
            """
            backend = SqliteBackend(sys.argv[1])
            backend.stats("q")
            say("going")
            for batch in range(10_000):
                backend.enqueue("q", [NewJob(b"x" * 100, f"{sys.argv[2]}-{batch}-{number}") for number in range(50)])
            """,
            backend.path,
            attempt,
        )
        assert line(producer) == "going"
        time.sleep(0.02 + 0.03 * attempt)
        producer.kill()
        producer.wait()
        assert backend.stats("q").ready is not None
        assert (backend.stats("q").ready or 0) % 50 == 0
