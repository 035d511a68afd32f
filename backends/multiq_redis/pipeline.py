"""Makes several calls to different partitions in one round trip. All calls are sent before the first reply is read.

``Client.perform`` retries each failed call alone, with the same call number. The number ensures that the call still has
only one effect.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import hiredis

from multiq.errors import BackendError

from .errors import FAILURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.driverkit.net import Address

    from .client import Call, Client
    from .connection import Connection

_NONE_YET = object()
_LOST = object()
"""Replaces the missing reply to a call that was sent. The server may have carried out the call."""


def call_pipelined(client: Client, calls: Sequence[Call], deadline: float | None = None) -> list[Any]:
    """Return the replies to *calls*, as ``Client.perform_each`` says."""
    if deadline is None:
        deadline = time.monotonic() + client.servers.timeout
    replies = _send_pipelined(client, calls, deadline)
    return [
        _call_single(client, call, deadline, may_be_done=reply is _LOST)
        if reply is _NONE_YET or reply is _LOST
        else reply
        for call, reply in zip(calls, replies, strict=True)
    ]


def _send_pipelined(client: Client, calls: Sequence[Call], deadline: float) -> list[Any]:
    replies = [_NONE_YET] * len(calls)
    attempt_deadline = client.servers.attempt_deadline
    try:
        by_address: dict[Address, list[int]] = {}
        for at, call in enumerate(calls):
            by_address.setdefault(client.servers.address(call.partition, deadline), []).append(at)
    except (*FAILURES, BackendError, hiredis.ReplyError):
        return replies
    in_flight: dict[Address, tuple[Connection, list[int]]] = {}
    try:
        for address, indexes in by_address.items():
            try:
                connection = client.connection_to(address, deadline)
                packed = b"".join(client.packed(calls[at], connection) for at in indexes)
                for at in indexes:  # set before the send, because a partial send may contain a whole call
                    replies[at] = _LOST
                connection.send(packed, attempt_deadline(deadline), replies=len(indexes))
            except (*FAILURES, BackendError, hiredis.ReplyError):
                client.abandon(address)
                continue
            in_flight[address] = connection, indexes
        while in_flight:
            address, (connection, indexes) = next(iter(in_flight.items()))
            if not _read_replies(connection, indexes, replies, attempt_deadline(deadline)):
                client.abandon(address)
            del in_flight[address]
    finally:
        for address in in_flight:  # after an interruption; later calls would read these replies
            client.abandon(address)
    return replies


def _read_replies(connection: Connection, indexes: Sequence[int], replies: list[Any], deadline: float) -> bool:
    """Read one server's replies. Returns whether all replies arrived."""
    for at in indexes:
        try:
            replies[at] = connection.read(deadline)
        except hiredis.ReplyError:
            replies[at] = _NONE_YET
        except FAILURES:
            return False
    return True


def _call_single(client: Client, call: Call, deadline: float | None, *, may_be_done: bool = False) -> Any:
    try:
        return client.perform(call, deadline)
    except BackendError as exc:
        exc.may_be_done = exc.may_be_done or may_be_done
        return exc
