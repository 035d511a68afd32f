"""Who is compared, on what, and with how many jobs: as many as keep each step between half a second and a few."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One row of the table."""

    name: str
    library: str
    """Whose environment it runs in."""
    module: str
    store: str
    one: int
    """How many jobs are enqueued one by one."""
    many: int
    """How many in bulk, where the library can. Both are then drained."""

    @property
    def key(self) -> str:
        return f"{self.library}-{self.store}"

    @property
    def is_ours(self) -> bool:
        return self.library == "multiq"


ENTRIES = [
    Entry("multiq", "multiq", "multiq_peer", "redis", 5000, 100_000),
    Entry("Dramatiq", "dramatiq", "dramatiq_peer", "redis", 8000, 0),
    Entry("Huey", "huey", "huey_peer", "redis", 8000, 0),
    Entry("taskiq", "taskiq", "taskiq_peer", "redis", 4000, 6000),
    Entry("SAQ", "saq", "saq_peer", "redis", 3000, 5000),
    Entry("Celery", "celery", "celery_peer", "redis", 2000, 4000),
    Entry("arq", "arq", "arq_peer", "redis", 2000, 3000),
    Entry("RQ", "rq", "rq_peer", "redis", 700, 900),
    Entry("multiq", "multiq", "multiq_peer", "sqlite", 4000, 60_000),
    Entry("Huey", "huey", "huey_peer", "sqlite", 4000, 0),
    Entry("multiq", "multiq", "multiq_peer", "mysql", 1500, 40_000),
    Entry("Huey", "huey", "huey_peer", "mysql", 1500, 0),
    Entry("Celery", "celery", "celery_peer", "mysql", 400, 600),
]
