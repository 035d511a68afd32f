"""The beanstalkd backend. A queue is a tube, and a lease is a reservation.

====================  ======================================================================  =========================
guarantee             how                                                                     cost
====================  ======================================================================  =========================
priority, then age    the server's own order in a tube                                        none
order of the queues   one tube is watched at a time while jobs are taken                      a round trip per queue
never early           the server's clock; delays are rounded up to whole seconds              none
one live lease        a reservation, which ends by time or with its connection; the driver    a read of the clock; near
                      refuses verdicts that come later than a ttr after the reserve was sent  the end, a touch before
                                                                                              an ack
leases that end       a thread sends a no-op, because the server may miss the end of a lease  one command per lease that
                                                                                              ends without a verdict
attempts, crashes     ``stats-job`` for each reserved job, all in one packet                  a round trip per batch
waiting               ``reserve-with-timeout`` on a connection without leases                 0.4 commands/s, idle
lost replies          a verdict without a reply is ``LeaseLost``, because its lease ended     none
                      with the connection; an enqueue without one is ``EnqueueUncertain``
====================  ======================================================================  =========================

docs/beanstalk.md lists the requirements on the server, and its limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from multiq.backend import (
    Diagnosis,
    Inspection,
    Management,
    Page,
    Pausing,
    Purging,
    State,
    check_state,
    check_states,
)
from multiq.backend.capabilities import Capabilities, Gap
from multiq.driverkit.replies import BACKEND_METHODS, guarded
from multiq.errors import BackendUnavailable

from .admin import Admin
from .consumer import BeanstalkConsumer
from .doctor import examine
from .dsn import OPTIONS, address_of
from .enqueue import MIN_TTR, enqueue
from .errors import reply_error
from .pause import PausedTubes
from .pool import Pool
from .reschedule import reschedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from multiq.backend import Finding, JobRecord, NewJob, QueueStats
    from multiq.driverkit.net import Address
    from multiq.settings.url import BackendUrl, Option

_MOST_BODY = 65535  # bytes: the server's default
_KEEPS_NOTHING = "this server writes no log: a restart loses all jobs (start it with -b and a folder)"


@guarded(*BACKEND_METHODS, server="a beanstalkd")
class BeanstalkBackend(Inspection, Management, Pausing, Purging, Diagnosis):
    """Jobs on a beanstalkd server: ``beanstalk://host``, ``beanstalk+unix:///path``."""

    declared: ClassVar[Capabilities] = Capabilities(
        backend="beanstalk",
        delay_resolution=1.0,
        min_ttr=float(MIN_TTR),
        max_body=_MOST_BODY,
        client_ids=Gap(
            "never", "beanstalkd numbers the jobs itself, so an enqueue that is repeated makes a second job"
        ),
        atomic_batches=Gap("never", "beanstalkd takes jobs one by one; EnqueuePartial says which it took"),
        waits_in_server=True,
        shared=True,
        persistent=True,
        disconnect_ends_lease=True,
        give_back=Gap("never", "beanstalkd counts every reservation, and nothing takes one back"),
        lists_jobs=Gap("cannot today", "beanstalkd shows only the first job that is ready, delayed or buried"),
        durable_attempts=Gap(
            "cannot today", "beanstalkd's log has no reservations and no immediate releases, so a restart forgets them"
        ),
        transactional_enqueue=Gap("never", "beanstalkd has no transaction that could join a database's transaction"),
        reasons=Gap("never", "beanstalkd has no place for a text beside a job"),
        stable_ids=Gap("never", "beanstalkd cannot change a job, so rescheduling makes a new job"),
        portable_leases=Gap("never", "a reservation belongs to its connection"),
        fenced_late=Gap(
            "never",
            "beanstalkd lets any client delete a job that is not reserved; the driver refuses late verdicts by its own "
            "clock",
        ),
        memos=Gap("never", "it stores jobs as they were put, and nothing beside them"),
        outcomes=Gap("never", "it stores jobs only, and nothing of a job that is deleted"),
        holds=Gap("never", "a job can wait for a time, but not for other jobs, and an ack cannot release another job"),
        unique=Gap("never", "it takes every job, and cannot look for an existing job"),
        notes=Gap("never", "it stores jobs only, and nothing beside them"),
        limits=Gap("never", "it hands out the first job that is ready, whatever the job is"),
        one_step=Gap("never", "a verdict stores nothing but the job"),
        one_step_everywhere=Gap("never", "no command settles one job and changes another job"),
        diagnosis=True,
    )
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def __init__(self, address: Address, *, timeout: float = 5.0) -> None:
        self._pool = Pool(address, timeout)
        self._admin = Admin(self._pool)
        self._paused_tubes = PausedTubes(self._pool)
        self._exact: Capabilities | None = None

    @classmethod
    def from_url(cls, url: BackendUrl) -> BeanstalkBackend:
        return cls(address_of(url), timeout=url.options["timeout"])

    @property
    def capabilities(self) -> Capabilities:
        if self._exact is None:
            try:
                with self._pool.borrowed() as session:
                    server_info = session.server_info(is_safe=True)
            except BackendUnavailable:
                return self.declared
            self._exact = msgspec.structs.replace(
                self.declared,
                max_body=server_info.max_body,
                persistent=True if server_info.has_log else Gap("cannot today", _KEEPS_NOTHING),
            )
        return self._exact

    # --- producing ---

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        if connection is not None:
            raise self.unsupported("transactional_enqueue")
        return enqueue(self._pool, queue, jobs) if jobs else []

    # --- consuming ---

    def consumer(self, queues: Sequence[str]) -> BeanstalkConsumer:
        return BeanstalkConsumer(self._pool, queues)

    # --- inspecting and managing ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        return self._admin.peek(queue, job_id)

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:  # noqa: ARG002
        """Return a page with the first job. A call for the next page raises ``Unsupported``."""
        state = check_state(state)
        if after is not None:
            raise self.unsupported("lists_jobs")
        first, count = self._admin.first(queue, state)
        if count and first is None:
            raise self.unsupported("lists_jobs")
        if first is None:
            return Page([], None)
        return Page([first], first.id if count > 1 else None)

    def delete(self, queue: str, job_id: str) -> None:
        self._admin.delete(queue, job_id)

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        return reschedule(self._pool, queue, job_id, delay)

    def kick(self, queue: str, limit: int) -> int:
        return self._admin.kick(queue, limit)

    def kick_job(self, queue: str, job_id: str) -> None:
        self._admin.kick_job(queue, job_id)

    def queues(self) -> list[str]:
        return self._admin.queues()

    def stats(self, queue: str) -> QueueStats:
        return self._admin.stats(queue)

    def pause(self, queue: str, seconds: float) -> None:
        self._paused_tubes.pause(queue, seconds)

    def resume(self, queue: str) -> None:
        self._admin.resume(queue)
        self._paused_tubes.forget(queue)

    def purge(self, queue: str, states: Sequence[State]) -> int:
        states = check_states(states)
        return self._admin.purge(queue, states)

    def doctor(self) -> list[Finding]:
        return examine(self._ask, self._pool.address)

    def close(self) -> None:
        self._paused_tubes.close()
        self._pool.close()

    # --- helpers ---

    def _discard_connections(self) -> None:
        """Close all connections. After a malformed reply, later replies may belong to earlier requests."""
        self._pool.close()

    def _ask(self, command: bytes) -> bytes | None:
        """Return the body of an ``OK`` reply, or None for a ``NOT_FOUND`` reply. Raises ``BackendError``."""
        ((line, body),) = self._pool.ask(command)
        if line.startswith(b"OK "):
            return body
        if line == b"NOT_FOUND":
            return None
        raise reply_error(line, self._pool.address)
