"""Retries a call whose first attempt failed.

All attempts send the same call with the same number. So the call has only one effect, even if several attempts arrive.
``multiq.driverkit.call_retry`` decides when the next attempt is made. This module sends a script's text to a server
that does not know the script's digest. ``cluster.py`` follows the redirections of a cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hiredis

from multiq.driverkit.call_retry import Attempts, Failure
from multiq.errors import BackendError

from .cluster import Redirections, ask_with_asking
from .errors import ELSEWHERE, FAILURES, REDIRECTIONS, classify_connection_error, classify_reply, code_of, explain
from .servers import format_address

if TYPE_CHECKING:
    from multiq.driverkit.net import Address

    from .client import Call, Client
    from .connection import Connection


class CallRetry:
    """Makes the second and all later attempts of a call. The attempts end when there is a reply or a final error, or
    when the time is over."""

    def __init__(
        self, client: Client, call: Call, deadline: float, address: Address | None, connection: Connection | None
    ) -> None:
        self._client = client
        self._servers = client.servers
        self._call = call
        self._deadline = deadline
        self._address = address
        self._connection = connection
        self._attempts = Attempts(deadline, has_failover=client.servers.has_others)
        self._sends_text = False  # whether to send the script's text instead of its digest
        self._redirections = Redirections(client.servers, call.partition)

    def run(self) -> Any:
        """Repeat the call until there is a reply. Raises the errors of ``handle``."""
        while True:
            try:
                return self._attempt()
            except (hiredis.ReplyError, *FAILURES) as exc:
                self.handle(exc)
            except BackendError as exc:  # no server of the partition is known any more
                exc.may_be_done = self._attempts.may_be_done
                raise

    def handle(self, exc: Exception) -> None:
        """Prepare the next attempt after this error, with a pause if one is needed.

        Raises ``BackendError`` if there is no next attempt.
        """
        if isinstance(exc, hiredis.ReplyError):
            if self._can_go_on(exc):
                return
            failure = self._refusal(exc)
        else:
            failure = classify_connection_error(exc, is_connected=self._connection is not None)
            self._client.abandon(self._address)
        if not self._attempts.again(failure):
            raise self._explained(exc) from exc

    def _attempt(self) -> Any:
        self._connection = None
        ask_node = self._redirections.take_ask_node()
        self._address = ask_node or self._servers.address(self._call.partition, self._deadline)
        self._connection = connection = self._client.connection_to(self._address, self._deadline)
        packed = self._client.packed(self._call, connection, with_text=self._sends_text)
        deadline = self._servers.attempt_deadline(self._deadline)
        return ask_with_asking(connection, packed, deadline) if ask_node else connection.ask(packed, deadline)

    def _can_go_on(self, exc: hiredis.ReplyError) -> bool:
        """Whether to repeat the call without a pause, with the script's text or at another node."""
        if code_of(exc) == "NOSCRIPT" and not self._sends_text:
            self._sends_text = True
            return True
        return self._redirections.follow(exc, self._address)

    def _refusal(self, exc: hiredis.ReplyError) -> Failure:
        code = code_of(exc)
        if code in ELSEWHERE or (code == "NOREPLICAS" and self._servers.has_others):  # there may be a new primary
            self._client.abandon(self._address)
        if code in REDIRECTIONS and self._servers.is_cluster:
            return Failure.REJECTED
        return classify_reply(exc, has_failover=self._servers.has_others)

    def _explained(self, exc: Exception) -> BackendError:
        place = "the server" if self._address is None else format_address(self._address)
        error = explain(exc, place, self._servers.timeout)
        error.may_be_done = self._attempts.may_be_done
        return error
