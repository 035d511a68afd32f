"""An open snapshot keeps deleted rows in the index. A consumer must not read all of them in each poll.

The tests count the pages that a poll requests from InnoDB's buffer, which is the same number on any machine. The
server's own threads also request pages, so the tests compare the lowest quartile. No counter shows the cost of a
claim: ``benchmarks/mysql_backlog.py`` measures its time.
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
BOUND = 30  # pages; a scan from the start reads all pages of deleted rows, with some hundred entries on each


@pytest.fixture(scope="module")
def server() -> Iterator[MysqlServer]:
    """A private server, because the tests read its counters."""
    with MysqlServer(innodb_flush_log_at_trx_commit=2) as server:
        yield server


@pytest.fixture
def place(server: MysqlServer) -> Iterator[Place]:
    with server.database() as place:
        yield place


@pytest.fixture(autouse=True)
def _nothing_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a scan window at once: on a fast machine, scans of so few deleted rows count as cheap."""
    monkeypatch.setattr(scan_window, "CHEAP", -1.0)
    monkeypatch.setattr(scan_window, "MANY", 0)


def pages(server: MysqlServer, call: Callable[[], object]) -> int:
    before = server.status("Innodb_buffer_pool_read_requests")
    call()
    return server.status("Innodb_buffer_pool_read_requests") - before


def lowest_quarter(read: list[int]) -> int:
    """The lowest quartile."""
    return sorted(read)[len(read) // 4]


def work_off(backend: Backend, consumer: Consumer) -> None:
    """Enqueue and ack many jobs."""
    backend.enqueue(QUEUE, [NewJob(b"x", job_id) for job_id in new_ids(PAST)])
    done, leases = 0, consumer.reserve(200, 5)
    while leases:
        answers, leases = consumer.exchange([Ack(lease) for lease in leases], 200, 0)
        assert not any(answers)
        done += len(answers)
    assert done == PAST


@pytest.mark.long
def test_a_poll_reads_no_more_pages_behind_deleted_rows_that_cannot_be_purged(
    server: MysqlServer, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        open_backend(place.url) as backend,
        backend.consumer([QUEUE]) as consumer,
        server.client(place.name) as reader,
        reader.cursor() as cursor,
    ):
        # Given a snapshot, and many jobs that were acked after it
        backend.queues()
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        work_off(backend, consumer)
        # When the queue is empty
        read = [pages(server, lambda: consumer.reserve(1, 0)) for _ in range(21)]
        # Then most polls read few pages
        assert lowest_quarter(read) < BOUND, read
        # And scans from the start of the index would read many pages
        monkeypatch.setattr(scan_window, "CHEAP", 3600.0)
        read = [pages(server, lambda: consumer.reserve(1, 0)) for _ in range(21)]
        assert lowest_quarter(read) > 3 * BOUND, read
