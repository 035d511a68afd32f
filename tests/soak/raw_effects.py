"""Read jobs, outcomes, notes and waiting steps of a store in one snapshot, without any code of multiq's drivers."""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import redis
from soak.raw_stores import connect_mysql

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STATES = ("ready", "delayed", "reserved", "buried")
_OF_MYSQL = dict(enumerate((*_STATES, "ready", "held")))
_OF_SQLITE = dict(enumerate((*_STATES, "held")))
_QUEUES = ("home", "other")
_ATTEMPT_AT = 16  # in a stored outcome of Redis


class Snapshot(NamedTuple):
    """The content of a store at one moment. A job is its queue and its id."""

    jobs: dict[tuple[str, str], str]
    """The state of each job."""
    memos: set[tuple[str, str]]
    details: set[tuple[str, str]]
    outcomes: dict[tuple[str, str], int]
    """The attempt in each outcome."""
    notes: set[str]
    outbox: list[bytes]
    """Groups of steps for other queues. Only Redis has such groups."""


def read_redis(port: int) -> Snapshot:
    with contextlib.closing(redis.Redis(port=port, protocol=2)) as client:
        pipe: Any = client.pipeline(transaction=True)
        for queue in _QUEUES:
            base = f"multiq:{{{queue}}}:"
            for state in ("ready", "delayed", "reserved", "buried", "held", "outbox"):
                pipe.execute_command("ZRANGE", base + state, 0, -1)
            for name in ("jobs", "bodies", "reasons", "notes"):
                pipe.execute_command("HKEYS", base + name)
            pipe.hgetall(base + "outcomes")
        replies = iter(pipe.execute())
    snapshot = Snapshot({}, set(), set(), {}, set(), [])
    for queue in _QUEUES:
        states = {
            _text(place[12:]): state  # the id follows the age and the priority
            for state in ("ready", "delayed", "reserved", "buried", "held")
            for place in next(replies)
        }
        snapshot.outbox.extend(next(replies))
        snapshot.jobs.update({(queue, _text(one)): states.get(_text(one), "nowhere") for one in next(replies)})
        snapshot.memos.update(
            (queue, _text(one[:-1])) for one in next(replies) if len(one) > 16 and one.endswith(b"\1")
        )
        snapshot.details.update(
            (queue, _text(one[:-1])) for one in next(replies) if len(one) > 16 and one.endswith(b"\1")
        )
        snapshot.notes.update(one.decode() for one in next(replies))
        stored = next(replies)
        snapshot.outcomes.update(
            {(queue, _text(one)): struct.unpack_from(">I", value, _ATTEMPT_AT)[0] for one, value in stored.items()}
        )
    return snapshot


def _read_mysql(url: str) -> Snapshot:
    with contextlib.closing(connect_mysql(url)) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        cursor.execute("SELECT queue, id, state, memo IS NOT NULL, detail IS NOT NULL FROM multiq_jobs")
        jobs = cursor.fetchall()
        cursor.execute("SELECT queue, id, attempt FROM multiq_outcomes")
        outcomes = cursor.fetchall()
        cursor.execute("SELECT name FROM multiq_notes WHERE version <> 0")
        return _of_rows(_OF_MYSQL, jobs, outcomes, cursor.fetchall())


def _read_sqlite(url: str) -> Snapshot:
    with contextlib.closing(sqlite3.connect(_path(url), timeout=60, isolation_level=None)) as db:
        db.execute("BEGIN")
        jobs = db.execute(
            "SELECT queue, id, state, memo IS NOT NULL, detail IS NOT NULL "
            "FROM multiq_jobs LEFT JOIN multiq_memos USING (seq)"
        ).fetchall()
        outcomes = db.execute("SELECT queue, id, attempt FROM multiq_outcomes").fetchall()
        return _of_rows(_OF_SQLITE, jobs, outcomes, db.execute("SELECT key FROM multiq_notes").fetchall())


def states(name: str, url: str) -> Counter[str]:
    """How many jobs of the queue "home" have each state. Also reads tables that a multiq without outcomes made."""
    if name == "redis":
        return Counter(read_redis(urlsplit(url).port or 6379).jobs.values())
    if name == "mysql":
        with contextlib.closing(connect_mysql(url)) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT state FROM multiq_jobs WHERE queue = 'home'")
            return Counter(_OF_MYSQL[state] for (state,) in cursor.fetchall())
    with contextlib.closing(sqlite3.connect(_path(url), timeout=60)) as db:
        rows = db.execute("SELECT state FROM multiq_jobs WHERE queue = 'home'").fetchall()
        return Counter(_OF_SQLITE[state] for (state,) in rows)


def _path(url: str) -> str:
    return url.split("?", maxsplit=1)[0].removeprefix("sqlite:///")


def _of_rows(states: dict[int, str], jobs: Any, outcomes: Any, notes: Any) -> Snapshot:
    rows = [((_plain(queue), _plain(job_id)), *rest) for queue, job_id, *rest in jobs]
    return Snapshot(
        {job: states.get(state, str(state)) for job, state, _, _ in rows},
        {job for job, _, has_memo, _ in rows if has_memo},
        {job for job, _, _, has_detail in rows if has_detail},
        {(_plain(queue), _plain(job_id)): attempt for queue, job_id, attempt in outcomes},
        {_plain(name) for (name,) in notes},
        [],
    )


def _plain(value: bytes | str) -> str:
    """A name or an id. MySQL has UUIDs as 16 bytes, and marks other ids."""
    if isinstance(value, str):
        return value
    return (
        value.hex() if len(value) == 16 and value[0] < 128 and not value.isascii() else value.lstrip(b"\xff").decode()
    )


def _text(packed: bytes) -> str:
    """An id as Redis has it: 16 bytes of a UUID, or a text, an end mark, and zeros."""
    return packed.hex() if len(packed) == 16 else packed.rstrip(b"\0")[:-1].decode()


@contextlib.contextmanager
def failing_to_read() -> Iterator[None]:
    with contextlib.suppress(redis.RedisError, OSError):
        yield


READERS: dict[str, Callable[[str], Snapshot]] = {"mysql": _read_mysql, "sqlite": _read_sqlite}
