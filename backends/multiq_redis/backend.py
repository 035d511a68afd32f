"""The Redis backend: queues on one server, a primary with replicas, or a cluster. Each change is one Lua script.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
atomic operations     one script each (lua/<verb>.lua), all keys declared, all in one slot    one round trip per call
priority, then age    a sorted set by priority; its members begin with a sequence of fixed    O(log n)
                      width, so that jobs of one priority sort by age
never early           the server's TIME, in microseconds; delays rounded up                   one call in the script
one live lease        every settle compares the lease's token with the token in the job's     one read of the record
                      record, and the lease's end with the clock
one effect per call   numbered calls, whose last answer the server keeps for five minutes     one GET, one SET
outcomes              stored by the script that acks (lua/exchange_after.lua); calls without  7 us instead of 2.4
                      an outcome, a memo or a detail use the faster lua/exchange.lua
one queue, many       a job's partition follows from its id; each process reads from as many  one GET per reserve
nodes                 partitions as any process has used (partitions.py)
waiting               BZPOPMIN on a marker without content; the next reserve is sent with it  0.4 commands/s, idle
due jobs in order     a reserve first makes the due jobs ready, in slices                     some ms per 1,000 jobs
a full server         at maxmemory, scripts that free memory may run, and an enqueue is       none
drains                refused as a whole
====================  ======================================================================  =======================

docs/redis.md has the keys, the commands that an ACL must allow, and what each setting of the server means for jobs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from multiq.backend import (
    Diagnosis,
    Holds,
    Inspection,
    Limits,
    Management,
    Notes,
    Outcomes,
    Pausing,
    Purging,
    QueueStats,
    State,
    check_state,
    check_states,
)
from multiq.backend.capabilities import Capabilities, Gap
from multiq.driverkit.replies import BACKEND_METHODS
from multiq.errors import (
    BackendError,
    JobHeld,
    JobNotFound,
    JobReserved,
    OptionInvalid,
    PayloadTooLarge,
    UniqueTaken,
)
from multiq.settings.url import Option, choice, seconds

from . import keys, limits, notes, outcomes
from .consumer import RedisConsumer
from .doctor import examine
from .dsn import read_tls_version, servers_of
from .enqueue import enqueue_batch, uncertain
from .errors import guarded
from .listing import list_jobs, list_queues, partitioned_queues, promote_all
from .partitions import Partitions, parse_count
from .pool import Pool
from .records import MICROSECOND, has_gates, microseconds, new_job, pack_id, parse_peek
from .redis_py_client import servers_of_client
from .relay import Relay
from .server_info import ServerInfo
from .steps import StepEncoder, adds_nothing, carry_out_call, home_of, queues_with_new_jobs, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from multiq.backend import Finding, JobRecord, NewJob, Page
    from multiq.backend.effects import After, Note, NotePage, Outcome, OutcomeKind, OutcomePage, Step, Version
    from multiq.backend.limits import LimitState, Quota
    from multiq.settings.url import BackendUrl

    from .connection import Word
    from .servers import Servers

_SLICE = 500  # jobs that one script kicks or purges, in a few milliseconds
_SURELY_FITS = 1_000_000  # bytes; nearly all servers accept a value of this size
_MOST_BODY = 512 * 1024 * 1024  # bytes: Redis' default limit of one string; server_info.py subtracts the record

_MISSING = b"missing"
_DELETED = ord("d")
_GATED = ord("g")
_DELETED_AT_ONCE = 500  # jobs that one script deletes, in a few milliseconds
_OTHER_SCRIPTS = {b"unique", b"gated"}  # jobs with unique keys or gates need another script
_REFUSALS = {_MISSING: JobNotFound, b"reserved": JobReserved, b"held": JobHeld, b"taken": UniqueTaken}
_MAY_BE_PARKED = 7  # index in the reply of lua/stats.lua
#: index of the count in the reply of lua/stats.lua
_COUNTED = {State.READY: 0, State.DELAYED: 1, State.BURIED: 3, State.HELD: 6}

_GAPS_OF_PARTITIONS = {
    "total_order": Gap("never", "order holds within each of a queue's partitions (?partitions=), not between them"),
    "atomic_batches": Gap("never", "each partition's part of a batch is atomic (?partitions=), the whole batch is not"),
}


def _yes_or_no(text: str) -> str:
    """Read an option. Redis-py's words for yes and no are accepted, too."""
    return "no" if choice("yes", "no", "true", "false", "1", "0")(text) in {"no", "false", "0"} else "yes"


@guarded(
    *BACKEND_METHODS,
    "delete_many",
    "outcomes",
    "history",
    "forget",
    "carry_out",
    "relay",
    "note",
    "notes",
    "now",
    "limits",
)
class RedisBackend(Inspection, Management, Pausing, Purging, Outcomes, Holds, Notes, Limits, Diagnosis):
    """Jobs on a Redis server: ``redis://host``, ``rediss://``, ``redis+unix:///path``, ``redis+sentinel://``, or on a
    cluster: ``redis+cluster://``.

    ``RedisBackend(client=...)`` takes the settings of a redis-py client: addresses, database, user, password or
    credential provider, client name, TLS, sentinels. The backend opens connections of its own with these settings, so
    you may close the client. For a URL, ``multiq.App(url)`` makes the backend.

    Parameters of the constructor:

    - *client*: a ``redis.Redis`` (also one that ``Sentinel.master_for`` returned), a connection pool of such a client,
      or a ``redis.RedisCluster``.
    - *timeout*: seconds that a call may take, including its retries, from 0.05 to 3600. Default: 5.
    - *prefix*: the text that all keys begin with. Default: ``multiq``.
    - *partitions*: the number of partitions over which a queue's jobs are spread, from 1 to 64. Default: 1.
    - *servers*: only ``from_url`` uses this, instead of *client* and *timeout*.

    Raises ``OptionInvalid``.
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
        disconnect_ends_lease=Gap(
            "never", "a lease belongs to a token, not to a connection, and survives a short network failure"
        ),
        give_back=True,
        lists_jobs=True,
        durable_attempts=True,
        transactional_enqueue=Gap("never", "Redis has no transaction that could join a database's transaction"),
        reasons=True,
        stable_ids=True,
        portable_leases=True,
        fenced_late=True,
        memos=True,
        outcomes=True,
        holds=True,
        limits=True,
        unique=True,
        notes=True,
        one_step_everywhere=Gap(
            "cannot today",
            "a script reaches one hash slot of a cluster: steps in other queues are stored with the verdict, and are "
            "carried out right after it",
        ),
        diagnosis=True,
    )
    options: ClassVar[Mapping[str, Option]] = {
        "timeout": Option(seconds(0.05, 3600), 5.0, "seconds that a call may take, retries included"),
        "prefix": Option(keys.prefix, "multiq", "text that all keys begin with; each prefix has its own queues"),
        "partitions": Option(
            parse_count, 1, "partitions that a queue's jobs are spread over; each keeps its own order"
        ),
        "ca": Option(str, None, "file with the authority that signed the server's certificate; default: the system's"),
        "cert": Option(str, None, "file with this client's certificate, if the server requires one"),
        "key": Option(str, None, "file with that certificate's private key, if it is a separate file"),
        "tls": Option(choice("yes", "no"), "no", "TLS for redis+sentinel:// and redis+cluster://"),
        "password_file": Option(str, None, "file with the password, read for each new connection"),
        "password_env": Option(str, None, "name of the environment variable that has the password"),
        "client_name": Option(str, None, "name of the connections in the server's CLIENT LIST"),
        "ssl_ca_certs": Option(str, None, "the same as ca, under redis-py's name"),
        "ssl_certfile": Option(str, None, "the same as cert"),
        "ssl_keyfile": Option(str, None, "the same as key"),
        "ssl_password": Option(str, None, "password of the private key"),
        "ssl_ca_path": Option(str, None, "folder with authorities' certificates, as c_rehash prepares it"),
        "ssl_ciphers": Option(str, None, "OpenSSL's list of the ciphers to allow"),
        "ssl_min_version": Option(read_tls_version, None, "lowest TLS version to accept: TLSv1.2 or TLSv1.3"),
        "ssl_cert_reqs": Option(
            choice("required", "optional", "none"), None, "none: the same as dangerously_skip_tls_verification=yes"
        ),
        "ssl_check_hostname": Option(
            _yes_or_no, None, "no: accept a trusted authority's certificate for another host, too"
        ),
        "sentinel_username": Option(str, None, "the user of the sentinels themselves"),
        "sentinel_password": Option(str, None, "the password of the sentinels themselves"),
        "sentinel_password_file": Option(str, None, "file with the sentinels' password, read for each new connection"),
        "sentinel_password_env": Option(str, None, "name of the environment variable that has the sentinels' password"),
        "dangerously_skip_tls_verification": Option(
            choice("yes", "no"), "no", "accept any certificate: an attacker in between can read and change every job"
        ),
    }

    def __init__(
        self,
        servers: Servers | None = None,
        *,
        client: Any = None,
        timeout: float = 5.0,
        prefix: str = "multiq",
        partitions: int = 1,
    ) -> None:
        if (servers is None) == (client is None):
            raise OptionInvalid("RedisBackend must have client=, a redis-py client; for a URL there is multiq.App(url)")
        if servers is None:
            prefix, partitions = self._checked("prefix", prefix), self._checked("partitions", partitions)
            servers = servers_of_client(client, self._checked("timeout", timeout))
        self._servers = servers
        self._prefix = prefix
        self._pool = Pool(servers, prefix)
        self._server_info = ServerInfo(self._pool)
        self._partitions = Partitions(self._pool, partitions)
        self._relay = Relay(self._pool, self._partitions)

    @classmethod
    def from_url(cls, url: BackendUrl) -> RedisBackend:
        return cls(servers_of(url), prefix=url.options["prefix"], partitions=url.options["partitions"])

    @property
    def capabilities(self) -> Capabilities:
        exact = self._server_info.refine(self.declared)
        return exact if self._partitions.count == 1 else msgspec.structs.replace(exact, **_GAPS_OF_PARTITIONS)

    # --- producing ---

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        if connection is not None:
            raise self.unsupported("transactional_enqueue")
        is_partitioned = self._partitions.count > 1
        if is_partitioned:
            self._partitions.announce(queue)
        alone = new_job(jobs[0]) if len(jobs) == 1 else None
        if alone is not None:
            partition = self._partitions.partition_for(queue, alone[0]) if is_partitioned else queue
            try:
                self._pool.call("enqueue_one", partition, alone)
            except BackendError as exc:
                if exc.may_be_done:
                    raise uncertain(exc, queue, jobs) from exc
                raise
        elif jobs:
            self._check_size(max(len(job.body) for job in jobs))
            return enqueue_batch(self._pool, self._partitions, queue, jobs)
        return [job.id for job in jobs]

    # --- consuming ---

    def consumer(self, queues: Sequence[str]) -> RedisConsumer:
        return RedisConsumer(self._pool, self._partitions, self._relay, queues, self._check_size)

    # --- inspecting and managing ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        packed = pack_id(job_id)
        partition = self._partitions.partition_for(queue, packed)
        reply = self._pool.call("peek", partition, (packed,))
        if reply is None and (others := self._partitions.others(queue, partition)):
            replies = self._pool.call_each("peek", others, (packed,))
            reply = next((reply for reply in replies if reply is not None), None)
        if reply is None:
            raise JobNotFound(queue, job_id)
        found, now = parse_peek(packed, reply)
        held_by = b""
        if found.state is State.READY and has_gates(found.record):
            (held_by,) = self._pool.call("held_by", queue, (packed,))
        return found.to_record(queue, now, held_by)

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        state = check_state(state)
        return list_jobs(self._pool, self._partitions.refreshed(queue), state, limit, after)

    def delete(self, queue: str, job_id: str) -> None:
        self._move("delete", queue, job_id)

    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        kept = b"" if after is None or after.keep <= 0 else outcomes.pack_kept(after)
        self._check_size(len(kept))
        by_partition: dict[str, list[bytes]] = {}
        for packed in dict.fromkeys(map(pack_id, ids)):
            by_partition.setdefault(self._partitions.partition_for(queue, packed), []).append(packed)
        answers: dict[bytes, int] = {}
        for partition, some in by_partition.items():
            missing = self._delete_some(partition, some, kept, answers)
            for other in self._partitions.others(queue, partition) if missing else ():
                missing = self._delete_some(other, missing, kept, answers)
        errors = {_DELETED: None, ord("m"): JobNotFound, ord("r"): JobReserved}
        found: list[JobNotFound | JobReserved | None] = []
        for job_id in ids:
            error = errors[answers[pack_id(job_id)]]
            found.append(None if error is None else error(queue, job_id))
            if error is None:
                answers[pack_id(job_id)] = ord("m")  # the answer if *ids* has this id again
        return found

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        self._move("reschedule", queue, job_id, microseconds(delay))
        return job_id

    def kick(self, queue: str, limit: int) -> int:
        kicked = 0
        for partition in self._partitions.refreshed(queue):
            kicked += self._kick(partition, limit - kicked)
        return kicked

    def kick_job(self, queue: str, job_id: str) -> None:
        self._move("kick_job", queue, job_id)

    def queues(self) -> list[str]:
        return list_queues(self._pool)

    def stats(self, queue: str) -> QueueStats:
        replies = self._pool.call_each("stats", self._partitions.all_of(queue))
        if more := self._partitions.learn(queue, replies[0][5]):
            replies += self._pool.call_each("stats", more)
        if replies[0][_MAY_BE_PARKED] == b"1":  # parked jobs are in the first partition
            replies[0] = self._pool.call("stats_gated", queue)
        ready, delayed, reserved, buried, held = (sum(reply[at] for reply in replies) for at in (0, 1, 2, 3, 6))
        pause = max(int(reply[4]) for reply in replies)
        return QueueStats(
            queue=queue,
            ready=ready,
            delayed=delayed,
            reserved=reserved,
            buried=buried,
            held=held,
            paused_for=pause / MICROSECOND if pause else None,
        )

    def pause(self, queue: str, seconds: float) -> None:
        self._pause(queue, microseconds(seconds))

    def resume(self, queue: str) -> None:
        self._pause(queue, 0)

    def purge(self, queue: str, states: Sequence[State]) -> int:
        states = check_states(states)
        return sum(self._purge(partition, states) for partition in self._partitions.refreshed(queue))

    def outcomes(self, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
        return outcomes.find(self._pool, self._partitions, queue, ids)

    def history(
        self, queue: str, *, kind: OutcomeKind | None = None, limit: int = 100, after: str | None = None
    ) -> OutcomePage:
        return outcomes.page(self._pool, self._partitions.refreshed(queue), kind, limit, after)

    def forget(self, queue: str, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
        partitions = self._partitions.refreshed(queue)
        if ids is not None:
            return sum(outcomes.forget(self._pool, partition, ids) for partition in partitions)
        forgotten = 0
        for partition in partitions:
            forgotten += self._in_slices("forget", partition, limit - forgotten)[0]
        return forgotten

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        self._check_size(max(map(size_of, steps), default=0))
        if self._partitions.count > 1:
            for queue in queues_with_new_jobs(steps):
                self._partitions.announce(queue)
        partition = home_of(self._partitions, steps, when)
        if partition is None:
            return True
        encoder = StepEncoder(self._partitions, partition)
        encoder.add(0, steps)
        verb = "carry_out_unique" if encoder.has_terms else "carry_out"
        if adds_nothing(steps):
            verb = "carry_out_removals"
        conditions = [(condition.key.encode(), notes.pack_version(condition.version)) for condition in when]
        with self._pool.borrowed() as client:
            has_held, groups = client.perform(carry_out_call(client, partition, verb, conditions, encoder))
        self._relay.after(partition, groups)
        return bool(has_held == b"1")

    def relay(self, queues: Sequence[str]) -> int:
        return self._relay.all_of(queues)

    def note(self, home: str, key: str) -> Note | None:
        return notes.find(self._pool, home, key)

    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        return notes.page(self._pool, home, prefix, limit, after)

    def now(self, home: str) -> float:
        return notes.now(self._pool, home)

    def limits(
        self, queue: str, change: Mapping[str, Quota | None] | None = None, *, pinned: bool = True
    ) -> list[LimitState]:
        if change:
            limits.change(self._pool, queue, change, pinned=pinned)
        return limits.states(self._pool, queue)

    def doctor(self) -> list[Finding]:
        findings = examine(self._servers)
        with contextlib.suppress(BackendError):  # the findings above have already reported the error
            findings += self._partitions.findings(partitioned_queues(self._pool))
        return findings

    def close(self) -> None:
        self._pool.close()

    # --- helpers ---

    def _checked(self, name: str, value: object) -> Any:
        """Checks a constructor's option like the same option in a URL. Raises ``OptionInvalid``."""
        try:
            return self.options[name].read(str(value))
        except ValueError as exc:
            raise OptionInvalid(f"{name}={value}: {exc}") from None

    def _discard_connections(self) -> None:
        """Close all connections. After a malformed reply, later replies may belong to earlier requests."""
        self._pool.close()

    def _check_size(self, largest: int) -> None:
        """Raises ``PayloadTooLarge`` for a number of bytes that the server does not take as one value."""
        if largest <= _SURELY_FITS:
            return
        limit = self.capabilities.max_body
        if limit is not None and largest > limit:
            raise PayloadTooLarge(largest, limit, "store it elsewhere, and pass its address")

    def _delete_some(
        self, partition: str, packed: Sequence[bytes], kept: bytes, answers: dict[bytes, int]
    ) -> list[bytes]:
        """Delete jobs of a partition, and record the answer for each job. Returns the jobs that the partition does not
        have."""
        for at in range(0, len(packed), _DELETED_AT_ONCE):
            some = packed[at : at + _DELETED_AT_ONCE]
            answers.update(zip(some, self._pool.call("delete_many", partition, (kept, *some)), strict=True))
            gated = [job_id for job_id in some if answers[job_id] == _GATED]
            if gated:
                answers.update(zip(gated, self._pool.call("delete_many_gated", partition, (kept, *gated)), strict=True))
        return [job_id for job_id in packed if answers[job_id] == ord("m")]

    def _move(self, verb: str, queue: str, job_id: str, *details: int) -> None:
        packed = pack_id(job_id)
        partition = self._partitions.partition_for(queue, packed)
        answer = self._move_in(partition, verb, packed, *details)
        if answer == _MISSING:
            for other in self._partitions.others(queue, partition):
                answer = self._move_in(other, verb, packed, *details)
                if answer != _MISSING:
                    break
        if answer in _REFUSALS:
            raise _REFUSALS[answer](queue, job_id)

    def _move_in(self, partition: str, verb: str, *arguments: Word) -> Any:
        answer = self._pool.call(verb, partition, arguments)
        return (
            self._pool.call(f"{verb}_{answer.decode()}", partition, arguments) if answer in _OTHER_SCRIPTS else answer
        )

    def _kick(self, partition: str, limit: int) -> int:
        kicked = 0
        while kicked < limit:
            asked = min(_SLICE, limit - kicked)
            answer = self._pool.call("kick", partition, (asked,))
            moved = abs(int(answer))
            kicked += moved
            if answer.startswith(b"-"):
                return kicked + self._kick_with_keys(partition, limit - kicked)
            if moved < asked:
                break
        return kicked

    def _kick_with_keys(self, partition: str, limit: int) -> int:
        """Kick jobs, some of which have unique keys. If another job has taken the key of a job, the job stays
        buried."""
        kicked, after = 0, b"-inf"
        while after and kicked < limit:
            moved, _, after = self._pool.call("kick_unique", partition, (limit - kicked, after)).partition(b":")
            kicked += int(moved)
        return kicked

    def _pause(self, queue: str, pause: int) -> None:
        """Pause all partitions. Also pause partitions that a producer adds at the same time without knowing of the
        pause."""
        partitions = self._partitions.refreshed(queue)
        done = 0
        while len(partitions) > done:
            self._pool.call_each("pause", partitions[done:], (pause,))
            done = len(partitions)
            partitions = self._partitions.refreshed(queue)  # a queue has at most ``partitions.MOST``

    def _purge(self, partition: str, states: Sequence[State]) -> int:
        promote_all(self._pool, partition)
        counts = self._pool.call("stats", partition)  # counted once: producers must not prolong the purge
        doomed = [(state, counts[at]) for state, at in _COUNTED.items() if state in states]
        purged, had_gates = 0, False
        may_be_parked = counts[_MAY_BE_PARKED] == b"1"
        for state, count in doomed:
            if state is State.HELD:
                purged += self._in_slices("purge_held", partition, count)[0]
                continue
            found, is_marked = self._in_slices("purge", partition, count, state=state)
            purged += found
            had_gates = had_gates or is_marked
            # a reserve may have parked some of the jobs since they were counted
            may_be_parked = may_be_parked or (state is State.READY and found < count)
        parked = self._pool.call("parked_count", partition) if may_be_parked and State.READY in states else 0
        if parked:
            purged += self._in_slices("purge_parked", partition, parked)[0]
        elif had_gates:
            self._pool.call("purge_parked", partition, (0,))  # deletes what the limits have left of the jobs
        return purged

    def _in_slices(self, verb: str, partition: str, limit: int, *, state: str | None = None) -> tuple[int, bool]:
        """Returns the number of jobs, and whether a script has put a minus before its number."""
        done, is_marked = 0, False
        while done < limit:
            asked = min(_SLICE, limit - done)
            answer = self._pool.call(verb, partition, (asked,), state=state)
            moved = abs(int(answer))
            is_marked = is_marked or answer.startswith(b"-")
            done += moved
            if moved < asked:
                break
        return done, is_marked
