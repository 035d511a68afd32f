"""A proxy that changes a server's replies at random: one reply, or all of them.

The proxy changes replies of the real server. So a change affects what a driver reads at that moment: lengths, counts,
types, numbers, texts. The same seed changes the same reply in the same way as long as the traffic is the same.

    with Attacker((host, port)) as attacker:
        attacker.garble(seed=7, at=3)       # the fourth piece that the server sends from now on
        attacker.dribble(0.05)              # from now on a byte every 50 ms
        attacker.relent()                   # an honest proxy again
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Self

    Address = tuple[str, int] | str

_HOST = "127.0.0.1"
_CHUNK = 1 << 16
_NUMBER = re.compile(rb"-?\d+")
_NUMBERS = [b"-1", b"0", b"1", b"4", b"65536", b"4294967295", b"9223372036854775807", b"1" + b"0" * 30, b"9" * 5000]
_KINDS = (
    "cut", "cut", "silence", "flip", "flip", "flips", "number", "number", "size", "insert", "drop", "repeat", "swap",
    "noise", "zeros",
)  # fmt: skip
_INSERTS = [
    b"\r\n", b"\0", b"\xff", b"\xfb", b"\xfe", b"*", b"$", b":", b">2\r\n+a\r\n+b\r\n", b"*2\r\n*2\r\n", b"$-1\r\n",
    b"*-1\r\n", b"-ERR x\r\n", b"-MOVED 1 127.0.0.1:1\r\n", b"OK 5\r\nabcde\r\n", b"RESERVED 1 1\r\nx\r\n",
    b"NOT_FOUND\r\n",
    b"\x07\0\0\1\0\0\0\2\0\0\0", b"\xff\xff\xff", b"\x01\0\0\1\xfb", b"\xff\xfe" * 40,
]  # fmt: skip


class Attacker:
    """A proxy for one server. *path*: listen on a UNIX socket there instead of on a port."""

    def __init__(self, upstream: Address, *, path: Path | None = None) -> None:
        self._upstream = upstream
        if path is None:
            self._listener = socket.create_server((_HOST, 0), backlog=64)
            self.port: int = self._listener.getsockname()[1]
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(path))
            self._listener.listen(64)
        self.pieces = 0
        """How many pieces the server has sent since the last change of mode."""
        self._change: Callable[[int, bytes, socket.socket], None] = _honest
        self._lock = threading.Lock()
        self._last = b""
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    # --- what it does ---

    def relent(self) -> None:
        """Forward everything unchanged from now on."""
        self._set(_honest)

    def garble(self, seed: int, at: int, *, times: int = 1) -> None:
        """Forward the next *at* pieces of data, and then change *times* pieces."""
        rng = random.Random(seed)

        def change(number: int, data: bytes, client: socket.socket) -> None:
            if at <= number < at + times:
                self._garble(rng, data, client)
            else:
                client.sendall(data)

        self._set(change)

    def dribble(self, every: float, *, since: int = 0) -> None:
        """Forward one byte per *every* seconds, from piece number *since* on."""

        def change(number: int, data: bytes, client: socket.socket) -> None:
            if number < since:
                client.sendall(data)
                return
            for at in range(len(data)):
                client.sendall(data[at : at + 1])
                time.sleep(every)

        self._set(change)

    # --- how ---

    def _set(self, change: Callable[[int, bytes, socket.socket], None]) -> None:
        with self._lock:
            self._change, self.pieces = change, 0

    def _garble(self, rng: random.Random, data: bytes, client: socket.socket) -> None:  # noqa: C901, PLR0912 - a list
        kind = rng.choice(_KINDS)
        at = rng.randrange(len(data))
        if kind == "cut":
            client.sendall(data[:at])
            client.shutdown(socket.SHUT_RDWR)
        elif kind == "silence":
            client.sendall(data[:at])
        elif kind == "flip":
            client.sendall(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        elif kind == "flips":
            garbled = bytearray(data)
            for _ in range(rng.choice([2, 5, 20])):
                garbled[rng.randrange(len(data))] = rng.randrange(256)
            client.sendall(garbled)
        elif kind == "number":
            found = list(_NUMBER.finditer(data))
            if found:
                one = rng.choice(found)
                data = data[: one.start()] + rng.choice(_NUMBERS) + data[one.end() :]
            client.sendall(data)
        elif kind == "size":  # the size of a MySQL packet; in other protocols the first bytes of a reply
            client.sendall(
                rng.choice([b"\xff\xff\xff", b"\0\0\0", b"\1\0\0", bytes([data[0] ^ 1, *data[1:3]])]) + data[3:]
            )
        elif kind == "insert":
            client.sendall(data[:at] + rng.choice(_INSERTS) + data[at:])
        elif kind == "drop":
            client.sendall(data[:at] + data[at + rng.choice([1, 2, 4, 8, 50]) :])
        elif kind == "repeat":
            client.sendall(data * rng.choice([2, 3, 50]))
        elif kind == "swap":
            client.sendall(self._last or data[::-1])
        elif kind == "noise":
            client.sendall(rng.randbytes(rng.choice([1, 4, 5, 100, 5000])))
        else:
            client.sendall(bytes(len(data)))

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX if isinstance(self._upstream, str) else socket.AF_INET)
            self._sockets += [client, server]
            try:
                server.connect(self._upstream)
                threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
                threading.Thread(target=self._replies, args=(client, server), daemon=True).start()
            except OSError:
                client.close()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(_CHUNK):
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _replies(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(_CHUNK):
                with self._lock:
                    change, number = self._change, self.pieces
                    self.pieces += 1
                change(number, data, client)
                self._last = data
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def _honest(_number: int, data: bytes, client: socket.socket) -> None:
    client.sendall(data)
