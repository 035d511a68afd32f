"""The site of a soak: the store under test, with the ways to reach it and the faults that can be made on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.fault_proxy import Proxy

Held = list[tuple[int, str]]
"""The number and the state of each job that a store holds."""


class Server(Protocol):
    """The operations of a soak on a server's process."""

    can_pause: bool
    can_restart: bool

    @property
    def pid(self) -> int:
        """The pid of the server's process, if the process runs on this machine and can be paused."""

    def run_id(self) -> object:
        """The identifier of the server's current start. Each start has another identifier."""

    def pause(self) -> object:
        """Stop the process. The system still accepts connections, but no request is answered."""

    def go_on(self) -> object: ...

    def restart(self) -> object:
        """Kill the server, start it again, and wait until it serves."""


@dataclass
class Site:
    """A store under test. A fault is not available if the site lacks a field that the fault needs."""

    driver: str
    """The backend's name."""
    url: str
    """The URL for all processes of the load, through the proxy if there is one."""
    held: Callable[[], Held]
    """Reads the jobs of the store at the end of a soak, and may remove the jobs."""
    is_left: Callable[[], bool]
    """Whether the store holds jobs that are not buried."""
    proxy: Proxy | None = None
    server: Server | None = None
    acks: bytes = b""
    """Bytes that only an ack request contains."""
    own_faults: dict[str, Callable[[], object]] = field(default_factory=dict)
    """Faults that only this kind of store has. The keys are the faults' names in the history. Each function returns a
    true value if its fault happened.
    """
