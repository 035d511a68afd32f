"""The class of planted bugs, and the list of all planted bugs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from multiq.backend.memory import JobQueue, MemoryBackend, MemoryConsumer
from multiq.conformance.harness import ManualHarness
from multiq.conformance.memory_server import WiredBackend, WireServer
from multiq.fault_proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Backend
    from multiq.driverkit.clock import Clock


class PlantedBug(NamedTuple):
    name: str
    does: str
    """A sentence that describes the mistake of the backend."""
    test: str
    """The test that finds the bug, as ``Topic.test_name``. The rows of a report name tests in the same form."""
    backend: type[MemoryBackend]

    def open(self, *, name: str = "", clock: Clock = time.monotonic_ns) -> MemoryBackend:
        """Open the backend. Backends with the same *name* share their jobs, as ``memory://name`` does."""
        return self.backend(name=name and f"{self.name}/{name}", clock=clock)

    def harness(self) -> type[ManualHarness]:
        """Make a harness for this backend, with a clock that is moved by hand."""
        bug = self

        class PlantedHarness(ManualHarness):
            patience = 0.5  # if a consumer has not woken after this number of seconds, it counts as asleep
            deadline = 0.3

            def __init__(self) -> None:
                super().__init__()
                self._servers: list[WireServer] = []

            def open(self) -> MemoryBackend:
                return bug.open(name=self.prefix, clock=self.clock)

            def proxied(self) -> tuple[Proxy, Backend]:
                if not issubclass(bug.backend, WiredBackend):
                    return super().proxied()
                self._servers.append(WireServer(bug.backend.on_repeat))
                proxy = Proxy(self._servers[-1].address)
                far = bug.backend(name=f"{bug.name}/{self.prefix}", clock=self.clock)
                far.connect((proxy.host, proxy.port), self.deadline)
                return proxy, far

            def close(self) -> None:
                super().close()
                for server in self._servers:
                    server.close()

        return PlantedHarness


#: The planted bugs by name.
PLANTED: dict[str, PlantedBug] = {}


def plant(name: str, does: str, test: str) -> Callable[[type[MemoryBackend]], type[MemoryBackend]]:
    def register(backend: type[MemoryBackend]) -> type[MemoryBackend]:
        PLANTED[name] = PlantedBug(name, does, test, backend)
        return backend

    return register


class Planted(MemoryBackend):
    """A memory backend whose classes for consumers and queues can be replaced."""

    consumer_class: ClassVar[type[MemoryConsumer]] = MemoryConsumer
    queue_class: ClassVar[type[JobQueue]] = JobQueue

    def __init__(self, *, name: str = "", clock: Clock = time.monotonic_ns) -> None:
        super().__init__(name=name, clock=clock)
        self._store.queue_class = self.queue_class

    def consumer(self, queues: Sequence[str]) -> MemoryConsumer:
        return self.consumer_class(self._store, queues)
