"""Power loss, by a model: the log is cut back to what had reached the disk, according to a trace.

``kill -9`` proves nothing about disks, because the kernel still writes what the process has handed to it. Here the
server runs under strace; it is killed at some moment, and everything that was written to its log after the beginning of
the last sync that had completed is overwritten with zeros.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
import strace
from servers.beanstalk import BeanstalkServer

from multiq.backend import NewJob
from multiq.backend.registry import open_backend
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from multiq.backend import Backend

QUEUE = "mail"
SECONDS = 2.5  # seconds of enqueuing; a server that syncs each second syncs twice in this time
ENOUGH = 100  # jobs; a busy machine enqueues longer, until it has so many
IDLE = 1.5  # seconds without an enqueue before the failure

_CALL = re.compile(r"\d+ +(write|lseek|fdatasync|fsync)\(\d+<(?P<path>[^>]*)>.*= (?P<result>\d+)$")


class TracedServer(BeanstalkServer):
    """A server under strace, which records its writes and syncs in a file."""

    def command(self) -> Sequence[str]:
        return strace.noting("write,lseek,fsync,fdatasync", self.trace, super().command())

    @property
    def trace(self) -> Path:
        return self.folder / "trace"

    def lose_power(self) -> None:
        """Kill the server, and overwrite with zeros what had not reached the disk. The log's size stays the same."""
        self.kill()
        (log,) = self.binlog_files
        synced = _synced_bytes(self.trace.read_text().splitlines(), log)
        content = log.read_bytes()
        log.write_bytes(content[:synced] + bytes(len(content) - synced))


def _synced_bytes(trace: Sequence[str], log: Path) -> int:
    """How many bytes of the log were written before the last completed sync. The server has one thread."""
    at = synced = 0
    for line in trace:
        call = _CALL.match(line)
        if call is None or call["path"] != str(log):
            continue
        if call[1] == "write":
            at += int(call["result"])
        elif call[1] == "lseek":  # the server goes back to the beginning after it has set the file's size
            at = int(call["result"])
        else:
            synced = at
    return synced


@pytest.fixture(autouse=True)
def _can_trace() -> None:
    strace.require()


def enqueue_for(backend: Backend, seconds: float) -> set[str]:
    """Enqueue jobs one by one, then wait for ``IDLE`` seconds. Returns all ids."""
    acknowledged: set[str] = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(acknowledged) <= ENOUGH:
        acknowledged.update(backend.enqueue(QUEUE, [NewJob(b"x", new_id())]))
    time.sleep(IDLE)
    return acknowledged


def survivors(server: BeanstalkServer, ids: set[str]) -> set[str]:
    with server.client() as client:
        return {job_id for job_id in ids if client.ask(b"peek " + job_id.encode()).startswith(b"FOUND")}


_LOOSE = [pytest.param(ms, marks=pytest.mark.long, id=name) for ms, name in ((None, "as it comes"), (1000, "-f1000"))]


@pytest.mark.long
@pytest.mark.parametrize("fsync_ms", [pytest.param(0, id="-f0"), *_LOOSE])
def test_power_failure_loses_nothing_that_the_setting_keeps(fsync_ms: int | None) -> None:
    with TracedServer(binlog=True, fsync_ms=fsync_ms) as server, open_backend(server.url) as backend:
        acknowledged = enqueue_for(backend, SECONDS)
        server.lose_power()
        server.start()
        lost = acknowledged - survivors(server, acknowledged)
    print(f"-f {fsync_ms}: {len(lost)} of {len(acknowledged)} acknowledged jobs were lost")
    assert len(acknowledged) > ENOUGH
    assert len(lost) < len(acknowledged)
    if fsync_ms == 0:
        assert lost == set()
    if fsync_ms == 1000:  # the server syncs only when it writes, so a longer wait would not save these jobs
        assert lost
