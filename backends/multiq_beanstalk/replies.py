"""Reads and parses the server's replies in their order, until a deadline."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from typing import TypeAlias

from multiq.driverkit.net import time_left
from multiq.driverkit.spin import SpinReader

Reply: TypeAlias = "tuple[bytes, bytes]"
"""The line without its end, and the body, which may be empty."""

NO_ANSWER = "the server did not answer in time"

RECEIVED_AT_ONCE = 65536  # bytes
DONTWAIT = int(socket.MSG_DONTWAIT)
LONGEST_LINE = 512  # bytes: more than any line of the server

_CLOSED_BY_SERVER = "the server closed the connection"
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
_NO_LINGER = struct.pack("ii", 1, 0)
_LARGEST_REPLIES = 640_000_000  # bytes of all replies to one packet
_MOST_DIGITS = 12
_SHORTEST_REPLY = 8  # bytes: ``BURIED`` and the end of the line
_WAITALL_FROM = 80  # if at least this number of bytes is certain to come, one call waits for all these bytes

#: replies whose line ends with the length of the body that follows
_WITH_BODY = (b"RESERVED ", b"FOUND ", b"OK ")


class ProtocolError(Exception):
    """The received data is not a reply of beanstalkd."""


class ReplyReader:
    """A socket and the buffer of the replies that arrive on it. ``Connection`` adds what it sends."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""
        self._at = 0  # index of the next unread byte in the buffer
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        self._wait = poll.poll
        self._received = 0  # bytes since the last send
        self._receive_timeout = 0.0  # seconds: the present value of the socket's SO_RCVTIMEO
        self._spin = SpinReader(sock)
        self._noops_pending = 0  # no-ops with unread replies

    def read(self, deadline: float) -> Reply:
        """Return the next reply.

        Any exception closes the connection. If it stayed open, a later call would read this reply as its own.
        """
        if self._noops_pending:
            self.read_noop_replies(deadline)
        try:
            return self._read(deadline)
        except BaseException:
            self.abort()
            raise

    def read_line(self, deadline: float) -> bytes:
        """Return the next reply, which must have no body. Hot path: faster than ``read``."""
        try:
            if self._at == len(self._buffer):
                self._buffer, self._at = self._receive_some(deadline), 0
            return self._read_line(deadline)
        except BaseException:
            self.abort()
            raise

    def read_many(self, count: int, deadline: float, *, lines: int = 0) -> list[Reply]:
        """Return the next *count* replies.

        *lines*: how many replies at the beginning have no body and answer slow commands. After an error, the
        exception's ``partly_read`` has the replies that arrived before the error.
        """
        replies: list[Reply] = []
        if self._noops_pending:
            self.read_noop_replies(deadline)
        try:
            while len(replies) < count:
                buffer, at, size = self._buffer, self._at, len(self._buffer)
                while len(replies) < count and (end := buffer.find(b"\r\n", at)) >= 0:
                    line = buffer[at:end]
                    if not line.startswith(_WITH_BODY):
                        replies.append((line, b""))
                        at = end + 2
                        continue
                    body_end = end + 2 + _size(line)
                    if body_end + 2 > size:
                        break
                    replies.append((line, buffer[end + 2 : body_end]))
                    at = body_end + 2
                self._at = at
                sure = (lines - len(replies)) * _SHORTEST_REPLY - (size - at)
                if sure >= _WAITALL_FROM:
                    self._receive(deadline, sure)
                elif len(replies) < count:
                    replies.append(self._read(deadline))  # the whole reply has not arrived yet
        except BaseException as exc:
            self.abort()
            exc.partly_read = replies  # type: ignore[attr-defined]
            raise
        return replies

    def read_lines(self, count: int, deadline: float) -> list[bytes]:
        """Return the lines of the next *count* replies, which must have no bodies. Raises the same errors as
        ``read_many``."""
        lines: list[bytes] = []
        try:
            while len(lines) < count:
                end = self._buffer.rfind(b"\r\n")
                if end < self._at:
                    self._check_line_ends()
                    self._receive(deadline, (count - len(lines)) * _SHORTEST_REPLY - (len(self._buffer) - self._at))
                    continue
                lines += self._buffer[self._at : end].split(b"\r\n")
                self._at = end + 2
            _check_count(len(lines), count)
        except BaseException as exc:
            self.abort()
            exc.partly_read = lines[:count]  # type: ignore[attr-defined]
            raise
        return lines

    def read_nowait(self, count: int) -> list[Reply]:
        """Return up to *count* replies without bodies that have already arrived.

        Raises ``OSError``, ``ProtocolError``.
        """
        try:
            data = self.sock.recv(RECEIVED_AT_ONCE, DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError(_CLOSED_BY_SERVER)
        self._buffer, self._at = self._buffer[self._at :] + data, 0
        replies: list[Reply] = []
        while len(replies) < count and (end := self._buffer.find(b"\r\n", self._at)) >= 0:
            if self._noops_pending:
                self._noops_pending -= 1
            else:
                replies.append((self._buffer[self._at : end], b""))
            self._at = end + 2
        if not replies:
            self._check_line_ends()
        return replies

    def received_lines(self) -> list[bytes]:
        """Return the unread replies, without bodies, that arrived while only a part of a packet was sent."""
        return self._buffer[self._at :].split(b"\r\n")[:-1]

    def read_noop_replies(self, deadline: float) -> None:
        """Read the replies to no-ops, so that the next reply answers the next command."""
        try:
            while self._noops_pending:
                self._read_line(deadline)
                self._noops_pending -= 1
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Close the connection by a reset, so that data still in flight does not reach the server."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.sock.close()

    # --- helpers ---

    def _read(self, deadline: float) -> Reply:
        line = self._read_line(deadline)
        if not line.startswith(_WITH_BODY):
            return line, b""
        return line, self._read_body(_size(line), deadline)

    def _read_line(self, deadline: float) -> bytes:
        end = self._buffer.find(b"\r\n", self._at)
        while end < 0:
            self._check_line_ends()
            self._receive(deadline)
            end = self._buffer.find(b"\r\n", self._at)
        line = self._buffer[self._at : end]
        self._at = end + 2
        return line

    def _check_line_ends(self) -> None:
        """Raise ``ProtocolError`` if the buffer has more bytes than a line may have, but no end of a line."""
        if len(self._buffer) - self._at > LONGEST_LINE:
            raise ProtocolError("a reply does not end")

    def _read_body(self, size: int, deadline: float) -> bytes:
        end = self._at + size
        if end + 2 > len(self._buffer):
            self._receive_until(size + 2, deadline)
            end = self._at + size
        body = self._buffer[self._at : end]
        if self._buffer[end : end + 2] != b"\r\n":
            raise ProtocolError("a body does not end where it should")
        self._at = end + 2
        return body

    def _receive_until(self, size: int, deadline: float) -> None:
        """Receive until the buffer holds at least *size* bytes."""
        parts = [self._buffer[self._at :]]
        have = len(parts[0])
        while have < size:
            parts.append(self._receive_some(deadline))
            have += len(parts[-1])
        self._buffer, self._at = b"".join(parts), 0

    def _receive(self, deadline: float, sure: int = 0) -> None:
        self._buffer, self._at = self._buffer[self._at :] + self._receive_some(deadline, sure), 0

    def _receive_some(self, deadline: float, sure: int = 0) -> bytes:
        """Wait for data and receive what has arrived.

        *sure*: the number of bytes that are certain to come. If this number is at least ``_WAITALL_FROM``, one call
        waits for all these bytes. A server that syncs its log for each job sends each reply separately, and waking up
        for each reply would cost more than all other work for a job.
        """
        left = time_left(deadline)
        data = b"" if sure >= _WAITALL_FROM else self._spin.receive(RECEIVED_AT_ONCE)
        if data:
            return self._counted(data)
        if not self._wait(left * 1000):
            raise TimeoutError(NO_ANSWER)
        try:
            if sure >= _WAITALL_FROM:
                self._set_receive_timeout(left)
                data = self.sock.recv(sure, socket.MSG_WAITALL)
            else:
                data = self.sock.recv(RECEIVED_AT_ONCE)
        except BlockingIOError as exc:
            raise TimeoutError(NO_ANSWER) from exc
        if not data:
            raise ConnectionResetError(_CLOSED_BY_SERVER)
        return self._counted(data)

    def _counted(self, data: bytes) -> bytes:
        self._received += len(data)
        if self._received > _LARGEST_REPLIES:
            raise ProtocolError(f"the replies have more than {_LARGEST_REPLIES:,} bytes")
        return data

    def _set_receive_timeout(self, left: float) -> None:
        """Set the timeout of the next receive to *left* seconds. The timeout is not changed if it differs from *left*
        by at most a sixteenth.

        Call this method only after data has arrived. If a signal interrupts a receive before any data has arrived,
        Python repeats the receive, and the kernel then waits for up to the whole timeout again.
        """
        if abs(left - self._receive_timeout) <= left / 16:
            return
        self._receive_timeout = left
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(left), int(left % 1 * 1e6) or 1))


def _check_count(received: int, expected: int) -> None:
    if received != expected:
        raise ProtocolError("it sent more replies than there were commands")


def _size(line: bytes) -> int:
    digits = line.rpartition(b" ")[2]
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        raise ProtocolError(f"{line[:80]!r} must end with the length of its body")
    size = int(digits)
    if size > _LARGEST_REPLIES:
        raise ProtocolError(f"a reply must have at most {_LARGEST_REPLIES:,} bytes, got {size:,}")
    return size
