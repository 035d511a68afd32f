"""Which libraries are compared, on which stores, and with how many jobs."""

from __future__ import annotations

from typing import NamedTuple

JOBS = 20_000
"""Jobs that every library enqueues and then drains. Every library enqueues some of the jobs one by one, and the rest in
bulk if the library has a bulk enqueue."""


class Entry(NamedTuple):
    """One row of the table."""

    name: str
    library: str
    """The name of the library whose environment the program runs in."""
    module: str
    store: str
    one: int
    """How many jobs are enqueued one by one to measure that rate. The number is so small that this takes a few seconds
    at most."""
    long: int = 0
    """How many jobs are enqueued and drained in a second, longer run. 0 means no second run, because the first takes
    long enough."""

    @property
    def key(self) -> str:
        return f"{self.library}-{self.store}"

    @property
    def is_ours(self) -> bool:
        return self.library == "multiq"


ENTRIES = [
    Entry("multiq", "multiq", "multiq_peer", "redis", 5000, 100_000),
    Entry("Dramatiq", "dramatiq", "dramatiq_peer", "redis", 8000),
    Entry("Huey", "huey", "huey_peer", "redis", 8000),
    Entry("taskiq", "taskiq", "taskiq_peer", "redis", 4000),
    Entry("SAQ", "saq", "saq_peer", "redis", 3000),
    Entry("Celery", "celery", "celery_peer", "redis", 2000),
    Entry("arq", "arq", "arq_peer", "redis", 2000),
    Entry("RQ", "rq", "rq_peer", "redis", 700),
    Entry("multiq", "multiq", "multiq_peer", "sqlite", 4000, 60_000),
    Entry("Huey", "huey", "huey_peer", "sqlite", 4000),
    Entry("multiq", "multiq", "multiq_peer", "mysql", 1500, 40_000),
    Entry("Huey", "huey", "huey_peer", "mysql", 1500),
    Entry("Celery", "celery", "celery_peer", "mysql", 400),
]
