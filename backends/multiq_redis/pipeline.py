"""Several calls to different lines in one round trip: all are sent before the first reply is read.

What goes wrong in the crowd is done again alone, under the same number, with all that ``Caller.perform`` knows of lost
replies, redirections and missing scripts. So nothing is said twice here, and a call still has one effect.
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

    from .client import Call, Caller
    from .connection import Wire

_NONE_YET = object()
_LOST = object()
"""There is no reply to what was sent: it may have been done."""


def call_together(caller: Caller, calls: Sequence[Call], deadline: float | None = None) -> list[Any]:
    """The replies to *calls*, in their order; for a call that failed its ``BackendError``.

    No two calls may be numbered and for the same line: the server remembers one for each.
    """
    if len(calls) == 1:
        return [_alone(caller, calls[0], deadline)]
    if deadline is None:
        deadline = time.monotonic() + caller.servers.timeout
    replies = _in_a_crowd(caller, calls, deadline)
    return [
        _alone(caller, call, deadline, may_be_done=reply is _LOST) if reply is _NONE_YET or reply is _LOST else reply
        for call, reply in zip(calls, replies, strict=True)
    ]


def _in_a_crowd(caller: Caller, calls: Sequence[Call], deadline: float) -> list[Any]:
    replies = [_NONE_YET] * len(calls)
    one_try = caller.servers.one_try
    try:
        by_address: dict[Address, list[int]] = {}
        for at, call in enumerate(calls):
            by_address.setdefault(caller.servers.address(call.line, deadline), []).append(at)
    except (*FAILURES, BackendError, hiredis.ReplyError):
        return replies
    under_way: dict[Address, tuple[Wire, list[int]]] = {}
    try:
        for address, places in by_address.items():
            try:
                wire = caller.wire_to(address, deadline)
                packed = b"".join(caller.packed(calls[at], wire) for at in places)
                for at in places:  # before it is sent: a part of it is enough for some
                    replies[at] = _LOST
                wire.send(packed, one_try(deadline), replies=len(places))
            except (*FAILURES, BackendError, hiredis.ReplyError):
                caller.abandon(address)
                continue
            under_way[address] = wire, places
        while under_way:
            address, (wire, places) = next(iter(under_way.items()))
            if not _hear(wire, places, replies, one_try(deadline)):
                caller.abandon(address)
            del under_way[address]
    finally:
        for address in under_way:  # interrupted: what is still to come would be taken for the answer to something else
            caller.abandon(address)
    return replies


def _hear(wire: Wire, places: Sequence[int], replies: list[Any], deadline: float) -> bool:
    """The replies of one server, as many as come. Returns whether all did."""
    for at in places:
        try:
            replies[at] = wire.read(deadline)
        except hiredis.ReplyError:
            replies[at] = _NONE_YET
        except FAILURES:
            return False
    return True


def _alone(caller: Caller, call: Call, deadline: float | None, *, may_be_done: bool = False) -> Any:
    try:
        return caller.perform(call, deadline)
    except BackendError as exc:
        exc.may_be_done = exc.may_be_done or may_be_done
        return exc
