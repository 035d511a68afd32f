"""Listings on a server that refuses writes: they have all jobs, each in its real state."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
from servers.process import until

from multiq.backend import STORED_STATES, NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, OptionInvalid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from servers.redis import RedisServer

    from multiq.backend import Backend

QUEUE = "mail"
DUE_IN = 1.2  # seconds


def put(backend: Backend, *ids: str, **options: Any) -> None:
    backend.enqueue(QUEUE, [NewJob(b"", job_id, **options) for job_id in ids])


def some_of_each(backend: Backend) -> None:
    """Enqueue jobs that are ready, soon due, soon abandoned, delayed, or reserved."""
    with backend.consumer([QUEUE]) as consumer:
        put(backend, "abandoned 1", "abandoned 2", ttr=1)
        put(backend, "held", ttr=3600)
        assert len(consumer.reserve(3, 0)) == 3
    put(backend, "due 1", "due 2", "due 3", delay=DUE_IN)
    put(backend, "late 1", "late 2", delay=3600)
    put(backend, "ready 1", "ready 2")


READY = ["ready 1", "ready 2", "due 1", "due 2", "due 3", "abandoned 1", "abandoned 2"]
DELAYED = ["late 1", "late 2"]
RESERVED = ["held"]


def all_listed(backend: Backend, state: State, limit: int) -> list[Any]:
    seen: list[Any] = []
    after = None
    while True:
        page = backend.jobs(QUEUE, state, limit=limit, after=after)
        seen += page.jobs
        if (after := page.after) is None:
            return seen
        assert len(page.jobs) == limit


def is_complete(backend: Backend) -> None:
    for limit in (1, 2, 3, 100):
        listed = {state: all_listed(backend, state, limit) for state in STORED_STATES}
        assert [job.id for job in listed[State.READY]] == READY
        assert [job.id for job in listed[State.DELAYED]] == DELAYED
        assert [job.id for job in listed[State.RESERVED]] == RESERVED
        assert listed[State.BURIED] == []
        assert {job.state for job in listed[State.READY]} == {State.READY}
        assert {job.due_in for job in listed[State.READY]} == {0.0}
        # and peek shows the same states
        for jobs in listed.values():
            for job in jobs:
                peeked = backend.peek(QUEUE, job.id)
                assert (job.attempt, job.crashes, job.state) == (peeked.attempt, peeked.crashes, peeked.state)


def test_server_that_cannot_save_still_lists(new_redis: Callable[..., RedisServer], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    server = new_redis(save="3600 1", dir=str(folder))
    with open_backend(server.url) as backend:
        some_of_each(backend)
        # Given a snapshot that failed, after which the server takes no writes
        shutil.rmtree(folder)
        server.ask("BGSAVE")
        until(lambda: server.ask("INFO", "persistence")["rdb_last_bgsave_status"] == "err", "the snapshot has failed")
        time.sleep(DUE_IN)
        with pytest.raises(BackendUnavailable):
            put(backend, "x")
        # Then the listings have all jobs
        is_complete(backend)
        # And once the server accepts writes, due and abandoned jobs are listed as ready
        server.set("stop-writes-on-bgsave-error", "no")
        assert [job.id for job in all_listed(backend, State.READY, 3)] == [
            "abandoned 1", "abandoned 2", "due 1", "due 2", "due 3", "ready 1", "ready 2",
        ]  # fmt: skip


@pytest.mark.long
def test_replica_can_be_listed(new_redis: Callable[..., RedisServer]) -> None:
    primary = new_redis()
    replica = new_redis(replicaof=f"127.0.0.1 {primary.port}", repl_diskless_sync_delay="0")
    with open_backend(primary.url) as backend, open_backend(replica.url) as looking:
        some_of_each(backend)
        until(lambda: looking.stats(QUEUE).ready, "the replica has the jobs")
        time.sleep(DUE_IN)
        is_complete(looking)
        with pytest.raises(BackendUnavailable, match="is a replica"):
            looking.kick(QUEUE, 1)


@pytest.mark.parametrize(
    "after", ["x", "1", "-1:1.1", "1:-1.1", ":", "1.2.3", "-1:", "9" * 30 + ":", "0:1.99999999999999999999"]
)
def test_invalid_cursor_is_refused(redis_server: RedisServer, after: str) -> None:
    with (
        open_backend(redis_server.url) as backend,
        pytest.raises(OptionInvalid, match="after must be the cursor that"),
    ):
        backend.jobs(QUEUE, State.READY, after=after)
