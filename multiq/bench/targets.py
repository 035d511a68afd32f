"""Opens the targets of a run, and cleans up afterwards. A target is a backend that the command line names.

A name on the command line starts a throwaway server. A URL on the command line names a server of the user. On a user's
server, a run creates queues under random names. At the end, the run removes these queues. A run never reads any other
queue.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

import msgspec

from multiq.backend import State
from multiq.backend.registry import ALIASES, installed, load, load_driver, open_backend
from multiq.errors import BackendNotInstalled, MultiqError
from multiq.settings.url import redact, split

from .adapter import GROUP, Adapter, Bench, Durability
from .environment import file_system_of, is_volatile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from multiq.backend import Backend, QueueStats

    from .adapter import Profile

PLANTED = "planted"
"""Backends with a planted bug, for the bench's tests: ``planted:early``, ``planted:half-lost@sqlite:///jobs.db``."""

_PATIENCE = 15.0  # seconds that a queue may take to become empty, because leases of killed workers must end first
_REMOVED = (State.READY, State.DELAYED, State.BURIED)


class FolderVolatile(MultiqError):
    """The folder for throwaway servers is on a file system in memory, so its files cannot be durable."""


class QueueInUse(MultiqError):
    """A queue that a run wants to use holds jobs already."""


class QueueLeftBehind(MultiqError):
    """A run's queue could not be removed from a user's server."""


class Target(msgspec.Struct):
    """A backend in a run, and the queues that the run creates there."""

    name: str
    """The name that the user gave. The password of a URL is masked. If a name is repeated, a number is added to it."""
    backend: str
    """The driver's name: ``redis``."""
    adapter: Adapter
    is_ours: bool
    """Whether the server holds only the run's jobs."""
    run_id: str
    """The part of queue names that distinguishes this run's queues from all others."""
    queues: list[str] = msgspec.field(default_factory=list)
    """The queues that were used so far."""

    @property
    def url(self) -> str:
        return self.adapter.url

    @property
    def prefix(self) -> str:
        """The prefix of all queue names of this run."""
        return f"multiq.bench.{self.run_id}."

    def queue(self, word: str) -> str:
        """A queue of this run. Raises ``BackendError``, and ``QueueInUse`` if the queue holds jobs at its first use."""
        name = f"{self.prefix}{word}"
        if name not in self.queues:
            if not self.is_ours:
                self._refuse_if_used(name)
            self.queues.append(name)
        return name

    def remove_queues(self) -> None:
        """Remove the run's queues from a user's server. Raises ``QueueLeftBehind``, ``BackendError``."""
        if self.is_ours or not self.queues:
            return
        with open_backend(self.url) as backend:
            while self.queues:
                _remove(backend, self.queues[-1], self.name)
                self.adapter.sweep(self.queues.pop())

    def _refuse_if_used(self, name: str) -> None:
        with open_backend(self.url) as backend:
            stats = backend.stats(name)
        if _count(stats):
            raise QueueInUse(
                f"queue {name!r} of {self.name} holds {_count(stats):,} jobs already, which this run would count as "
                f"its own: look at them (multiq jobs), and purge them: multiq purge {name} -c {self.name}"
            )


class UrlAdapter(Adapter):
    """A server whose driver has no ``Bench``. The bench reads no counters and no settings of a server whose driver has
    no ``Bench``."""

    def __init__(self, url: str, backend: str) -> None:
        self.url = url
        self._backend = backend

    def version(self) -> str:
        return self._backend

    def durability(self) -> Durability:
        return Durability("unknown", {})


@contextmanager
def open_targets(
    given: Sequence[str], profile: Profile, folder: Path, *, run_id: str | None = None
) -> Iterator[list[Target]]:
    """The targets, which stay open until the end of the ``with`` block. *folder*: the folder for the servers that are
    started.

    Raises ``ServerMissing``, ``ServerFailed``, ``FolderVolatile``, ``BackendNotInstalled``, ``UrlInvalid``,
    ``BackendError``.
    """
    if profile == "durable" and is_volatile(folder) and any(map(_is_ours, given)):
        raise FolderVolatile(
            f"{folder} lies in memory ({file_system_of(folder)}), where nothing can be durable: name a folder on a "
            "disk for the servers, as in TMPDIR=/var/tmp multiq bench ..."
        )
    targets: list[Target] = []
    with ExitStack() as stack:
        for number, (name, text) in enumerate(zip(_shown(given), given, strict=True)):
            adapter, backend = _adapter(text, profile, folder / str(number), stack)
            target = Target(name, backend, adapter, _is_ours(text), run_id or os.urandom(5).hex())
            stack.callback(target.remove_queues)
            targets.append(target)
        yield targets


def load_bench(backend: str) -> type[Bench] | None:
    """The driver's ``Bench``. The result is None if the driver has no ``Bench``. Raises ``BackendNotInstalled``."""
    if backend not in installed(GROUP):
        load_driver(backend)  # if a driver is missing, this call raises the usual error
        return None
    return cast("type[Bench]", load(GROUP, backend))


def _adapter(text: str, profile: Profile, folder: Path, stack: ExitStack) -> tuple[Adapter, str]:
    """An adapter that stays open until the *stack* closes, and its driver's name."""
    if text.startswith(f"{PLANTED}:"):
        return UrlAdapter(f"{PLANTED}://{text.partition(':')[2].lstrip('/')}", PLANTED), PLANTED
    if "://" in text:
        scheme = split(text).scheme.partition("+")[0]
        backend = ALIASES.get(scheme, scheme)
        bench = load_bench(backend)
        for power in ("purging", "exact_counts"):  # a run counts the jobs that remain, and removes them
            if not load_driver(backend).declared.claim(power):
                raise open_backend(text).unsupported(power)
        return stack.enter_context(bench.at(text)) if bench else UrlAdapter(text, backend), backend
    return stack.enter_context(_startable(text).throwaway(_made(folder), profile)), text


def _is_ours(text: str) -> bool:
    """Whether the server holds only the run's jobs. Throwaway servers and planted backends hold no other jobs."""
    return "://" not in text or text.startswith(f"{PLANTED}:")


def _startable(name: str) -> type[Bench]:
    """The ``Bench`` of a backend. Raises ``BackendNotInstalled`` if the backend is unknown, or has no ``Bench``."""
    bench = load_bench(name)
    if bench is None:
        raise BackendNotInstalled(
            f"the bench cannot start a server for the {name} backend, only for "
            f"{', '.join(installed(GROUP))}: give the URL of a running server"
        )
    return bench


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _shown(given: Sequence[str]) -> list[str]:
    """The names to show, made unique: ``redis``, ``redis 2``."""
    masked = [text if _is_ours(text) else redact(text) for text in given]
    shown: list[str] = []
    for at, name in enumerate(masked):
        number = masked[:at].count(name) + 1
        shown.append(name if number == 1 else f"{name} {number}")
    return shown


def _remove(backend: Backend, queue: str, server: str) -> None:
    """Delete all jobs of a queue. The jobs of killed workers are deleted when their leases have ended."""
    give_up_at = time.monotonic() + _PATIENCE
    if backend.capabilities.pausing:
        backend.resume(queue)
    while True:
        backend.purge(queue, _REMOVED)
        stats = backend.stats(queue)
        if not _count(stats):
            return
        if time.monotonic() > give_up_at:
            raise QueueLeftBehind(
                f"queue {queue!r} of {server} still holds {_count(stats):,} jobs, {stats.reserved or 0:,} of them "
                f"reserved: wait until their leases have ended, then run: multiq purge {queue} -c {server}"
            )
        time.sleep(0.1)


def _count(stats: QueueStats) -> int:
    return sum(count or 0 for count in (stats.ready, stats.delayed, stats.reserved, stats.buried))
