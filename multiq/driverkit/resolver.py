"""Resolves host names with a deadline. The system's resolver has no deadline.

A thread resolves a name, and may run beyond the deadline if the resolver is slow. If other callers need the same name
in the meantime, they wait for the same thread. So there is at most one thread for each name.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - getaddrinfo needs it; an import that runs during a fork never ends in the child
import socket
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from .fork import forks

# the key begins with the fork generation, because a child has none of its parent's threads
_pending: dict[tuple[int, str, int], Future[list[Any]]] = {}


class NameTimeoutError(TimeoutError):
    """A name was not resolved in time."""


def resolve(host: str, port: int, deadline: float) -> list[Any]:
    """Return the result of ``socket.getaddrinfo`` for TCP. Raises ``OSError``, and ``NameTimeoutError`` at
    *deadline*.
    """
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
    except RuntimeError:  # no thread can be started, so this thread resolves the name, without a deadline
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
