"""The harness, which tells the suite about a driver. Each driver has a subclass. Only ``open`` must be written."""

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

from multiq.backend import Ack, NewJob, State
from multiq.backend.registry import installed, load_driver, open_backend
from multiq.driverkit.clock import SECOND, ManualClock
from multiq.errors import OptionInvalid
from multiq.ids import new_id
from multiq.settings.url import split

from .proxy import Proxy
from .requirements import NotTriedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from multiq.backend import Backend
    from multiq.backend.capabilities import Capabilities, Gap

    from .external_connections import ExternalConnection


_MOST_AT_ONCE = 1000  # jobs
_PORTS = {"beanstalk": 11300, "mysql": 3306, "redis": 6379}  # used if a URL names no port


class Harness(ABC):
    """One driver, as the suite uses it. Each test has its own harness.

    ``open`` must be written, and everything else is optional. The suite knows no store by name. It reads the
    differences between stores from the backend's capabilities, and scales its times to these capabilities.
    """

    # --- knobs: plain numbers, set in a subclass or on an instance ---

    slack: float = 0.1
    """Seconds within which the store notices that a moment has passed. A job may be late by this time, but never
    early.
    """

    rounds: int = 25
    """The number of times that each race is run."""

    threads: int = 4
    """The number of consumers or producers in a race."""

    walks: int = 24
    """The number of random walks that are compared with the model."""

    patience: float = 10.0
    """Seconds within which a waiting consumer must wake."""

    deadline: float = 1.0
    """Seconds that a call may take through the proxy of ``proxied``."""

    gaps: Mapping[str, Gap] = {}
    """Reasons for missing capabilities, by the capability's name. The driver declares these capabilities, but this
    installation lacks them, for example because its server has no log.
    """

    real_time: ClassVar[bool] = True
    """Whether ``advance`` waits in real time."""

    def __init__(self) -> None:
        self.prefix = f"conformance.{secrets.token_hex(4)}"
        self.handed_out: list[str] = []
        """The queues that this harness has named. The harness uses no other queues."""

    # --- must be written ---

    @abstractmethod
    def open(self) -> Backend:
        """Open another backend object on the same store. All objects see the same jobs. The suite closes each
        object.
        """

    # --- may be written ---

    def now(self) -> float:
        """The time in seconds on the clock that ``advance`` moves. The clock's zero is arbitrary."""
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass for the store. Sleeps if the store's clock cannot be moved."""
        time.sleep(max(0.0, seconds))

    def transaction(self) -> AbstractContextManager[ExternalConnection]:
        """Open a DB-API connection to the backend's database, in a new transaction and without multiq.

        The suite passes the connection to ``enqueue(connection=)`` and then calls its ``commit`` or ``rollback``.
        Without this hook, ``transactional_enqueue`` is not tried.
        """
        raise NotTriedError(
            "transactional_enqueue: there is no connection to prove it with: override "
            f"{type(self).__name__}.transaction()"
        )

    def proxied(self) -> tuple[Proxy, Backend]:
        """Open a proxy in front of the server, and a backend whose connections all go through the proxy. The suite
        closes both.

        Calls of that backend time out after ``self.deadline`` seconds. Without this hook, lost replies and servers that
        hang are not tried.
        """
        raise NotTriedError(
            f"there is no proxy between the backend and its server: override {type(self).__name__}.proxied()"
        )

    def restart(self) -> None:  # noqa: B027 - a hook; most harnesses have nothing to restart
        """Restart the server that holds the jobs. The suite calls this hook while all backends are closed.

        By default the server is not restarted, and only the clients' memory is lost. The harness of a driver that
        starts its own server overrides this hook.
        """

    def requests_served(self) -> int | None:
        """The number of requests that the server has answered since some fixed moment. None: the number is not
        known.
        """
        return None

    def fresh_queue(self, ending: str = "") -> str:
        """A queue name that has not been used before."""
        name = f"{self.prefix}.{len(self.handed_out)}{ending}"
        self.handed_out.append(name)
        return name

    def close(self) -> None:
        """Remove what the test has left. By default this empties the queues in ``handed_out``, and no others."""
        with self.open() as backend:
            for name in self.handed_out:
                remove_jobs(backend, name)

    # --- used by the suite ---

    def capabilities(self, backend: Backend) -> Capabilities:
        """The capabilities of *backend*, without those in this harness's ``gaps``."""
        return msgspec.structs.replace(backend.capabilities, **self.gaps)

    def nearly(self, moment: float) -> None:
        """Let time pass until shortly before *moment*. Does nothing if *moment* is nearer than that."""
        self.advance(moment - self.now() - (0.3 if self.real_time else 0.001))

    def past(self, moment: float) -> None:
        """Let time pass until ``slack`` seconds after *moment*."""
        while (left := moment + self.slack - self.now()) > 0:
            self.advance(left)


class ManualHarness(Harness):
    """A harness for a driver that takes a clock. ``open`` passes ``self.clock`` to the driver. Tests move this clock
    and do not wait.
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
    """A harness for the backend of a URL. Tests run in real time, in new queues that are emptied afterwards."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self._only: Backend | None = None  # the only backend object, if each new object has a new store
        self._first: Backend | None = None

    @classmethod
    def of(cls, url: str) -> type[Harness]:
        """Make a harness class for ``suite`` whose instances all use *url*."""

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
                "there is no proxy between the backend and its server: give a URL of one host with its "
                "port, without TLS, whose driver takes ?timeout=, or a harness with proxied() by --harness"
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
        """Whether two backend objects of one URL share their jobs. Two objects of ``memory://`` do not, because each
        has a new store.
        """
        queue = self.fresh_queue()
        one.enqueue(queue, [NewJob(b"", new_id())])
        return _take_all(other, queue) > 0 or not _take_all(one, queue)


def remove_jobs(backend: Backend, queue: str) -> None:
    """End a queue's pause and delete its jobs. Without ``purging``, delayed jobs cannot be deleted."""
    if backend.capabilities.pausing:
        backend.resume(queue)
    if backend.capabilities.purging:
        backend.purge(queue, [State.READY, State.DELAYED, State.BURIED])
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
    """Make one call that shows whether the backend answers, and return the backend's capabilities.

    Raises the ``MultiqError`` of a backend that does not answer. The error is then raised once, and not in each test.
    """
    with harness.open() as backend:
        backend.stats(harness.fresh_queue())
        capabilities = harness.capabilities(backend)
    harness.close()
    return capabilities


def load_harness(path: str) -> type[UrlHarness]:
    """Import the class that ``module:Class`` names, from the current folder or an installed package. Raises
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
