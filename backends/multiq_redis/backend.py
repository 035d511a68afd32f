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
one queue, many       a job's line follows from its id; everybody reads as many lines as      one GET per reserve
nodes                 anybody has used (lines.py)
waiting               BZPOPMIN on a marker that carries nothing, and behind it the next call  0.4 commands/s, idle
everybody's order     what is due is promoted in slices before anything is handed out         some ms per 1,000 jobs
a full server         scripts that free memory are allowed at maxmemory, enqueue is           none
drains                refused whole
====================  ======================================================================  =======================

docs/redis.md has the keys, the commands that an ACL must allow, and what each setting of the server means for jobs.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from multiq.backend import Backend, QueueStats, State, check_state, check_states
from multiq.backend.capabilities import Capabilities, Gap
from multiq.driverkit.replies import BACKEND_METHODS
from multiq.errors import BackendError, BackendTimeout, BackendUnavailable, JobNotFound, JobReserved, PayloadTooLarge
from multiq.settings.url import Option, choice, seconds

from . import keys
from .addresses import servers_of
from .client import Callers
from .consumer import RedisConsumer
from .doctor import examine
from .enqueue import enqueue_batch, uncertain
from .listing import list_jobs, promote_all
from .partitions import Lines, how_many
from .records import MICROSECOND, microseconds, new_job, pack_id, peeked
from .replies import guarded
from .server_info import Facts
from .topology import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from multiq.backend import Finding, JobRecord, NewJob, Page
    from multiq.settings.url import BackendUrl

    from .topology import Servers

_SLICE = 500  # jobs that one script kicks or purges: a few milliseconds of the server
_SCANNED_AT_ONCE = 1000  # keys
_SCANS_FOR = 300.0  # seconds: enough for hundreds of millions of keys, and a cursor that never ends has an end
_SURELY_FITS = 1_000_000  # bytes: servers are seldom set to take less
_MOST_BODY = 512 * 1024 * 1024  # bytes of one string, as servers come; what a record adds is in facts.py

_MISSING = b"missing"
_REFUSALS = {_MISSING: JobNotFound, b"reserved": JobReserved}
_COUNTED = {State.READY: 0, State.DELAYED: 1, State.BURIED: 3}  # where lua/stats.lua has what can be purged

_GAPS_OF_SEVERAL_LINES = {
    "total_order": Gap("never", "order holds within each of a queue's lines (?partitions=), not between them"),
    "atomic_batches": Gap("never", "a batch goes to several lines (?partitions=), each of which takes its part whole"),
}


@guarded(*BACKEND_METHODS)
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
        "partitions": Option(how_many, 1, "how many lines a queue's jobs are spread over; order holds within each"),
        "ca": Option(str, None, "file with the authority that signed the server's certificate; default: the system's"),
        "cert": Option(str, None, "file with this client's certificate, where the server wants one"),
        "key": Option(str, None, "file with its private key, where it is not in the same file"),
        "tls": Option(choice("yes", "no"), "no", "TLS for redis+sentinel:// and redis+cluster://"),
        "password_file": Option(str, None, "file with the password, read anew for each connection"),
        "password_env": Option(str, None, "name of the environment variable that has the password"),
        "sentinel_password": Option(str, None, "the password of the sentinels themselves"),
        "sentinel_password_file": Option(str, None, "file with it, read anew for each connection"),
        "sentinel_password_env": Option(str, None, "name of the environment variable that has it"),
        "dangerously_skip_tls_verification": Option(
            choice("yes", "no"), "no", "accept any certificate: whoever sits in between can read and change every job"
        ),
    }

    def __init__(self, servers: Servers, *, prefix: str = "multiq", partitions: int = 1) -> None:
        self._servers = servers
        self._prefix = prefix
        self._callers = Callers(servers, prefix)
        self._facts = Facts(self._callers)
        self._lines = Lines(self._callers, partitions)

    @classmethod
    def from_url(cls, url: BackendUrl) -> RedisBackend:
        return cls(servers_of(url), prefix=url.options["prefix"], partitions=url.options["partitions"])

    @property
    def capabilities(self) -> Capabilities:
        exact = self._facts.make_exact(self.declared)
        return exact if self._lines.spread == 1 else msgspec.structs.replace(exact, **_GAPS_OF_SEVERAL_LINES)

    # --- producing ---

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        if connection is not None:
            raise self.unsupported("transactional_enqueue")
        if self._lines.spread > 1:
            self._lines.say(queue)
        alone = new_job(jobs[0]) if len(jobs) == 1 else None
        if alone is not None:
            home = self._lines.home(queue, alone[0])
            try:
                self._callers.call("enqueue_one", home, alone)
            except BackendError as exc:
                if exc.may_be_done:
                    raise uncertain(exc, queue, jobs) from exc
                raise
        elif jobs:
            self._check_sizes(jobs)
            enqueue_batch(self._callers, self._lines, queue, jobs)
        return [job.id for job in jobs]

    # --- consuming ---

    def consumer(self, queues: Sequence[str]) -> RedisConsumer:
        return RedisConsumer(self._callers, self._lines, queues)

    # --- looking and managing, from outside ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        packed = pack_id(job_id)
        home = self._lines.home(queue, packed)
        reply = self._callers.call("peek", home, (packed,))
        if reply is None and (others := self._lines.others(queue, home)):
            replies = self._callers.call_each("peek", others, (packed,))
            reply = next((reply for reply in replies if reply is not None), None)
        if reply is None:
            raise JobNotFound(queue, job_id)
        found, now = peeked(packed, reply)
        return found.told(queue, now)

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        state = check_state(state)
        return list_jobs(self._callers, self._lines.asked(queue), state, limit, after)

    def delete(self, queue: str, job_id: str) -> None:
        self._move("delete", queue, job_id)

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        self._move("reschedule", queue, job_id, microseconds(delay))
        return job_id

    def kick(self, queue: str, limit: int) -> int:
        kicked = 0
        for line in self._lines.asked(queue):
            kicked += self._in_slices("kick", line, limit - kicked)
        return kicked

    def kick_job(self, queue: str, job_id: str) -> None:
        self._move("kick_job", queue, job_id)

    def queues(self) -> list[str]:
        found = {keys.queue_of(key.decode("utf-8", "replace"), self._prefix) for key in self._scan()}
        return sorted(queue for queue in found if queue is not None)

    def stats(self, queue: str) -> QueueStats:
        replies = self._callers.call_each("stats", self._lines.of(queue))
        if more := self._lines.learn(queue, replies[0][5]):
            replies += self._callers.call_each("stats", more)
        ready, delayed, reserved, buried = (sum(reply[at] for reply in replies) for at in range(4))
        pause = max(int(reply[4]) for reply in replies)
        return QueueStats(
            queue=queue,
            ready=ready,
            delayed=delayed,
            reserved=reserved,
            buried=buried,
            paused_for=pause / MICROSECOND if pause else None,
        )

    def pause(self, queue: str, seconds: float) -> None:
        self._pause(queue, microseconds(seconds))

    def resume(self, queue: str) -> None:
        self._pause(queue, 0)

    def purge(self, queue: str, states: Sequence[State]) -> int:
        states = check_states(states)
        return sum(self._purge(line, states) for line in self._lines.asked(queue))

    def doctor(self) -> list[Finding]:
        findings = examine(self._servers)
        with contextlib.suppress(BackendError):  # then it has been told already
            names = (keys.widened_queue_of(key.decode("utf-8", "replace"), self._prefix) for key in self._scan())
            findings += self._lines.findings({queue for queue in names if queue is not None})
        return findings

    def close(self) -> None:
        self._callers.close()

    # --- how ---

    def _discard_connections(self) -> None:
        """A reply was none: those that come after it may be none either."""
        self._callers.close()

    def _move(self, verb: str, queue: str, job_id: str, *details: int) -> None:
        packed = pack_id(job_id)
        home = self._lines.home(queue, packed)
        answer = self._callers.call(verb, home, (packed, *details))
        if answer == _MISSING:
            for line in self._lines.others(queue, home):
                answer = self._callers.call(verb, line, (packed, *details))
                if answer != _MISSING:
                    break
        if answer in _REFUSALS:
            raise _REFUSALS[answer](queue, job_id)

    def _pause(self, queue: str, pause: int) -> None:
        """Also those lines that a producer adds meanwhile: it may have looked for a pause before there was one."""
        lines = self._lines.asked(queue)
        done = 0
        while len(lines) > done:
            self._callers.call_each("pause", lines[done:], (pause,))
            done = len(lines)
            lines = self._lines.asked(queue)  # at most ``lines.MOST``

    def _purge(self, line: str, states: Sequence[State]) -> int:
        promote_all(self._callers, line)
        counts = self._callers.call("stats", line)  # so that those who enqueue meanwhile cannot keep us here
        doomed = [(state, counts[at]) for state, at in _COUNTED.items() if state in states]
        return sum(self._in_slices("purge", line, count, state=state) for state, count in doomed)

    def _in_slices(self, verb: str, line: str, limit: int, *, state: str | None = None) -> int:
        done = 0
        while done < limit:
            asked = min(_SLICE, limit - done)
            moved = int(self._callers.call(verb, line, (asked,), state=state))
            done += moved
            if moved < asked:
                break
        return done

    def _scan(self) -> Iterator[bytes]:
        """All keys of all queues: what holds a job is known by its keys, and by no list that could be wrong."""
        give_up_at = time.monotonic() + _SCANS_FOR
        with self._callers.borrowed() as caller:
            for address in caller.all_addresses():
                cursor, before = b"0", b""
                while cursor != before:
                    before = cursor
                    words = ("SCAN", cursor, "MATCH", keys.pattern(self._prefix), "COUNT", _SCANNED_AT_ONCE)
                    cursor, found = caller.command(address, *words)
                    yield from found
                    if cursor == b"0":
                        break
                    if time.monotonic() > give_up_at:
                        raise BackendTimeout(
                            f"{shown(address)} has more keys than can be looked through in {_SCANS_FOR:g} s: keep "
                            "queues in a database with fewer other keys"
                        )
                else:
                    raise BackendUnavailable(f"{shown(address)} answers SCAN with the same cursor for ever")

    def _check_sizes(self, jobs: Sequence[NewJob]) -> None:
        largest = max((len(job.body) for job in jobs), default=0)
        if largest <= _SURELY_FITS:
            return
        limit = self.capabilities.max_body
        if limit is not None and largest > limit:
            raise PayloadTooLarge(largest, limit, "store it elsewhere, and enqueue where it is")
