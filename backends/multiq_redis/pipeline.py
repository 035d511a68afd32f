"""Makes several calls to different partitions in one round trip: all are sent before the first reply is read.

A call that fails in the pipeline is retried alone, with the same call number, by ``Client.perform``, which handles lost
replies, redirections and missing scripts. The number ensures that the call still has only one effect.
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
"""It was sent and has no reply: the server may have carried it out."""


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
                for at in indexes:  # before sending: a part of the bytes is enough for some calls
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
        for address in in_flight:  # interrupted: the outstanding replies would be taken for those to later calls
            client.abandon(address)
    return replies


def _read_replies(connection: Connection, indexes: Sequence[int], replies: list[Any], deadline: float) -> bool:
    """Read one server's replies, until one of them does not arrive. Returns whether all of them arrived."""
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
