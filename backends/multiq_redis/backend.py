"""Redis: queues on a server, a primary with replicas, or a cluster. Every move of a job is one Lua script.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
atomic verbs          one script each (lua/<verb>.lua), all keys declared, all in one slot    one round trip per call
priority, then age    a sorted set by priority; its members begin with a sequence of fixed    O(log n)
                      width, so that ties sort by age
never early           the server's TIME, in microseconds; delays rounded up                   one call in the script
one live lease        a token per reserve in the job's record, compared on every settle,      one read of the record
                      and the lease's end with the clock
one effect per call   numbered calls, whose last answer the server keeps for five minutes     one GET, one SET
waiting               BZPOPMIN on a marker that carries nothing                               0.4 commands/s, idle
everybody's order     what is due is promoted in slices before anything is handed out         some ms per 1,000 jobs
a full server         scripts that free memory are allowed at maxmemory, enqueue is           none
drains                refused whole
====================  ======================================================================  =======================

docs/redis.md has the keys, the commands that an ACL must allow, and what each setting of the server means for jobs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from multiq.backend import Backend, Page, QueueStats, State
from multiq.capabilities import Capabilities, Gap
from multiq.errors import JobNotFound, JobReserved, OptionInvalid, PayloadTooLarge
from multiq.url import Option, choice, seconds

from . import keys
from .addresses import servers_of
from .caller import Callers
from .consumer import RedisConsumer
from .doctor import examine
from .facts import Facts
from .jobs import MICROSECOND, listed, microseconds, new_job, new_jobs, pack_id, peeked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from multiq.backend import Finding, JobRecord, NewJob
    from multiq.url import BackendUrl

    from .servers import Servers

_SLICE = 500  # jobs that one script kicks, purges or lists: a few milliseconds of the server
_SCANNED_AT_ONCE = 1000  # keys
_SURELY_FITS = 1_000_000  # bytes: servers are seldom set to take less
_MOST_BODY = 512 * 1024 * 1024  # bytes of one string, as servers come; what a record adds is in facts.py

_REFUSALS = {b"missing": JobNotFound, b"reserved": JobReserved}


class RedisBackend(Backend):
    """Jobs on a Redis server: ``redis://host``, ``rediss://``, ``redis+unix:///path``, ``redis+sentinel://``, or on a
    cluster: ``redis+cluster://``.
    """

    declared: ClassVar[Capabilities] = Capabilities(
        backend="redis",
        delay_resolution=1e-6,
        max_body=_MOST_BODY,
        client_ids=True,
        atomic_batches=True,
        waits_in_server=True,
        shared=True,
        persistent=True,
        disconnect_ends_lease=Gap("never", "a lease belongs to a token, not to a connection, and outlives a short cut"),
        give_back=True,
        lists_jobs=True,
        durable_attempts=True,
        transactional_enqueue=Gap("never", "Redis has no transaction that a database's could take part in"),
        reasons=True,
        stable_ids=True,
        portable_leases=True,
        fenced_late=True,
    )
    options: ClassVar[Mapping[str, Option]] = {
        "timeout": Option(seconds(0.05, 3600), 5.0, "seconds that a call may take, all its tries included"),
        "prefix": Option(keys.prefix, "multiq", "what all keys begin with: two prefixes, two worlds of queues"),
        "ca": Option(str, None, "file with the authority that signed the server's certificate; default: the system's"),
        "cert": Option(str, None, "file with this client's certificate, where the server wants one"),
        "key": Option(str, None, "file with its private key, where it is not in the same file"),
        "tls": Option(choice("yes", "no"), "no", "TLS for redis+sentinel:// and redis+cluster://"),
        "sentinel_password": Option(str, None, "the password of the sentinels themselves"),
        "dangerously_skip_tls_verification": Option(
            choice("yes", "no"), "no", "accept any certificate: whoever sits in between can read and change every job"
        ),
    }

    def __init__(self, servers: Servers, *, prefix: str = "multiq") -> None:
        self._servers = servers
        self._prefix = prefix
        self._callers = Callers(servers, prefix)
        self._facts = Facts(self._callers)

    @classmethod
    def from_url(cls, url: BackendUrl) -> RedisBackend:
        return cls(servers_of(url), prefix=url.options["prefix"])

    @property
    def capabilities(self) -> Capabilities:
        return self._facts.make_exact(self.declared)

    # --- producing ---

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        if connection is not None:
            raise self.unsupported("transactional_enqueue")
        alone = new_job(jobs[0]) if len(jobs) == 1 else None
        if alone is not None:
            self._callers.call("enqueue_one", queue, alone)
        elif jobs:
            self._check_sizes(jobs)
            self._callers.call("enqueue", queue, new_jobs(jobs))
        return [job.id for job in jobs]

    # --- consuming ---

    def consumer(self, queues: Sequence[str]) -> RedisConsumer:
        return RedisConsumer(self._callers, queues)

    # --- looking and managing, from outside ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        packed = pack_id(job_id)
        reply = self._callers.call("peek", queue, (packed,))
        if reply is None:
            raise JobNotFound(queue, job_id)
        found, now = peeked(packed, reply)
        return found.told(queue, now)

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        place: tuple[int, int] | tuple[str, str] = ("", "") if after is None else _place(after)
        self._promote_all(queue)
        shown: list[JobRecord] = []
        while True:
            asked = min(limit + 1 - len(shown), _SLICE)
            found, now = listed(state, self._callers.call("jobs", queue, (asked, *place), state=state.value))
            for cursor, job in found:
                if len(shown) == limit:
                    return Page(shown, "{}.{}".format(*place))
                shown.append(job.told(queue, now))
                place = _place(cursor)
            if len(found) < asked:
                return Page(shown, None)

    def delete(self, queue: str, job_id: str) -> None:
        self._move("delete", queue, job_id)

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        self._move("reschedule", queue, job_id, microseconds(delay))
        return job_id

    def kick(self, queue: str, limit: int) -> int:
        return self._in_slices("kick", queue, limit)

    def kick_job(self, queue: str, job_id: str) -> None:
        self._move("kick_job", queue, job_id)

    def queues(self) -> list[str]:
        found = {keys.queue_of(key.decode("utf-8", "replace"), self._prefix) for key in self._scan()}
        return sorted(queue for queue in found if queue is not None)

    def stats(self, queue: str) -> QueueStats:
        ready, delayed, reserved, buried, pause = self._callers.call("stats", queue)
        return QueueStats(
            queue=queue,
            ready=ready,
            delayed=delayed,
            reserved=reserved,
            buried=buried,
            paused_for=int(pause) / MICROSECOND if pause != b"0" else None,
        )

    def pause(self, queue: str, seconds: float) -> None:
        self._callers.call("pause", queue, (microseconds(seconds),))

    def resume(self, queue: str) -> None:
        self._callers.call("pause", queue, (0,))

    def purge(self, queue: str, states: Sequence[State]) -> int:
        self._promote_all(queue)
        before = self.stats(queue)  # so that those who enqueue meanwhile cannot keep us here
        doomed = [state for state in (State.READY, State.DELAYED, State.BURIED) if state in states]
        return sum(self._in_slices("purge", queue, getattr(before, state) or 0, state=state) for state in doomed)

    def doctor(self) -> list[Finding]:
        return examine(self._servers)

    def close(self) -> None:
        self._callers.close()

    # --- how ---

    def _move(self, verb: str, queue: str, job_id: str, *details: int) -> None:
        answer = self._callers.call(verb, queue, (pack_id(job_id), *details))
        if answer in _REFUSALS:
            raise _REFUSALS[answer](queue, job_id)

    def _in_slices(self, verb: str, queue: str, limit: int, *, state: str | None = None) -> int:
        done = 0
        while done < limit:
            asked = min(_SLICE, limit - done)
            moved = int(self._callers.call(verb, queue, (asked,), state=state))
            done += moved
            if moved < asked:
                break
        return done

    def _promote_all(self, queue: str) -> None:
        while self._callers.call("promote", queue) == b"1":
            pass

    def _scan(self) -> Iterator[bytes]:
        """All keys of all queues: what holds a job is known by its keys, and by no list that could be wrong."""
        with self._callers.borrowed() as caller:
            for address in caller.all_addresses():
                cursor = b"0"
                while True:
                    words = ("SCAN", cursor, "MATCH", keys.pattern(self._prefix), "COUNT", _SCANNED_AT_ONCE)
                    cursor, found = caller.command(address, *words)
                    yield from found
                    if cursor == b"0":
                        break

    def _check_sizes(self, jobs: Sequence[NewJob]) -> None:
        largest = max((len(job.body) for job in jobs), default=0)
        if largest <= _SURELY_FITS:
            return
        limit = self.capabilities.max_body
        if limit is not None and largest > limit:
            raise PayloadTooLarge(largest, limit, "store it elsewhere, and enqueue where it is")


def _place(after: str) -> tuple[int, int]:
    """The place that a page's cursor tells of: score and sequence."""
    score, _, sequence = after.partition(".")
    with contextlib.suppress(ValueError):
        place = int(score), int(sequence)
        if min(place) >= 0 and max(place) < 2**63:
            return place
    raise OptionInvalid(f"after={after!r} is no page's cursor: pass what the page before gave as its after")
