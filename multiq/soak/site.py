"""The store that a soak is about: how to get there, and what can be done to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.conformance.proxy import Proxy

Held = list[tuple[int, str]]
"""Number and state of each job that a store holds."""


class Server(Protocol):
    """What can be done to a server's process."""

    can_pause: bool
    can_restart: bool

    @property
    def pid(self) -> int:
        """Its process on this machine, where it can be paused."""

    def run_id(self) -> object:
        """Another one after each start."""

    def pause(self) -> object:
        """It is stopped: it takes connections, and does not answer."""

    def go_on(self) -> object: ...

    def restart(self) -> object:
        """It is killed, and started again; returns when it serves."""


@dataclass
class Site:
    """A store, and what a soak knows of it. A fault that needs what is None cannot be made there."""

    driver: str
    """The backend's name."""
    url: str
    """For everybody who is under test: through the proxy, where there is one."""
    held: Callable[[], Held]
    """Reads what the store holds, at the end. It may take away what it reads."""
    is_left: Callable[[], bool]
    """Whether the store holds jobs that are not buried."""
    proxy: Proxy | None = None
    server: Server | None = None
    acks: bytes = b""
    """What clients send when they ack."""
    own_faults: dict[str, Callable[[], object]] = field(default_factory=dict)
    """What can be done to no other store, by its name in the history. Each returns something true if it was done."""
