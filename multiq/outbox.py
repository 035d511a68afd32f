"""Outboxes. An outbox has jobs that wait in an application's own database until they are enqueued.

Without an outbox, ``connection=`` works only with a backend that can take part in the application's transaction. For
other backends, an outbox stores the jobs within the application's transaction, in a table of the application's
database. After the transaction's end, a *relay* enqueues the stored jobs. ``multiq.contrib.sqlalchemy`` has an outbox.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import ConnectionElsewhere, MultiqError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .app import App
    from .backend import Backend, NewJob

_log = logging.getLogger("multiq.outbox")

_known: tuple[weakref.ref[Outbox], ...] = ()
"""All outboxes of this process. A change replaces the tuple, because other threads may read the old tuple."""


class OutboxJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that waits in an outbox."""

    queue: str
    id: str
    """The job's id in the outbox. On a backend without ``client_ids``, the job gets another id when it is enqueued."""
    age: float
    """Seconds since the job was stored. The clock of the storing process gives the time of storage, and the clock of
    this process gives the time now."""
    attempts: int
    """How many times a relay has failed to enqueue the job."""
    retry_in: float
    """Seconds until a relay may enqueue the job. 0 means that a relay may enqueue the job now."""
    error: str
    """The error of the last failed relay of this job. The text is empty if no relay of the job has failed."""


class Outbox(ABC):
    """The waiting jobs of one app in one database."""

    app: App
    name: str
    """The outbox's name in messages, for example the table's name."""

    _last_error = ""

    def register(self) -> None:
        """Register this outbox, so that enqueues, workers and the command line can find it."""
        global _known  # noqa: PLW0603 - the tuple is replaced, because other threads read the old tuple
        _known = (*(ref for ref in _known if ref() is not None), weakref.ref(self))
        self.app.outboxes.append(self)

    @property
    def is_of_one_thread(self) -> bool:
        """Whether only the thread that stores jobs can relay the jobs, because the database is in memory."""
        return False

    @abstractmethod
    def store(self, queue: str, jobs: Sequence[NewJob], connection: Any) -> list[str] | None:
        """Store jobs within the transaction of *connection*, and return their ids. Return None if the connection does
        not belong to this outbox's database.

        If the backend can take part in the transaction, the jobs are enqueued within the transaction. Raises
        ``MultiqError``.
        """

    @abstractmethod
    def relay(self) -> int:
        """Enqueue the stored jobs, and return their number. Raises the error of the backend or the database."""

    def relay_or_log(self) -> None:
        """Call ``relay``, and log an error. An error is not logged again if the previous call got the same error."""
        try:
            self.relay()
        except MultiqError as exc:
            if str(exc) != self._last_error:
                _log.warning("jobs wait in the outbox %s, and are tried again: %s", self.name, exc)
            self._last_error = str(exc)
        except Exception:  # noqa: BLE001 - a database driver may raise any error
            _log.exception("jobs wait in the outbox %s, and are tried again", self.name)
        else:
            self._last_error = ""

    @abstractmethod
    def waiting(self, limit: int = 100) -> list[OutboxJob]:
        """Return the oldest stored jobs, with the oldest job first."""


def known() -> list[Outbox]:
    """Return the outboxes of this process."""
    return [outbox for ref in _known if (outbox := ref()) is not None]


def of_backend(backend: Backend) -> list[Outbox]:
    """Return the outboxes of this process whose app has this backend."""
    return [outbox for outbox in known() if outbox.app.has_backend and outbox.app.backend is backend]


def store(backend: Backend, queue: str, jobs: Sequence[NewJob], connection: Any) -> list[str]:
    """Enqueue jobs in the transaction of the caller's *connection*, with the backend or with an outbox of the backend's
    app."""
    elsewhere: ConnectionElsewhere | None = None
    for outbox in of_backend(backend):
        try:
            ids = outbox.store(queue, jobs, connection)
        except ConnectionElsewhere as exc:
            elsewhere = exc
        else:
            if ids is not None:
                return ids
    if elsewhere is not None:
        raise elsewhere
    return backend.enqueue(queue, jobs, connection=connection)
