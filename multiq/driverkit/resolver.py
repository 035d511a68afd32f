"""From a host's name to its addresses, within a deadline: the system's resolver knows none.

A name is looked up in a thread, which a slow resolver keeps for as long as it likes; whoever wants the same name
meanwhile waits for the same answer, so that there is one such thread for each name at most.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - getaddrinfo needs it, and an import that is under way when somebody forks never ends there
import os
import socket
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

_under_way: dict[tuple[int, str, int], Future[list[Any]]] = {}  # by process: a forked child has none of its threads


class NameTimeoutError(TimeoutError):
    """A name was not found in time."""


def addresses(host: str, port: int, deadline: float) -> list[Any]:
    """What ``socket.getaddrinfo`` returns for TCP. Raises ``OSError``; ``NameTimeoutError`` at the deadline."""
    with contextlib.suppress(socket.gaierror):  # an address in digits needs nobody's help
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    key = os.getpid(), host, port
    mine: Future[list[Any]] = Future()
    answer = _under_way.setdefault(key, mine)
    if answer is mine:
        _start(key, mine)
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError as exc:
        raise NameTimeoutError(f"{host} was not found in time") from exc


def _start(key: tuple[int, str, int], answer: Future[list[Any]]) -> None:
    try:
        threading.Thread(target=_look_up, args=(key, answer), name=f"multiq-name-{key[1]}", daemon=True).start()
    except RuntimeError:  # no thread is to be had, so it takes what it takes
        _look_up(key, answer)


def _look_up(key: tuple[int, str, int], answer: Future[list[Any]]) -> None:
    _, host, port = key
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        _under_way.pop(key, None)
        answer.set_exception(exc)
    else:
        _under_way.pop(key, None)
        answer.set_result(found)
