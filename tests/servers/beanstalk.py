"""``beanstalkd``, and a bare connection to it that sends raw commands and returns the raw replies."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from servers.process import HOST, PATIENCE, Server, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

# seconds; the driver checks a connection before use only if it has been idle for a moment: a put into a dead
# connection that was used just before has an unknown effect
_LOOKED_AT_AFTER = 0.03

#: replies whose last word is the length of the body that follows
_WITH_BODY = frozenset({b"OK", b"RESERVED", b"FOUND"})


class BeanstalkServer(Server):
    """``beanstalkd`` on a TCP port, or on a UNIX socket alone; it writes to disk only with *binlog*.

    With *binlog* it logs to a folder of its own, which is kept over restarts, and syncs every *fsync_ms* milliseconds
    (0: before each answer; None: the server's default). *max_job_size* is ``-z``; *address* is where it listens.
    """

    program = "beanstalkd"
    package = "beanstalkd"

    def __init__(
        self,
        *,
        binlog: bool = False,
        fsync_ms: int | None = 0,
        max_job_size: int | None = None,
        log_file_size: int | None = None,
        address: str = HOST,
        unix: bool = False,
    ) -> None:
        super().__init__()
        self.port = free_port()
        self.socket = self.folder / "b.sock"
        self.binlog = self.folder / "binlog" if binlog else None
        self._is_unix = unix
        self._arguments = ["-l", f"unix:{self.socket}"] if unix else ["-l", address, "-p", str(self.port)]
        if self.binlog is not None:
            self.binlog.mkdir()
            self._arguments += ["-b", str(self.binlog)]
            self._arguments += [] if fsync_ms is None else [f"-f{fsync_ms}"]
        if max_job_size is not None:
            self._arguments += ["-z", str(max_job_size)]
        if log_file_size is not None:
            self._arguments += ["-s", str(log_file_size)]

    @property
    def url(self) -> str:
        """The URL for multiq."""
        return f"beanstalk+unix://{self.socket}" if self._is_unix else f"beanstalk://{HOST}:{self.port}"

    @property
    def address(self) -> tuple[str, int] | str:
        """The address that clients connect to."""
        return str(self.socket) if self._is_unix else (HOST, self.port)

    @property
    def binlog_files(self) -> list[Path]:
        """The write-ahead log, oldest first."""
        return (
            [] if self.binlog is None else sorted(self.binlog.glob("binlog.*"), key=lambda file: int(file.suffix[1:]))
        )

    @property
    def connections(self) -> int:
        """How many connections are open, not counting this one."""
        with self.client() as client:
            return int(client.stats()["current-connections"]) - 1

    @property
    def ended_by(self) -> str | None:
        """How the server ended by itself: ``SIGSEGV``, ``exit code 1``; None if it runs."""
        if self._process is None or self.answers():
            return None
        code = self._process.wait(PATIENCE)  # it closes its connections before the process ends
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    @contextlib.contextmanager
    def client(self) -> Iterator[BareClient]:
        """A plain connection, without multiq."""
        with contextlib.closing(BareClient(self.address)) as made:
            yield made

    def drain(self) -> None:
        """SIGUSR1: puts are refused from now on, everything else works; only a restart ends this."""
        os.kill(self.pid, signal.SIGUSR1)
        until(self._is_draining, "the server drains")

    def crash(self) -> None:
        """End the server by SIGSEGV, as a bug of its own would."""
        self._end(signal.SIGSEGV)

    @contextlib.contextmanager
    def little_memory(self, more: int) -> Iterator[None]:
        """In the block the server can allocate *more* bytes beyond what it has now, and no more."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[0])
        soft, hard = resource.prlimit(self.pid, resource.RLIMIT_AS)
        resource.prlimit(self.pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
        try:
            yield
        finally:
            resource.prlimit(self.pid, resource.RLIMIT_AS, (soft, hard))

    def start(self, *, wait: bool = True) -> Self:
        """Start the server; a restart waits first until its clients check their idle connections before use."""
        if (self.folder / "log").exists():
            time.sleep(_LOOKED_AT_AFTER)
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()  # a killed server leaves the file behind, and the next one could not bind it
        super().start(wait=wait)
        return self

    def arguments(self) -> Sequence[str]:
        return self._arguments

    def answers(self) -> bool:
        with contextlib.suppress(OSError), self.client() as client:
            return client.ask(b"stats").startswith(b"OK")
        return False

    def _is_draining(self) -> bool:
        with self.client() as client:
            return client.stats()["draining"] == "true"


class BareClient:
    """One connection that sends raw commands of the protocol. A closed connection raises ``ConnectionError``."""

    def __init__(self, address: tuple[str, int] | str) -> None:
        if isinstance(address, str):
            self.socket = _connected(address)
        else:
            self.socket = socket.create_connection(address, timeout=PATIENCE)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = self.socket.makefile("rb")

    def ask(self, command: bytes) -> bytes:
        """The reply to one command; its body follows the first line."""
        self.send(command)
        return self.reply()

    def send(self, *commands: bytes) -> None:
        """Send commands without waiting for the replies."""
        self.socket.sendall(b"".join(command + b"\r\n" for command in commands))

    def reply(self) -> bytes:
        """The next reply. One with a body is its first line, such as ``OK 3``, a line's end, and the body."""
        line = self._replies.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError(f"the server hung up after {line!r}")
        words = line.split()
        if words[0] not in _WITH_BODY:
            return line[:-2]
        body = self._replies.read(int(words[-1]) + 2)
        return line + body[:-2]

    def put(self, body: bytes, *, tube: str = "default", priority: int = 1024, delay: int = 0, ttr: int = 60) -> int:
        """Put a job. Returns its id."""
        assert self.ask(b"use " + tube.encode()).startswith(b"USING")
        reply = self.ask(b"put %d %d %d %d\r\n%b" % (priority, delay, ttr, len(body), body))
        assert reply.startswith(b"INSERTED "), reply
        return int(reply.split()[1])

    def fill(self, tube: str = "default", *, batch: int = 1000) -> None:
        """Put ready jobs into an empty tube until its heap is full: for the next job the server doubles the heap."""
        count = 2**15 - 2  # the heap's capacity begins at 2 and doubles when it is full
        assert self.ask(b"use " + tube.encode()).startswith(b"USING")
        for at in range(0, count, batch):
            puts = [b"put 1024 0 60 1\r\nx"] * min(batch, count - at)
            self.send(*puts)
            assert all(self.reply().startswith(b"INSERTED") for _ in puts)

    def watch(self, tube: str) -> None:
        """Watch this tube, and no other."""
        assert self.ask(b"watch " + tube.encode()).startswith(b"WATCHING")
        if tube != "default":
            self.ask(b"ignore default")

    def reserve(self, timeout: int = 0) -> tuple[int, bytes] | None:
        """Reserve a job. Returns its id and body; None if no job was ready."""
        reply = self.ask(b"reserve-with-timeout %d" % timeout)
        if not reply.startswith(b"RESERVED "):
            return None
        head, _, body = reply.partition(b"\r\n")
        return int(head.split()[1]), body

    def stats(self, *of: str) -> dict[str, str]:
        """``stats``, ``stats("tube", name)``, ``stats("job", id)``; an empty dict for a tube or job that is missing."""
        reply = self.ask("-".join(["stats", *of[:1]]).encode() + b"".join(b" " + word.encode() for word in of[1:]))
        _, _, text = reply.partition(b"\r\n")
        lines = (line.partition(": ") for line in text.decode().splitlines() if ": " in line)
        return {name: value.strip('"') for name, _, value in lines}

    def close(self) -> None:
        self._replies.close()
        self.socket.close()


def _connected(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.settimeout(PATIENCE)
        made.connect(path)
    except OSError:
        made.close()
        raise
    return made
