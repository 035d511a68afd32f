"""Which data a power failure would lose, and the effects of a full disk.

The power failure is a model: the log is cut back to what had reached the disk, as a trace shows it.

``kill -9`` proves nothing about disks, because the kernel still writes what the process has handed to it. Here the
server runs under strace; it is killed at some moment, and its log loses all that was written after the beginning of the
last sync that had completed.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
import strace
from servers.process import until
from servers.redis import RedisServer

from multiq.backend import NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, EnqueueUncertain
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from multiq.backend import Backend

QUEUE = "mail"
SECONDS = 5.0  # seconds of enqueuing before the failure; a busy machine enqueues longer, until it has ENOUGH jobs
ENOUGH = 100
CERTAIN_AFTER = 3.0  # seconds; everysec syncs each second, but only after the previous sync has ended

_CALL = re.compile(r"(\d+) +(write|fdatasync|fsync)\(\d+<(?P<path>[^>]*)>(?P<rest>.*)")
_RESUMED = re.compile(r"(\d+) +<\.\.\. (write|fdatasync|fsync) resumed>.*= (\d+)")
_RESULT = re.compile(r"= (\d+)$")


class TracedServer(RedisServer):
    """A server under strace, which records its writes and syncs in a file."""

    def command(self) -> Sequence[str]:
        return strace.noting("write,fsync,fdatasync", self.trace, super().command())

    @property
    def trace(self) -> Path:
        return self.folder / "trace"


@pytest.fixture(autouse=True)
def _can_trace() -> None:
    strace.require()


def lose_power(server: TracedServer) -> None:
    """Kill the server, and remove from its log what had not reached the disk."""
    server.kill()
    (log,) = (server.folder / "appendonlydir").glob("*.incr.aof")
    synced = _synced_bytes(server.trace.read_text().splitlines(), log)
    with log.open("r+b") as file:
        file.truncate(synced)


def _synced_bytes(trace: Sequence[str], log: Path) -> int:
    """How many bytes of the log were written before the last completed sync began."""
    written = synced = 0
    before: dict[str, int] = {}  # thread -> bytes written when its sync began
    for thread, call, result in _calls(trace, log):
        if call == "write" and result is not None:
            written += result
        elif call != "write" and result is None:
            before[thread] = written
        elif call != "write":
            synced = before.pop(thread)
    return synced


def _calls(trace: Sequence[str], log: Path) -> Iterator[tuple[str, str, int | None]]:
    """Yield each call's thread, name and result. A sync comes twice: when it begins (None), and when it ends."""
    unfinished: set[str] = set()
    for line in trace:
        if (call := _CALL.match(line)) and call["path"] == str(log):
            thread, name = call[1], call[2]
            result = _RESULT.search(call["rest"])
            if name != "write":
                yield thread, name, None
            if result is not None:
                yield thread, name, int(result[1])
            else:
                unfinished.add(thread)
        elif (resumed := _RESUMED.match(line)) and resumed[1] in unfinished:
            unfinished.remove(resumed[1])
            yield resumed[1], resumed[2], int(resumed[3])


def enqueue_for(backend: Backend, seconds: float) -> dict[str, float]:
    """Enqueue one by one. Returns when each id was acknowledged."""
    acknowledged: dict[str, float] = {}
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end or len(acknowledged) <= ENOUGH:
        (job_id,) = backend.enqueue(QUEUE, [NewJob(b"x", new_id())])
        acknowledged[job_id] = now
    return acknowledged


def survivors(backend: Backend) -> set[str]:
    found: set[str] = set()
    after: str | None = None
    while True:
        page = backend.jobs(QUEUE, State.READY, limit=1000, after=after)
        found |= {job.id for job in page.jobs}
        if page.after is None:
            return found
        after = page.after


@pytest.mark.long
@pytest.mark.parametrize(
    ("appendfsync", "certain_after"), [("always", 0.0), pytest.param("everysec", CERTAIN_AFTER, marks=pytest.mark.long)]
)
def test_power_failure_loses_nothing_that_the_setting_promises(appendfsync: str, certain_after: float) -> None:
    with TracedServer(appendonly="yes", appendfsync=appendfsync) as server, open_backend(server.url) as backend:
        acknowledged = enqueue_for(backend, SECONDS)
        end = time.monotonic()
        lose_power(server)
        server.start()
        lost = set(acknowledged) - survivors(backend)
    print(f"appendfsync {appendfsync}: {len(lost)} of {len(acknowledged)} acknowledged jobs were lost")
    assert [job_id for job_id in lost if acknowledged[job_id] < end - certain_after] == []
    assert len(acknowledged) > ENOUGH


# --- a disk that fails -----------------------------------------------------------------------------------


def failing_disk(server: RedisServer) -> AbstractContextManager[None]:
    """Each sync of the server's log fails as on a full disk."""
    return strace.injecting(server, "fdatasync,fsync", "error=ENOSPC")


def test_full_disk_ends_a_server_that_syncs_always_and_no_acknowledged_job_is_lost() -> None:
    with RedisServer(appendonly="yes", appendfsync="always") as server, open_backend(server.url) as backend:
        # Given acknowledged jobs, and a disk that fails from then on
        acknowledged = backend.enqueue(QUEUE, [NewJob(b"x", new_id()) for _ in range(50)])
        with failing_disk(server):
            # Then the server exits, and does not acknowledge a job that it could not log
            with pytest.raises(EnqueueUncertain):
                backend.enqueue(QUEUE, [NewJob(b"x", new_id())])
            until(lambda: not server.is_running, "the server has ended")
        server.start()
        assert set(acknowledged) <= survivors(backend)


def test_full_disk_makes_a_server_that_syncs_every_second_refuse_jobs() -> None:
    with RedisServer(appendonly="yes", appendfsync="everysec") as server, open_backend(server.url) as backend:
        known = set(backend.enqueue(QUEUE, [NewJob(b"x", new_id())]))
        with failing_disk(server):
            refusals: list[BackendUnavailable] = []

            def is_refused() -> bool:
                try:
                    known.update(backend.enqueue(QUEUE, [NewJob(b"x", new_id())]))
                except BackendUnavailable as exc:
                    refusals.append(exc)
                return bool(refusals)

            until(is_refused, "the server has noticed that it cannot keep anything")
            assert "MISCONF" in str(refusals[0])
        # When there is room on the disk again and the server was restarted (7.0 does not try again by itself)
        server.stop()
        server.start()
        # Then it accepts jobs again, and still has the old jobs
        known.update(backend.enqueue(QUEUE, [NewJob(b"x", new_id())]))
        assert known <= survivors(backend)
