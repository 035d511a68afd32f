"""Read what a store holds by the store's own client, without any code of multiq's drivers.

Jobs are identified by the mark in their bodies, and states are read from the store's own columns, keys and counters.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MARK = re.compile(rb"soak#(\d+)#")
_STATES_OF_SQL = {0: "ready", 1: "delayed", 2: "reserved", 3: "buried", 4: "ready"}


def held(name: str, url: str) -> list[tuple[int, str]]:
    """Number and state of each job that the store holds."""
    return list(_READERS[name](url))


def connect_mysql(url: str) -> Any:
    """A PyMySQL connection to the database of a URL."""
    import pymysql

    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname or "",
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=unquote(parts.path.strip("/")),
    )


def _number(*raw: bytes | str | None) -> int:
    for data in raw:
        found = _MARK.search(data.encode() if isinstance(data, str) else data or b"")
        if found:
            return int(found[1])
    return -1  # not a job of the soak: the checker reports it


def _of_sqlite(url: str) -> Iterator[tuple[int, str]]:
    import sqlite3

    with contextlib.closing(sqlite3.connect(url.split("?", maxsplit=1)[0].removeprefix("sqlite:///"))) as db:
        rows = db.execute(
            "SELECT state, multiq_jobs.body, multiq_bodies.body FROM multiq_jobs LEFT JOIN multiq_bodies USING (seq)"
        )
        for state, *bodies in rows:
            yield _number(*bodies), _STATES_OF_SQL.get(state, str(state))


def _of_mysql(url: str) -> Iterator[tuple[int, str]]:
    with contextlib.closing(connect_mysql(url)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT state, body FROM multiq_jobs")
        for state, body in cursor.fetchall():
            yield _number(body), _STATES_OF_SQL.get(state, str(state))


def _of_redis(url: str) -> Iterator[tuple[int, str]]:
    import redis

    with contextlib.closing(redis.Redis.from_url(url.split("?", maxsplit=1)[0])) as client:
        ask: Any = client.execute_command  # redis-py does not annotate it
        for key in client.scan_iter("multiq:*:jobs", count=1000):
            line = key.removesuffix(b"jobs")
            flat = ask("HGETALL", key)
            records = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
            states = {
                member: state
                for state in ("ready", "delayed", "reserved", "buried")
                for member in ask("ZRANGE", line + state.encode(), 0, -1)
            }
            by_id = {member[12:]: state for member, state in states.items()}  # the id follows the age and the priority
            for job_id, record in records.items():
                body = ask("HGET", line + b"bodies", job_id)
                yield _number(record, body), by_id.get(job_id, "nowhere")


def _of_beanstalk(url: str) -> Iterator[tuple[int, str]]:
    """beanstalkd has no listing: peek the first job of each state, and delete it, until none is left."""
    import greenstalk

    parts = urlsplit(url)
    with greenstalk.Client((parts.hostname or "", parts.port or 11300), encoding=None) as client:
        for tube in client.tubes():
            client.use(tube)
            peeks: dict[str, Callable[[], Any]] = {
                "ready": client.peek_ready, "delayed": client.peek_delayed, "buried": client.peek_buried,
            }  # fmt: skip
            stats: Any = {"current-jobs-delayed": 1}
            while any(int(stats.get(f"current-jobs-{state}", 0)) for state in peeks):
                for state, peek in peeks.items():  # a job may become due between two peeks
                    with contextlib.suppress(greenstalk.NotFoundError):
                        while True:
                            job = peek()
                            yield _number(job.body), state
                            client.delete(job)
                stats = client.stats_tube(tube)
            for _ in range(int(stats["current-jobs-reserved"])):
                yield -1, "reserved"


_READERS: dict[str, Callable[[str], Iterator[tuple[int, str]]]] = {
    "sqlite": _of_sqlite,
    "redis": _of_redis,
    "mysql": _of_mysql,
    "beanstalk": _of_beanstalk,
}
