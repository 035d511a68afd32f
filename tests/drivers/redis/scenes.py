"""Scenes that are played through a proxy that cuts: what is there before, a call, and what must be true after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multiq.backend import Bury, NewJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy import Proxy
    from servers.redis import RedisServer

    from multiq.backend import Backend, Consumer, JobRecord, Lease, State

QUEUE = "mail"
OTHER = "other"
EVERY_BYTE = 1000  # of a reply up to this length; of a longer one the two ends, and a spread between them


@dataclass
class Stage:
    """Where a scene is played: through the proxy, and beside it."""

    proxy: Proxy
    server: RedisServer
    there: Backend
    """Beside the proxy."""
    backend: Backend
    consumer: Consumer
    leases: list[Lease] = field(default_factory=list)

    def clear(self) -> None:
        """Empty queues, open connections, and a consumer that holds nothing."""
        self.server.ask("FLUSHALL")
        self.leases = []
        self.backend.stats(QUEUE)
        self.consumer.reserve(1, 0)

    def put(self, *ids: str, queue: str = QUEUE, **options: Any) -> None:
        self.there.enqueue(queue, [NewJob(f"body of {job_id}".encode(), job_id, **options) for job_id in ids])

    def hold(self, *ids: str, **options: Any) -> None:
        self.put(*ids, **options)
        self.leases = self.consumer.reserve(len(ids), 0)
        assert [lease.id for lease in self.leases] == list(ids)

    def bury(self, *ids: str) -> None:
        self.put(*ids)
        with self.there.consumer([QUEUE]) as consumer:
            leases = consumer.reserve(len(ids), 0)
            assert consumer.settle([Bury(lease, "was bad") for lease in leases]) == [None] * len(ids)

    def counts(self, queue: str = QUEUE) -> tuple[int | None, ...]:
        stats = self.there.stats(queue)
        return stats.ready, stats.delayed, stats.reserved, stats.buried

    def ids(self, state: State) -> list[str]:
        return [job.id for job in self.there.jobs(QUEUE, state).jobs]

    def peek(self, job_id: str) -> JobRecord:
        return self.there.peek(QUEUE, job_id)


@dataclass
class Scene:
    """One verb."""

    given: Callable[[Stage], object]
    act: Callable[[Stage], Any]
    then: Callable[[Stage, Any], None]


def play(stage: Stage, scene: Scene, before: Callable[[], None] = lambda: None) -> tuple[int, int]:
    """Play a scene from the start. Returns how many bytes the call sent, and got as its reply."""
    stage.clear()
    scene.given(stage)
    sent, replied = stage.proxy.sent, stage.proxy.replied
    before()
    answer = scene.act(stage)
    sizes = stage.proxy.sent - sent, stage.proxy.replied - replied
    scene.then(stage, answer)
    in_step(stage)
    return sizes


def in_step(stage: Stage) -> None:
    """The next calls on the same connections get their own answers, and nobody else's."""
    stage.put("probe", queue="probe")
    assert stage.backend.peek("probe", "probe").body == b"body of probe"
    assert stage.backend.stats("never used").ready == 0


def places(size: int) -> list[int]:
    """Where to cut so many bytes."""
    if size <= EVERY_BYTE:
        return list(range(size))
    ends = EVERY_BYTE // 3
    return [*range(ends), *range(ends, size - ends, max(1, (size - 2 * ends) // ends)), *range(size - ends, size)]
