"""Name resolution with a deadline, which the system's resolver does not have.

A name is resolved in a thread, which may outlive the deadline if the resolver is slow. Callers that want the same name
meanwhile wait for the same thread: each name has one thread at most.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - getaddrinfo needs it, and an import that is under way during a fork never ends in the child
import socket
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from .fork import forks

_pending: dict[tuple[int, str, int], Future[list[Any]]] = {}  # by fork generation, too: a child has none of the threads


class NameTimeoutError(TimeoutError):
    """A name was not resolved in time."""


def resolve(host: str, port: int, deadline: float) -> list[Any]:
    """Return what ``socket.getaddrinfo`` finds for TCP. Raises ``OSError``; at the deadline ``NameTimeoutError``."""
    with contextlib.suppress(socket.gaierror):  # an address in digits needs no resolver
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    key = forks.generation, host, port
    mine: Future[list[Any]] = Future()
    answer = _pending.setdefault(key, mine)
    if answer is mine:
        _start(key, mine)
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError as exc:
        raise NameTimeoutError(f"{host} was not resolved in time") from exc


def _start(key: tuple[int, str, int], answer: Future[list[Any]]) -> None:
    try:
        threading.Thread(target=_look_up, args=(key, answer), name=f"multiq-name-{key[1]}", daemon=True).start()
    except RuntimeError:  # no thread can be started: resolve here, without a deadline
        _look_up(key, answer)


def _look_up(key: tuple[int, str, int], answer: Future[list[Any]]) -> None:
    _, host, port = key
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        _pending.pop(key, None)
        answer.set_exception(exc)
    else:
        _pending.pop(key, None)
        answer.set_result(found)
