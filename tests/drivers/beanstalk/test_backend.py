"""The backend: URLs, capabilities of the live server, and batches larger than one packet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import greenstalk
import pytest
from proxy import CutReply, Proxy
from servers.process import HOST

from multiq.backend import Ack, NewJob, State
from multiq.backend.capabilities import Gap
from multiq.backend.registry import open_backend
from multiq.errors import (
    BackendFull,
    BackendUnavailable,
    EnqueueUncertain,
    JobReserved,
    PayloadTooLarge,
    UrlInvalid,
)
from multiq.ids import new_id
from multiq_beanstalk.backend import BeanstalkBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.beanstalk import BeanstalkServer

    NewBeanstalk = Callable[..., BeanstalkServer]

QUEUE = "mail"


def new(body: bytes = b"x", **options: Any) -> NewJob:
    return NewJob(body, new_id(), **options)


# --- URLs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("beanstalk://", ("localhost", 11300)),
        ("beanstalk://jobs.example.org", ("jobs.example.org", 11300)),
        ("beanstalk://[::1]:11301/", ("::1", 11301)),
        ("beanstalk+unix:///run/a%20b.sock", "/run/a b.sock"),
    ],
)
def test_url_names_an_address(url: str, address: object) -> None:
    backend = open_backend(url)
    assert isinstance(backend, BeanstalkBackend)
    assert backend._pool.address == address


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("beanstalk://user:secret@host", "passwords"),
        ("beanstalk://host/0", "databases"),
        ("beanstalk://one,two", "several"),
        ("beanstalk+unix://host/path", "three slashes"),
        ("beanstalk+unix:///", "three slashes"),
        ("beanstalk+tls://host", "must be beanstalk or"),
        ("beanstalk://host?timeout=0", "seconds"),
        ("beanstalk://host?tube=x", "unknown option"),
    ],
)
def test_invalid_url_is_refused(url: str, why: str) -> None:
    with pytest.raises(UrlInvalid, match=why) as refused:
        open_backend(url)
    assert "secret" not in str(refused.value)


def test_unix_socket_server_works_like_any_other(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk(unix=True)
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new(b"%d" % number) for number in range(2000)])
        count = 0
        while leases := consumer.reserve(500, 0):
            count += len(leases)
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
        assert count == 2000


# --- capabilities ----------------------------------------------------------------------------------------


def test_capabilities_of_server_without_log_report_no_persistence(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk(max_job_size=1000)
    with open_backend(server.url) as backend:
        assert backend.capabilities.max_body == 1000
        assert isinstance(backend.capabilities.persistent, Gap)
        assert "-b" in backend.capabilities.persistent.reason


def test_capabilities_of_server_with_log_report_persistence(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk(binlog=True)
    with open_backend(server.url) as backend:
        assert backend.capabilities.persistent is True


def test_capabilities_of_unreachable_server_are_as_declared(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    server.stop()
    with open_backend(server.url) as backend:
        assert backend.capabilities == BeanstalkBackend.declared
        server.start()
        assert isinstance(backend.capabilities.persistent, Gap)


# --- enqueuing -------------------------------------------------------------------------------------------


def test_batch_larger_than_all_buffers_arrives_in_order(new_beanstalk: NewBeanstalk) -> None:
    """The replies fill buffers as well. A client that does not read replies while it sends would wait for ever."""
    server = new_beanstalk()
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        large = [new(b"%05d" % number * 12_000) for number in range(300)]  # 18 MB
        small = [new(b"%05d" % number) for number in range(5000)]
        ids = backend.enqueue(QUEUE, large) + backend.enqueue(QUEUE, small)
        assert ids == sorted(ids, key=int)
        assert len(set(ids)) == 5300
        left = [*large, *small]
        while left:
            leases = consumer.reserve(100, 0)
            assert leases
            assert [lease.body for lease in leases] == [job.body for job in left[: len(leases)]]
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
            del left[: len(leases)]


def test_batch_with_cut_replies_reports_accepted_and_uncertain_jobs(
    new_beanstalk: NewBeanstalk,
) -> None:
    server = new_beanstalk()
    jobs = [new(b"%d" % number) for number in range(2500)]
    with Proxy(server.address) as proxy, open_backend(f"beanstalk://{HOST}:{proxy.port}") as backend:
        assert backend.capabilities.max_body  # so that the connection is known
        backend.enqueue(QUEUE, [new(b"before")])
        proxy.arm(CutReply(at=15_000))  # in the second of three packets
        with pytest.raises(EnqueueUncertain) as uncertain:
            backend.enqueue(QUEUE, jobs)
        accepted = uncertain.value.accepted
        assert 1000 < len(accepted) < 2000
        assert list(accepted) == list(range(len(accepted)))
        assert list(uncertain.value.jobs) == jobs[len(accepted) : 2000]
        assert list(uncertain.value.unsent) == jobs[2000:]
        assert str(len(accepted)) in str(uncertain.value)
        for place in (0, len(accepted) - 1):
            assert backend.peek(QUEUE, accepted[place]).body == b"%d" % place
        # no part of the third packet was sent
        assert len(accepted) < (backend.stats(QUEUE).ready or 0) <= 2001


def test_server_error_has_greenstalks_error_as_cause(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with open_backend(server.url) as backend:
        backend.stats(QUEUE)
        server.drain()
        with pytest.raises(BackendUnavailable) as refused:
            backend.enqueue(QUEUE, [new()])
        assert isinstance(refused.value.__cause__, greenstalk.DrainingError)


# --- bodies that the log would not give back -------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 1000])
def test_largest_body_and_later_jobs_survive_a_restart(new_beanstalk: NewBeanstalk, limit: int | None) -> None:
    """The server accepts a body of two bytes more, but when it reads its log it stops at this body."""
    server = new_beanstalk(binlog=True, fsync_ms=None, max_job_size=limit)
    with open_backend(server.url) as backend:
        largest = backend.capabilities.max_body
        assert largest == (limit or 65535) - 2
        with pytest.raises(PayloadTooLarge, match="-z"):
            backend.enqueue(QUEUE, [new(b"x" * (largest + 1))])
        backend.enqueue(QUEUE, [new(b"x" * largest), new(b"after")])
        server.stop()
        server.start()
        assert backend.stats(QUEUE).ready == 2
        assert "missing" not in server.log


# --- a job that the log does not know --------------------------------------------------------------------


def test_job_buried_by_its_put_can_be_kicked_and_deleted_without_damage_to_the_log(
    new_beanstalk: NewBeanstalk,
) -> None:
    server = new_beanstalk(binlog=True, fsync_ms=None)
    with open_backend(server.url) as backend, server.client() as client:
        client.fill(QUEUE)
        with server.little_memory(128 * 1024), pytest.raises(BackendFull, match="kick") as full:
            backend.enqueue(QUEUE, [new()])
        # the server has buried the job, and the message names its id
        (buried,) = backend.jobs(QUEUE, State.BURIED).jobs
        assert buried.id in str(full.value)
        backend.delete(QUEUE, buried.id)
        (after,) = backend.enqueue("after", [new(b"after")])
        server.stop()
        server.start()
        assert backend.peek("after", after).body == b"after"
        assert "missing" not in server.log


def test_reserved_job_and_missing_job_raise_different_errors(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        (job_id,) = backend.enqueue(QUEUE, [new()])
        (lease,) = consumer.reserve(1, 0)
        with pytest.raises(JobReserved):
            backend.reschedule(QUEUE, job_id, 0)
        assert backend.stats(QUEUE).ready + (backend.stats(QUEUE).delayed or 0) == 0  # type: ignore[operator]
        assert consumer.settle([Ack(lease)]) == [None]
