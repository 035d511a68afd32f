"""The harness: all that the suite needs to know of a driver. One subclass per driver; only ``open`` must be written."""

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
    """One driver, as the suite uses it. Each test has a harness of its own.

    ``open`` must be written; everything else is optional. No store is named here: the suite reads the
    differences between stores from the backend's capabilities, and scales its times to these capabilities.
    """

    # --- knobs: plain numbers, set in a subclass or on an instance ---

    slack: float = 0.1
    """Seconds within which the store surely notices that a moment has passed. No job may be early by even less."""

    rounds: int = 25
    """How often each race is run."""

    threads: int = 4
    """How many consumers or producers race."""

    walks: int = 24
    """How many random walks are compared with the model."""

    patience: float = 10.0
    """Seconds after which a waiting consumer that should have woken counts as asleep."""

    deadline: float = 1.0
    """Seconds that a call may take through the proxy of ``proxied``."""

    gaps: Mapping[str, Gap] = {}
    """Power -> why it is missing. These are capabilities that the driver claims, but that this installation lacks (for
    example, because its server has no log)."""

    real_time: ClassVar[bool] = True
    """Whether ``advance`` waits in real time."""

    def __init__(self) -> None:
        self.prefix = f"conformance.{secrets.token_hex(4)}"
        self.handed_out: list[str] = []
        """The queues that this harness has named. It touches no others."""

    # --- must be written ---

    @abstractmethod
    def open(self) -> Backend:
        """Open another backend object on the same store: all of them see the same jobs. The suite closes it."""

    # --- may be written ---

    def now(self) -> float:
        """The time in seconds on the clock that ``advance`` moves. Its zero may be anywhere."""
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass for the store. Sleeps if the store's clock cannot be moved."""
        time.sleep(max(0.0, seconds))

    def transaction(self) -> AbstractContextManager[ExternalConnection]:
        """A DB-API connection to the backend's database, in a transaction of its own, opened without multiq.

        The suite passes it to ``enqueue(connection=)`` and then calls its ``commit`` or ``rollback``. Without this
        hook, ``transactional_enqueue`` is not tried.
        """
        raise NotTriedError(
            "transactional_enqueue: there is no connection to prove it with: override "
            f"{type(self).__name__}.transaction()"
        )

    def proxied(self) -> tuple[Proxy, Backend]:
        """A proxy in front of the server, and a backend whose connections all go through it. The suite closes both.

        Calls of that backend time out after ``self.deadline`` seconds. Without this hook, lost replies and servers
        that hang are not tried.
        """
        raise NotTriedError(
            f"there is no proxy between the backend and its server: override {type(self).__name__}.proxied()"
        )

    def restart(self) -> None:  # noqa: B027 - a hook; most harnesses have nothing to restart
        """Restart the server that holds the jobs. Called while all backends are closed.

        By default nothing is restarted, and only the clients' memory is lost. A driver's own harness that runs the
        server overrides this.
        """

    def requests_served(self) -> int | None:
        """The number of requests that the server has answered since any fixed moment. None: unknown."""
        return None

    def fresh_queue(self, ending: str = "") -> str:
        """The name of a queue that has not been used before."""
        name = f"{self.prefix}.{len(self.handed_out)}{ending}"
        self.handed_out.append(name)
        return name

    def close(self) -> None:
        """Remove what the test has left. By default this empties the queues in ``handed_out`` and touches no others."""
        with self.open() as backend:
            for name in self.handed_out:
                remove_jobs(backend, name)

    # --- used by the suite; derived from the above ---

    def capabilities(self, backend: Backend) -> Capabilities:
        """The capabilities of *backend*, without the powers in this harness's ``gaps``."""
        return msgspec.structs.replace(backend.capabilities, **self.gaps)

    def nearly(self, moment: float) -> None:
        """Let time pass until shortly before *moment*. Does nothing if *moment* is closer than that."""
        self.advance(moment - self.now() - (0.3 if self.real_time else 0.001))

    def past(self, moment: float) -> None:
        """Let time pass until ``slack`` seconds after *moment*."""
        while (left := moment + self.slack - self.now()) > 0:
            self.advance(left)


class ManualHarness(Harness):
    """For a driver that takes a clock: ``open`` passes it ``self.clock``. Tests move this clock instead of waiting."""

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
    """Any backend that a URL names. Tests run in real time, in queues of their own that are emptied afterwards."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self._only: Backend | None = None  # the only backend object, if each object has a store of its own
        self._first: Backend | None = None

    @classmethod
    def of(cls, url: str) -> type[Harness]:
        """A harness class for ``suite``: all its instances are for *url*."""

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
        """Whether two backend objects of one URL share their jobs. Two of ``memory://`` do not: each is a new store."""
        queue = self.fresh_queue()
        one.enqueue(queue, [NewJob(b"", new_id())])
        return _take_all(other, queue) > 0 or not _take_all(one, queue)


def remove_jobs(backend: Backend, queue: str) -> None:
    """End a queue's pause and delete its jobs, as far as the backend can: without ``purging``, delayed jobs stay."""
    if backend.capabilities.pausing:
        backend.resume(queue)
    if backend.capabilities.purging:
        backend.purge(queue, [State.READY, State.DELAYED, State.BURIED])
        return
    while _take_all(backend, queue) or backend.kick(queue, _MOST_AT_ONCE):
        pass


def _take_all(backend: Backend, queue: str) -> int:
    """Reserve and ack all ready jobs. Returns how many there were."""
    count = 0
    with backend.consumer([queue]) as consumer:
        while leases := consumer.reserve(_MOST_AT_ONCE, 0):
            consumer.settle([Ack(lease) for lease in leases])
            count += len(leases)
    return count


def first_contact(harness: Harness) -> Capabilities:
    """The backend's capabilities, after one call that shows whether the backend answers.

    Raises the ``MultiqError`` of a backend that does not answer: once here, instead of in each test.
    """
    with harness.open() as backend:
        backend.stats(harness.fresh_queue())
        capabilities = harness.capabilities(backend)
    harness.close()
    return capabilities


def load_harness(path: str) -> type[UrlHarness]:
    """The class that ``module:Class`` names, in the current folder or installed. Raises ``OptionInvalid``."""
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
