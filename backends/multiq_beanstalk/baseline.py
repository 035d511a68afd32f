"""The baseline of ``multiq bench``: loops that only put, reserve and delete jobs on one connection."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from multiq.bench.adapter import PUT_BATCH, TAKE_BATCH, Baseline
from multiq.errors import BackendError

if TYPE_CHECKING:
    from .connection import Connection

_PATIENCE = 60.0  # seconds for one exchange


class BeanstalkBaseline(Baseline):
    """Needs a *tube* and a *connection* that nothing else uses."""

    def __init__(self, connection: Connection, tube: str, body: bytes) -> None:
        self._connection = connection
        self._put = b"put 1024 0 60 %d\r\n%b\r\n" % (len(body), body)
        name = tube.encode()
        self._ask(b"use %b\r\nwatch %b\r\nignore default\r\n" % (name, name), 3)

    def put_one_by_one(self, count: int) -> float:
        send, read, packet = self._connection.send, self._connection.read_line, self._put
        start = time.perf_counter()
        for _ in range(count):
            deadline = time.monotonic() + _PATIENCE
            send(packet, deadline)
            _expect(read(deadline), b"INSERTED ")
        return count / (time.perf_counter() - start)

    def put_in_batches(self, count: int) -> float:
        start = time.perf_counter()
        for at in range(0, count, PUT_BATCH):
            puts = min(PUT_BATCH, count - at)
            for line in self._ask(self._put * puts, puts):
                _expect(line, b"INSERTED ")
        return count / (time.perf_counter() - start)

    def take_in_batches(self) -> float:
        """Take all jobs. Each round trip deletes the previous jobs and reserves the next ones."""
        reserve = b"reserve-with-timeout 0\r\n" * TAKE_BATCH
        start, count = time.perf_counter(), 0
        held: list[bytes] = []
        while True:
            packet = b"".join([b"delete %b\r\n" % job_id for job_id in held]) + reserve
            replies = self._connection.ask(packet, len(held) + TAKE_BATCH, time.monotonic() + _PATIENCE)
            for line, _ in replies[: len(held)]:
                _expect(line, b"DELETED")
            held = [line.split()[1] for line, _ in replies[len(held) :] if line.startswith(b"RESERVED ")]
            count += len(held)
            if not held:
                return count / (time.perf_counter() - start)

    def close(self) -> None:
        """Delete the remaining jobs. The server deletes the tube when its last job is gone."""
        try:
            if not self._connection.is_closed:
                self.take_in_batches()
        finally:
            self._connection.close()

    def _ask(self, packet: bytes, count: int) -> list[bytes]:
        """Return the lines of replies that have no body."""
        deadline = time.monotonic() + _PATIENCE
        self._connection.send(packet, deadline)
        return self._connection.read_lines(count, deadline)


def _expect(line: bytes, wanted: bytes) -> None:
    if not line.startswith(wanted):
        raise BackendError(f"the reply must be {wanted!r}, got {line!r}")
