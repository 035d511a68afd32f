"""Runs a transaction again after a deadlock, after a lock wait timeout, and after a lost connection.

====================  ======================================================================  =======================
error                 what has happened to the transaction                                    what is done
====================  ======================================================================  =======================
deadlock (1213), lock the server has rolled it back, or ``Connection.attempt`` does           run again after a pause
wait timeout (1205)                                                                           of milliseconds
and other conflicts
lost reply            it may have been committed; its receipt or ticket shows this to the     run again at once, on a
                      next attempt (receipts.py)                                              new connection
read-only server      nothing; the address may lead to another server by now                  run again at once, on a
                                                                                              new connection
other errors          it is rolled back                                                       the error is raised
====================  ======================================================================  =======================

``multiq.driverkit.call_retry`` decides when the next attempt is made. errors.py says which error is which failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from multiq.driverkit.call_retry import Attempts
from multiq.errors import BackendError

from .errors import READ_ONLY, classify, code_of, explain, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .connection import Connection, Session
    from .pool import Pool
    from .receipts import Proof

_T = TypeVar("_T")


class AttemptFailed(Exception):
    """An attempt of a transaction has ended with an error of the server or of the connection."""

    def __init__(self, error: Exception, proof: Proof | None, *, is_connected: bool, is_broken: bool) -> None:
        """Parameters:
        proof: the receipt or ticket of the transaction, if the reply to its COMMIT was lost.
        is_connected: whether a connection could be opened.
        is_broken: whether the connection cannot be used any more, because the reply was not read to its end.
        """
        self.error = error
        self.proof = proof
        self.is_connected = is_connected
        self.is_broken = is_broken


class DeadlockRetry:
    """Makes the second and all later attempts of a transaction. The attempts end with a result or with a final error,
    or when the time is over."""

    def __init__(self, connection: Connection, pool: Pool, deadline: float) -> None:
        self._connection = connection
        self._pool = pool
        self._deadline = deadline
        self._attempts = Attempts(deadline)
        self._errors: list[BaseException] = []
        self._unconfirmed: list[Proof] = []
        """The receipts and tickets of the attempts whose reply was lost."""

    def run(self, work: Callable[[Session], _T], failed: AttemptFailed) -> _T:
        """Run *work* again until an attempt succeeds, and return its result. *failed*: the failure of the first
        attempt.

        Raises ``BackendError`` if there is no next attempt, and the errors of *work*.
        """
        while self._goes_on(failed):
            try:
                return self._connection.attempt(work, self._deadline, self._unconfirmed)
            except AttemptFailed as exc:
                failed = exc
        error = explain(reason_of(self._errors), self._pool.dsn.place, self._pool.timeout)
        if isinstance(error, BackendError):
            error.may_be_done = self._attempts.may_be_done
        raise error from failed.error

    def _goes_on(self, failed: AttemptFailed) -> bool:
        """Sleep until the next attempt. Returns False if there is no next attempt."""
        if failed.proof is not None:
            self._unconfirmed.append(failed.proof)
        if code_of(failed.error) in READ_ONLY:
            self._pool.close()  # By now, the address may lead to another server.
        self._errors.append(failed.error)
        return self._attempts.again(
            classify(failed.error, is_connected=failed.is_connected, is_broken=failed.is_broken)
        )
