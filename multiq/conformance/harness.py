"""The harness: the class through which the suite uses a driver. The tests of each driver subclass ``Harness``."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlunsplit

import msgspec

from multiq.backend import Ack, Drop, NewJob, State
from multiq.backend.registry import installed, load_driver, open_backend
from multiq.driverkit.clock import SECOND, ManualClock
from multiq.errors import OptionInvalid
from multiq.fault_proxy import Proxy
from multiq.ids import new_id
from multiq.settings.url import split

from .requirements import NotTriedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from multiq.backend import Backend
    from multiq.backend.capabilities import Capabilities, Gap

    from .external_connections import ExternalConnection


_MOST_AT_ONCE = 1000  # jobs
_PORTS = {"beanstalk": 11300, "mysql": 3306, "redis": 6379}  # maps a scheme to the port of a URL that names no port


class Harness(ABC):
    """Opens backends of one driver for the suite. Each test has its own harness.

    A subclass must define ``open``. All methods of the harness except ``open`` are optional. The suite does not know
    which store it tests. The backend's capabilities decide which tests run, and which times the tests use.
    """

    # --- settings: a subclass or an instance may set them ---

    slack: float = 0.1
    """How many seconds late the store may notice that a due time has passed or a lease has ended. A job may be late by
    up to the slack, but it is never early.
    """

    rounds: int = 25
    """The number of times that each race is run."""

    threads: int = 4
    """The number of consumers or producers in a race."""

    walks: int = 24
    """The number of random walks. A walk is a random sequence of calls. The answers of a walk are compared with the
    answers of the memory backend."""

    patience: float = 10.0
    """A waiting consumer must wake within this number of seconds."""

    deadline: float = 1.0
    """How many seconds a call may take through the proxy of ``proxied``."""

    gaps: Mapping[str, Gap] = {}
    """Maps each capability that the driver claims but this installation lacks to the reason. For example, the server
    may have no log."""

    real_time: ClassVar[bool] = True
    """Whether ``advance`` waits in real time."""

    def __init__(self) -> None:
        self.prefix = f"conformance.{secrets.token_hex(4)}"
        self.handed_out: list[str] = []
        """The names that ``fresh_queue`` has returned."""

    # --- must be written ---

    @abstractmethod
    def open(self) -> Backend:
        """Open another backend object on the same store. All backend objects see the same jobs. The suite closes each
        object.
        """

    # --- may be written ---

    def now(self) -> float:
        """The time in seconds on the clock that ``advance`` moves. The clock's zero is arbitrary."""
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass for the store. If the store's clock cannot be moved, the method sleeps."""
        time.sleep(max(0.0, seconds))

    def transaction(self) -> AbstractContextManager[ExternalConnection]:
        """Open a DB-API connection to the backend's database, in a new transaction and without multiq.

        The suite passes the connection to ``enqueue(connection=)`` and then calls the connection's ``commit`` or
        ``rollback``. If a harness lacks ``transaction``, the tests of ``transactional_enqueue`` do not run.
        """
        raise NotTriedError(
            "transactional_enqueue: there is no connection to test it with: override "
            f"{type(self).__name__}.transaction()"
        )

    def proxied(self) -> tuple[Proxy, Backend]:
        """Open a proxy in front of the server, and a backend whose connections all go through the proxy. The suite
        closes the proxy and the backend.

        Calls of the backend behind the proxy time out after ``self.deadline`` seconds. If a harness lacks ``proxied``,
        the tests of lost replies and of servers that hang do not run.
        """
        raise NotTriedError(
            f"there is no proxy between the backend and its server: override {type(self).__name__}.proxied()"
        )

    def restart(self) -> None:  # noqa: B027 - a hook; most harnesses have nothing to restart
        """Restart the server that holds the jobs. The suite calls this hook while all backends are closed.

        By default, this method does nothing. A harness that has started its own server overrides this method.
        """

    def requests_served(self) -> int | None:
        """The number of requests that the server has answered so far. The suite computes the difference of two counts.
        The count is None if it is not known.
        """
        return None

    def fresh_queue(self, ending: str = "") -> str:
        """A queue name that has not been used before."""
        name = f"{self.prefix}.{len(self.handed_out)}{ending}"
        self.handed_out.append(name)
        return name

    def close(self) -> None:
        """Remove what the test has left in the store. By default, this method empties the queues in ``handed_out``."""
        with self.open() as backend:
            for name in self.handed_out:
                remove_jobs(backend, name)

    # --- used by the suite ---

    def capabilities(self, backend: Backend) -> Capabilities:
        """The capabilities of *backend*, without those in this harness's ``gaps``."""
        return msgspec.structs.replace(backend.capabilities, **self.gaps)

    def nearly(self, moment: float) -> None:
        """Let time pass until shortly before *moment*. If *moment* is near already, the method does nothing."""
        self.advance(moment - self.now() - (0.3 if self.real_time else 0.001))

    def past(self, moment: float) -> None:
        """Let time pass until ``slack`` seconds after *moment*."""
        while (left := moment + self.slack - self.now()) > 0:
            self.advance(left)


class ManualHarness(Harness):
    """A harness for a driver whose clock can be set. ``open`` must pass ``self.clock`` to the driver. The tests then
    move the harness's clock instead of waiting.
    """

    slack = 1e-6
    walks = 100
    real_time: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self._started = self.clock()

    def now(self) -> float:
        return (self.clock() - self._started) / SECOND

    def advance(self, seconds: float) -> None:
        if seconds > 0:
            self.clock.advance(seconds)


class UrlHarness(Harness):
    """A harness for the backend at a URL. The tests run in real time, in new queues. Each test empties its queues at
    the end."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self._only: Backend | None = None  # the only backend object, for a URL whose objects each have their own store
        self._first: Backend | None = None

    @classmethod
    def of(cls, url: str) -> type[Harness]:
        """Make a harness class for ``suite``. All instances of this class use *url*."""

        class HarnessOfUrl(cls):  # type: ignore[valid-type, misc]
            def __init__(self) -> None:
                super().__init__(url)

        return HarnessOfUrl

    def open(self) -> Backend:
        if self._only is not None:
            return self._only
        backend = open_backend(self.url)
        if self._first is None:
            self._first = backend
        elif not backend.capabilities.shared and not self._share(self._first, backend):
            self._only = self._first
            return self._only
        return backend

    def transaction(self) -> AbstractContextManager[ExternalConnection]:
        from .external_connections import connect

        return self._transaction(connect(self.url))

    def proxied(self) -> tuple[Proxy, Backend]:
        parts = split(self.url)
        options = load_driver(parts.scheme).options if parts.scheme in installed() else {}
        credentials, at, place = parts.netloc.rpartition("@")
        if "," in place or not parts.hostname or "timeout" not in options or not (parts.port or parts.scheme in _PORTS):
            raise NotTriedError(
                "there is no proxy between the backend and its server: the URL must have one host and its port, must "
                "not use TLS, and its driver must take ?timeout=; or --harness must name a harness with proxied()"
            )
        proxy = Proxy((parts.hostname, parts.port or _PORTS[parts.scheme]))
        query = "&".join(pair for pair in parts.query.split("&") if pair and not pair.startswith("timeout="))
        query += f"{'&' if query else ''}timeout={self.deadline:g}"
        parts = parts._replace(netloc=f"{credentials}{at}{proxy.host}:{proxy.port}", query=query)
        return proxy, open_backend(urlunsplit(parts))

    @contextlib.contextmanager
    def _transaction(self, connection: ExternalConnection) -> Iterator[ExternalConnection]:
        try:
            yield connection
        finally:
            connection.rollback()
            connection.close()

    def _share(self, one: Backend, other: Backend) -> bool:
        """Whether two backend objects of one URL share their jobs. Two objects of ``memory://`` share no jobs, because
        each has a new store.
        """
        queue = self.fresh_queue()
        one.enqueue(queue, [NewJob(b"", new_id())])
        return _take_all(other, queue) > 0 or not _take_all(one, queue)


def remove_jobs(backend: Backend, queue: str) -> None:
    """End a queue's pause and delete its jobs, outcomes and notes. If the backend lacks ``purging``, delayed jobs
    remain."""
    if backend.capabilities.outcomes:
        while outcomes := backend.history(queue, limit=_MOST_AT_ONCE).outcomes:
            backend.forget(queue, [outcome.id for outcome in outcomes])
        backend.forget(queue)
    if backend.capabilities.notes and backend.capabilities.holds:
        while notes := backend.notes(queue, limit=_MOST_AT_ONCE).notes:
            backend.carry_out([Drop(queue, note.key) for note in notes])
    if backend.capabilities.pausing:
        backend.resume(queue)
    if backend.capabilities.purging:
        states = [State.READY, State.DELAYED, State.BURIED]
        backend.purge(queue, [*states, State.HELD] if backend.capabilities.holds else states)
        return
    while _take_all(backend, queue) or backend.kick(queue, _MOST_AT_ONCE):
        pass


def _take_all(backend: Backend, queue: str) -> int:
    count = 0
    with backend.consumer([queue]) as consumer:
        while leases := consumer.reserve(_MOST_AT_ONCE, 0):
            consumer.settle([Ack(lease) for lease in leases])
            count += len(leases)
    return count


def first_contact(harness: Harness) -> Capabilities:
    """Make one call to find out whether the backend answers. Returns the backend's capabilities.

    Raises the ``MultiqError`` of a backend that does not answer. The error of an unreachable backend is raised by this
    call, and not again in each test.
    """
    with harness.open() as backend:
        backend.stats(harness.fresh_queue())
        capabilities = harness.capabilities(backend)
    harness.close()
    return capabilities


def load_harness(path: str) -> type[UrlHarness]:
    """Import the class with the path ``module:Class``, from the current folder or from an installed package. Raises
    ``OptionInvalid``.
    """
    name, _, attribute = path.partition(":")
    folder = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        raise OptionInvalid(f"--harness must be MODULE:CLASS, got {path!r}: {exc}") from exc
    if not (isinstance(found, type) and issubclass(found, UrlHarness)):
        raise OptionInvalid(f"--harness must name a subclass of multiq.conformance.UrlHarness, got {path!r}: {found!r}")
    return found
