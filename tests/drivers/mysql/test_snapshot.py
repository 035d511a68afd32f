"""An open snapshot keeps deleted rows in the index: a worker must not step over all of them at each look.

What a look reads is counted in pages that it asks of InnoDB's buffer, which is the same on any machine, but for what
the server's own threads ask meanwhile: so the lowest quarter is looked at. What a claim costs shows in no counter:
``benchmarks/mysql_backlog.py`` takes its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from servers.mysql import MysqlServer

from multiq.backend import Ack, NewJob
from multiq.backend.registry import open_backend
from multiq.ids import new_ids
from multiq_mysql import scan_window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.mysql import Place

    from multiq.backend import Backend, Consumer

QUEUE = "mail"
PAST = 20_000
BOUND = 30  # pages; a look from the bottom reads them all, some hundred entries on each


@pytest.fixture(scope="module")
def server() -> Iterator[MysqlServer]:
    """A server for these tests alone, because they read its counters."""
    with MysqlServer(innodb_flush_log_at_trx_commit=2) as server:
        yield server


@pytest.fixture
def place(server: MysqlServer) -> Iterator[Place]:
    with server.database() as place:
        yield place


@pytest.fixture(autouse=True)
def _nothing_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a quick machine so few dead entries would be stepped over each time: that costs less than a window does."""
    monkeypatch.setattr(scan_window, "CHEAP", -1.0)
    monkeypatch.setattr(scan_window, "MANY", 0)


def pages(server: MysqlServer, call: Callable[[], object]) -> int:
    before = server.status("Innodb_buffer_pool_read_requests")
    call()
    return server.status("Innodb_buffer_pool_read_requests") - before


def lowest_quarter(read: list[int]) -> int:
    """A quarter of them is not above it."""
    return sorted(read)[len(read) // 4]


def work_off(backend: Backend, consumer: Consumer) -> None:
    """A past of many jobs."""
    backend.enqueue(QUEUE, [NewJob(b"x", job_id) for job_id in new_ids(PAST)])
    done, leases = 0, consumer.reserve(200, 5)
    while leases:
        answers, leases = consumer.exchange([Ack(lease) for lease in leases], 200, 0)
        assert not any(answers)
        done += len(answers)
    assert done == PAST


@pytest.mark.long
def test_a_look_reads_no_more_behind_a_past_that_cannot_be_purged(
    server: MysqlServer, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        open_backend(place.url) as backend,
        backend.consumer([QUEUE]) as consumer,
        server.client(place.name) as reader,
        reader.cursor() as cursor,
    ):
        # Given a snapshot, and much that was worked off after it was taken
        backend.queues()
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        work_off(backend, consumer)
        # When nothing is left
        read = [pages(server, lambda: consumer.reserve(1, 0)) for _ in range(21)]
        # Then to find that takes a few pages, now and then excepted
        assert lowest_quarter(read) < BOUND, read
        # And from the bottom it would be very many
        monkeypatch.setattr(scan_window, "CHEAP", 3600.0)
        read = [pages(server, lambda: consumer.reserve(1, 0)) for _ in range(21)]
        assert lowest_quarter(read) > 3 * BOUND, read
