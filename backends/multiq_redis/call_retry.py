"""Retries a call whose first attempt failed: on a new connection, on another server, later, or with the script's text.

All attempts send the same call with the same number, so it has one effect however many of them arrive.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import hiredis

from multiq.errors import BackendError

from .connection import pack
from .errors import ELSEWHERE, FAILURES, PASSING, code_of, explain, redirection
from .topology import format_address

if TYPE_CHECKING:
    from multiq.driverkit.net import Address

    from .client import Call, Client
    from .connection import Connection

_FIRST_PAUSE = 0.01  # seconds before the next attempt after a temporary error
_LONGEST_PAUSE = 0.25
_REDIRECTIONS = frozenset({"MOVED", "ASK"})
_AT_ONCE = 3  # redirections that are followed without a pause
_ASKING = pack(("ASKING",))


class CallRetry:
    """The attempts of one call after the first, until it is answered, refused for good, or its deadline has passed."""

    def __init__(
        self, client: Client, call: Call, deadline: float, address: Address | None, connection: Connection | None
    ) -> None:
        self._client = client
        self._servers = client.servers
        self._call = call
        self._deadline = deadline
        self._address = address
        self._connection = connection
        self._pause = _FIRST_PAUSE
        self._sends_text = False  # the script's text, to a server that does not know its digest
        self._has_lost_a_reply = False
        self._may_be_done = False  # an attempt was sent and not answered: an error of a later one does not change that
        self._redirections = 0
        self._ask_redirect: Address | None = None  # where a slot is being moved to; for one attempt

    def run(self) -> Any:
        """Repeat the call until there is a reply. Raises as ``handle`` does."""
        while True:
            try:
                return self._attempt()
            except (hiredis.ReplyError, *FAILURES) as exc:
                self.handle(exc)
            except BackendError as exc:  # the partition's server is unknown by now
                exc.may_be_done = self._may_be_done
                raise

    def handle(self, exc: Exception) -> None:
        """Prepare the next attempt after this error, waiting if it is temporary, or raise ``BackendError``."""
        if isinstance(exc, hiredis.ReplyError):
            if not self._can_go_on(exc):
                self._wait_or_raise(exc, is_passing=self._is_passing(exc))
        else:
            self._may_be_done = self._may_be_done or (
                self._connection is not None and not getattr(exc, "unsent", False)
            )
            self._client.abandon(self._address)
            if not self._may_repeat_at_once(exc):
                self._wait_or_raise(exc, is_passing=self._servers.has_others)

    def _attempt(self) -> Any:
        self._connection = None
        ask_redirect, self._ask_redirect = self._ask_redirect, None
        self._address = ask_redirect or self._servers.address(self._call.partition, self._deadline)
        self._connection = connection = self._client.connection_to(self._address, self._deadline)
        packed = self._client.packed(self._call, connection, with_text=self._sends_text)
        deadline = self._servers.attempt_deadline(self._deadline)
        if not ask_redirect:
            return connection.ask(packed, deadline)
        connection.send(_ASKING + packed, deadline, replies=2)
        try:
            connection.read(deadline)
        except hiredis.ReplyError:
            connection.close()  # the reply to the call itself is still to come
            raise
        return connection.read(deadline)

    def _can_go_on(self, exc: hiredis.ReplyError) -> bool:
        """Whether the reply says what to do instead, so that the next attempt needs no pause."""
        code = code_of(exc)
        if code == "NOSCRIPT" and not self._sends_text:
            self._sends_text = True
            return True
        if code in _REDIRECTIONS and self._servers.is_cluster and isinstance(self._address, tuple):
            host, port = redirection(exc)
            there = self._servers.remapped((host, port)) if host else (self._address[0], port)
            if code == "ASK":
                self._ask_redirect = there
            else:
                self._servers.moved(self._call.partition, there)
            self._redirections += 1
            return self._redirections <= _AT_ONCE  # nodes that disagree redirect in a circle
        return False

    def _is_passing(self, exc: hiredis.ReplyError) -> bool:
        code = code_of(exc)
        if code in ELSEWHERE or (code == "NOREPLICAS" and self._servers.has_others):  # there may be a new primary
            self._client.abandon(self._address)
        if code in _REDIRECTIONS and self._servers.is_cluster:
            return True
        return code in PASSING or (code in ELSEWHERE and self._servers.has_others)

    def _may_repeat_at_once(self, exc: Exception) -> bool:
        """Whether this is the first broken connection of the call: an idle one closed unnoticed, or a lost reply."""
        is_first = self._connection is not None and not self._has_lost_a_reply
        self._has_lost_a_reply = True
        return is_first and not isinstance(exc, TimeoutError)

    def _explained(self, exc: Exception, place: str) -> BackendError:
        error = explain(exc, place, self._servers.timeout)
        error.may_be_done = self._may_be_done
        return error

    def _wait_or_raise(self, exc: Exception, *, is_passing: bool) -> None:
        if not is_passing or time.monotonic() + self._pause >= self._deadline:
            place = "the server" if self._address is None else format_address(self._address)
            raise self._explained(exc, place) from exc
        time.sleep(self._pause)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
