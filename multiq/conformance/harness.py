"""The harness: all that the suite has to know of a driver. One subclass per driver; only ``open`` must be written."""

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

from multiq.backend import NewJob, State
from multiq.backend.registry import installed, load_driver, open_backend
from multiq.driverkit.clock import SECOND, ManualClock
from multiq.errors import JobNotFound, OptionInvalid
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


_PORTS = {"beanstalk": 11300, "mysql": 3306, "redis": 6379}  # where a URL names none


class Harness(ABC):
    """One driver, as the suite meets it. Each test has a harness of its own.

    ``open`` must be written, all else may be. Nothing here names a store: what differs from one to the next is read
    from the backend's capabilities, and times are scaled to what they say.
    """

    # --- knobs: plain numbers, set in a subclass or on an instance ---

    slack: float = 0.1
    """Seconds after which the store has surely noticed that a moment has passed. Never used to excuse an early job."""

    rounds: int = 25
    """How often a race is run before it counts as won."""

    threads: int = 4
    """How many consumers or producers race."""

    walks: int = 24
    """How many random walks are compared with the model."""

    patience: float = 10.0
    """Seconds after which a waiting consumer that should have woken counts as asleep."""

    deadline: float = 1.0
    """Seconds that a call may take through the proxy of ``proxied``."""

    gaps: Mapping[str, Gap] = {}
    """Powers that the driver claims and this installation lacks (a server without a log, say), each with its gap."""

    real_time: ClassVar[bool] = True
    """Whether ``advance`` really takes its time."""

    def __init__(self) -> None:
        self.prefix = f"conformance.{secrets.token_hex(4)}"
        self.handed_out: list[str] = []
        """The queues that this harness has named; only these are touched."""

    # --- must be written ---

    @abstractmethod
    def open(self) -> Backend:
        """Another backend object on the same store: what one enqueues, all others see. The suite closes it."""

    # --- may be written ---

    def now(self) -> float:
        """Seconds on the clock that ``advance`` moves, from any start."""
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass for the store. Where its clock cannot be moved this sleeps."""
        time.sleep(max(0.0, seconds))

    def transaction(self) -> AbstractContextManager[ExternalConnection]:
        """A DB-API connection to the backend's database, in a transaction of its own, that knows nothing of multiq.

        The suite passes it to ``enqueue(connection=)`` and then calls its ``commit`` or ``rollback``. Without it
        ``transactional_enqueue`` is not tried.
        """
        raise NotTriedError(
            "transactional_enqueue: there is no connection to prove it with: override "
            f"{type(self).__name__}.transaction()"
        )

    def proxied(self) -> tuple[Proxy, Backend]:
        """A proxy in front of the server, and a backend whose connections all go through it. The suite closes both.

        Its calls have ``self.deadline`` seconds. Without this hook lost replies and servers that hang are not tried.
        """
        raise NotTriedError(
            f"there is no proxy between the backend and its server: override {type(self).__name__}.proxied()"
        )

    def restart(self) -> None:  # noqa: B027 - a hook; most harnesses have nothing to restart
        """Stop and start what holds the jobs. Called while all backends are closed.

        By default nothing is restarted, so that only the clients' memory is gone; a driver's own harness that runs
        the server itself does more.
        """

    def requests_served(self) -> int | None:
        """A number that grows by one with each request that the server answers; None: there is no telling."""
        return None

    def fresh_queue(self, ending: str = "") -> str:
        """The name of a queue that nobody has used."""
        name = f"{self.prefix}.{len(self.handed_out)}{ending}"
        self.handed_out.append(name)
        return name

    def close(self) -> None:
        """Leave no trace. By default the queues that were handed out are emptied, and no others are touched."""
        with self.open() as backend:
            for name in self.handed_out:
                backend.resume(name)
                backend.purge(name, [State.READY, State.DELAYED, State.BURIED])

    # --- what the suite asks; derived from the above ---

    def capabilities(self, backend: Backend) -> Capabilities:
        """What *backend* claims, without this harness's ``gaps``."""
        return msgspec.structs.replace(backend.capabilities, **self.gaps)

    def nearly(self, moment: float) -> None:
        """Let time pass until shortly before *moment*, or not at all if it is too close."""
        self.advance(moment - self.now() - (0.3 if self.real_time else 0.001))

    def past(self, moment: float) -> None:
        """Let time pass until *moment* is surely over."""
        while (left := moment + self.slack - self.now()) > 0:
            self.advance(left)


class ManualHarness(Harness):
    """For a driver that takes a clock: its ``open`` passes ``self.clock``, and no test ever waits for time to pass."""

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
    """Any backend that a URL names, in real time, in queues of its own that it empties afterwards."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self._only: Backend | None = None  # the one object whose jobs no other object can see
        self._first: Backend | None = None

    @classmethod
    def of(cls, url: str) -> type[Harness]:
        """A class for ``suite`` whose instances are all for *url*."""

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
                "there is no proxy between the backend and its server: the URL must name one host with its port, "
                "without TLS, of a driver that takes ?timeout=; or name a harness with proxied() by --harness"
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
        """Whether two objects for one URL lead to the same jobs: ``memory://`` is a new store each time."""
        queue = self.fresh_queue()
        (job_id,) = one.enqueue(queue, [NewJob(b"", new_id())])
        try:
            other.peek(queue, job_id)
        except JobNotFound:
            return False
        finally:
            one.delete(queue, job_id)
        return True


def first_contact(harness: Harness) -> Capabilities:
    """What the backend can do, after one call that shows whether it is there at all.

    Raises whatever ``MultiqError`` stands in the way, once, instead of in each test.
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
