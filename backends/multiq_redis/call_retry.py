"""A call whose first try failed: the same again, on a new connection, elsewhere, later or with the script's text.

It is always the same call with the same number, so however many tries arrive, it has one effect.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import hiredis

from multiq.errors import BackendError

from .connection import pack
from .errors import ELSEWHERE, FAILURES, PASSING, code_of, explain, redirection
from .topology import shown

if TYPE_CHECKING:
    from multiq.driverkit.net import Address

    from .client import Call, Caller
    from .connection import Wire

_FIRST_PAUSE = 0.01  # seconds before another try of what passes by itself
_LONGEST_PAUSE = 0.25
_REDIRECTIONS = frozenset({"MOVED", "ASK"})
_AT_ONCE = 3  # redirections that are followed without a pause
_ASKING = pack(("ASKING",))


class Tries:
    """The tries of one call after the first, until it is answered, refused for good, or its time is over."""

    def __init__(self, caller: Caller, call: Call, deadline: float, address: Address | None, wire: Wire | None) -> None:
        self._caller = caller
        self._servers = caller.servers
        self._call = call
        self._deadline = deadline
        self._address = address
        self._wire = wire
        self._pause = _FIRST_PAUSE
        self._with_text = False  # the script's text, to a server that does not know its digest
        self._has_lost_a_reply = False
        self._may_be_done = False  # a try was sent and not answered: an error of a later one does not change that
        self._redirections = 0
        self._detour: Address | None = None  # where a slot is on its way to; for one try

    def answer(self) -> Any:
        """Try until there is an answer. Raises as ``consider`` does."""
        while True:
            try:
                return self._try()
            except (hiredis.ReplyError, *FAILURES) as exc:
                self.consider(exc)
            except BackendError as exc:  # nobody knows where the line is by now
                exc.may_be_done = self._may_be_done
                raise

    def consider(self, exc: Exception) -> None:
        """What went wrong: see to it that another try may go well, or raise ``BackendError``."""
        if isinstance(exc, hiredis.ReplyError):
            if not self._can_go_on(exc):
                self._wait_or_raise(exc, is_passing=self._is_passing(exc))
        else:
            self._may_be_done = self._may_be_done or (self._wire is not None and not getattr(exc, "unsent", False))
            self._caller.abandon(self._address)
            if not self._may_repeat_at_once(exc):
                self._wait_or_raise(exc, is_passing=self._servers.has_others)

    def _try(self) -> Any:
        self._wire = None
        detour, self._detour = self._detour, None
        self._address = detour or self._servers.address(self._call.line, self._deadline)
        self._wire = wire = self._caller.wire_to(self._address, self._deadline)
        packed = self._caller.packed(self._call, wire, with_text=self._with_text)
        deadline = self._servers.one_try(self._deadline)
        if not detour:
            return wire.ask(packed, deadline)
        wire.send(_ASKING + packed, deadline, replies=2)
        try:
            wire.read(deadline)
        except hiredis.ReplyError:
            wire.close()  # the reply to the call itself is still to come
            raise
        return wire.read(deadline)

    def _can_go_on(self, exc: hiredis.ReplyError) -> bool:
        """Whether the server said what to do instead."""
        code = code_of(exc)
        if code == "NOSCRIPT" and not self._with_text:
            self._with_text = True
            return True
        if code in _REDIRECTIONS and self._servers.is_cluster and isinstance(self._address, tuple):
            host, port = redirection(exc)
            there = (host or self._address[0], port)
            if code == "ASK":
                self._detour = there
            else:
                self._servers.moved(self._call.line, there)
            self._redirections += 1
            return self._redirections <= _AT_ONCE  # nodes that disagree send us to and fro
        return False

    def _is_passing(self, exc: hiredis.ReplyError) -> bool:
        code = code_of(exc)
        if code in ELSEWHERE or (code == "NOREPLICAS" and self._servers.has_others):  # they may follow another by now
            self._caller.abandon(self._address)
        if code in _REDIRECTIONS and self._servers.is_cluster:
            return True
        return code in PASSING or (code in ELSEWHERE and self._servers.has_others)

    def _may_repeat_at_once(self, exc: Exception) -> bool:
        """Whether this is the first connection that broke: an idle one that died unseen, or a lost reply."""
        is_first = self._wire is not None and not self._has_lost_a_reply
        self._has_lost_a_reply = True
        return is_first and not isinstance(exc, TimeoutError)

    def _explained(self, exc: Exception, place: str) -> BackendError:
        error = explain(exc, place, self._servers.timeout)
        error.may_be_done = self._may_be_done
        return error

    def _wait_or_raise(self, exc: Exception, *, is_passing: bool) -> None:
        if not is_passing or time.monotonic() + self._pause >= self._deadline:
            place = "the server" if self._address is None else shown(self._address)
            raise self._explained(exc, place) from exc
        time.sleep(self._pause)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
