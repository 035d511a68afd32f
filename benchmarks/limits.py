"""The leanest loops that a store and its client library allow: what multiq is measured against.

They keep no contract: no fencing, no delays, no counters, one reader. They only do what cannot be left out: write a
job durably, mark it taken, delete it.
"""

from __future__ import annotations

import json
import sqlite3
import time
from typing import TYPE_CHECKING

import greenstalk
import pymysql
import redis
from pymysql.constants import CLIENT
from redis.backoff import NoBackoff
from redis.retry import Retry

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

BATCH = 100
BULK = 500


class SqliteLimit:
    """Plain ``sqlite3`` in WAL mode with ``synchronous=FULL``, bodies as large as those of a no-op task."""

    def __init__(self, path: Path, body: bytes) -> None:
        self._body = body
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("CREATE TABLE IF NOT EXISTS jobs (id INTEGER PRIMARY KEY, taken INTEGER DEFAULT 0, body BLOB)")
        self._db.execute("CREATE INDEX IF NOT EXISTS ready ON jobs (id) WHERE taken = 0")

    def put_one_by_one(self, count: int) -> float:
        """Rows per second, each in a transaction of its own."""
        start = time.perf_counter()
        for _ in range(count):
            self._db.execute("INSERT INTO jobs (body) VALUES (?)", (self._body,))
        return count / (time.perf_counter() - start)

    def put_in_batches(self, count: int) -> float:
        """Rows per second, 100 in a transaction."""
        start = time.perf_counter()
        for _ in range(count // BATCH):
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO jobs (body) VALUES (?)", [(self._body,)] * BATCH)
            self._db.execute("COMMIT")
        return count / (time.perf_counter() - start)

    def take_in_batches(self) -> float:
        """Rows per second: delete the last 100 and take the next 100 in one transaction, until there are none."""
        start, count, held = time.perf_counter(), 0, "[]"
        while True:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM jobs WHERE id IN (SELECT value FROM json_each(?))", (held,))
            taken = self._db.execute(
                "UPDATE jobs SET taken = 1 WHERE id IN (SELECT id FROM jobs WHERE taken = 0 ORDER BY id LIMIT ?)"
                " RETURNING id, body",
                (BATCH,),
            ).fetchall()
            self._db.execute("COMMIT")
            if not taken:
                return count / (time.perf_counter() - start)
            held = json.dumps([row[0] for row in taken])
            count += len(taken)

    def close(self) -> None:
        self._db.close()


class RedisLimit:
    """Plain redis-py with hiredis on a server of its own, bodies as large as those of a no-op task."""

    _PUT = """
        local scored = {}
        for i = 1, #ARGV, 2 do
            scored[i], scored[i + 1] = i, ARGV[i]
        end
        redis.call('HSET', KEYS[1], unpack(ARGV))
        redis.call('ZADD', KEYS[2], unpack(scored))
    """
    _TAKE = """
        if #ARGV > 1 then
            redis.call('ZREM', KEYS[3], unpack(ARGV, 2))
            redis.call('HDEL', KEYS[1], unpack(ARGV, 2))
        end
        local ready = redis.call('ZRANGE', KEYS[2], 0, ARGV[1] - 1)
        if #ready == 0 then return ready end
        redis.call('ZREMRANGEBYRANK', KEYS[2], 0, #ready - 1)
        local held = {}
        for i = 1, #ready do
            held[2 * i - 1], held[2 * i] = 1, ready[i]
        end
        redis.call('ZADD', KEYS[3], unpack(held))
        return {ready, redis.call('HMGET', KEYS[1], unpack(ready))}
    """
    _KEYS = ("limit:jobs", "limit:ready", "limit:reserved")

    def __init__(self, port: int, body: bytes) -> None:
        self._body = body
        self._redis = redis.Redis(port=port, protocol=2, retry=Retry(NoBackoff(), 0))
        self._redis.delete(*self._KEYS, "limit:list")

    def put_one_by_one(self, count: int) -> float:
        """``LPUSH`` per second, each with a round trip of its own."""
        self._redis.lpush("limit:list", self._body)
        start = time.perf_counter()
        for _ in range(count):
            self._redis.lpush("limit:list", self._body)
        return count / (time.perf_counter() - start)

    def put_in_batches(self, count: int) -> float:
        """Jobs per second, 500 in a script."""
        put = self._redis.register_script(self._PUT)
        put(self._KEYS, ("first", self._body))
        start = time.perf_counter()
        for first in range(0, count, BULK):
            jobs: list[int | bytes] = []
            for number in range(first, first + BULK):
                jobs += (number, self._body)
            put(self._KEYS, jobs)
        return count / (time.perf_counter() - start)

    def take_in_batches(self) -> float:
        """Jobs per second: forget the last 100 and take the next 100 in one script, until there are none."""
        take = self._redis.register_script(self._TAKE)
        start, count = time.perf_counter(), 0
        held: list[bytes] = []
        while True:
            answer = take(self._KEYS, (BATCH, *held))
            if not answer:
                return count / (time.perf_counter() - start)
            held = answer[0]
            count += len(held)

    def close(self) -> None:
        self._redis.close()


class BeanstalkLimit:
    """greenstalk, and its bare socket for what it cannot do in one go; bodies as large as those of a no-op task."""

    PUTS = 1000  # in one go

    def __init__(self, address: tuple[str, int], body: bytes) -> None:
        self._body = body
        self._client = greenstalk.Client(address, encoding=None)
        self._socket = self._client._sock  # noqa: SLF001 - the protocol's batches are ours to write
        self._replies = self._client._reader  # noqa: SLF001

    def put_one_by_one(self, count: int) -> float:
        """greenstalk's ``put`` per second, each with a round trip of its own."""
        put, body = self._client.put, self._body
        start = time.perf_counter()
        for _ in range(count):
            put(body, 1024, 0, 60)
        return count / (time.perf_counter() - start)

    def put_in_batches(self, count: int) -> float:
        """Jobs per second, 1,000 put before the first reply is read."""
        batch = b"put 1024 0 60 %d\r\n%b\r\n" % (len(self._body), self._body) * self.PUTS
        readline = self._replies.readline
        start = time.perf_counter()
        for _ in range(count // self.PUTS):
            self._socket.sendall(batch)
            for _ in range(self.PUTS):
                if not readline().startswith(b"INSERTED "):
                    raise RuntimeError("the server refused a job")
        return count / (time.perf_counter() - start)

    def take_in_batches(self) -> float:
        """Jobs per second: delete the last 100 and reserve the next 100 in one round trip, until there are none."""
        reserve, readline, read = b"reserve-with-timeout 0\r\n" * BATCH, self._replies.readline, self._replies.read
        start, count = time.perf_counter(), 0
        held: list[bytes] = []
        while True:
            self._socket.sendall(b"".join([b"delete %b\r\n" % job_id for job_id in held]) + reserve)
            for _ in held:
                if readline() != b"DELETED\r\n":
                    raise RuntimeError("the server did not delete what it had handed out")
            held = []
            for _ in range(BATCH):
                words = readline().split()
                if words[0] == b"RESERVED":
                    held.append(words[1])
                    read(int(words[2]) + 2)
            count += len(held)
            if not held:
                return count / (time.perf_counter() - start)

    def close(self) -> None:
        self._client.close()


class MysqlLimit:
    """PyMySQL and the fewest statements and packets that will do, bodies as large as those of a no-op task."""

    ROWS = 1000  # in one INSERT
    _TABLE = (
        "CREATE TABLE plain (id BIGINT AUTO_INCREMENT PRIMARY KEY, taken TINYINT NOT NULL DEFAULT 0, "
        "body BLOB NOT NULL, KEY ready (taken, id)) ENGINE=InnoDB"
    )

    def __init__(self, body: bytes, **address: Any) -> None:
        self._body = body
        self._db = pymysql.connect(
            **{**address, "autocommit": True, "ssl_disabled": True, "client_flag": CLIENT.MULTI_STATEMENTS}
        )
        self._cursor = self._db.cursor()
        self._ask("DROP TABLE IF EXISTS plain")
        self._ask(self._TABLE)
        self._ask("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def put_one_by_one(self, count: int) -> float:
        """Rows per second, each in an autocommitted INSERT of its own."""
        start = time.perf_counter()
        for _ in range(count):
            self._cursor.execute(f"INSERT INTO plain (body) VALUES (x'{self._body.hex()}')")  # noqa: S608 - hexadecimal
        return count / (time.perf_counter() - start)

    def put_in_batches(self, count: int) -> float:
        """Rows per second, 1,000 in an INSERT; each row is written by itself, as rows that differ would be."""
        start = time.perf_counter()
        for _ in range(count // self.ROWS):
            rows = ",".join([f"(x'{self._body.hex()}')" for _ in range(self.ROWS)])
            self._cursor.execute(f"INSERT INTO plain (body) VALUES {rows}")  # noqa: S608 - hexadecimal
        return count / (time.perf_counter() - start)

    def take_in_batches(self) -> float:
        """Rows per second: delete the last 100 and take the next 100, in one transaction and two packets."""
        start, count, held = time.perf_counter(), 0, "0"
        while True:
            (*_, taken) = self._ask(
                f"BEGIN;DELETE FROM plain WHERE id IN ({held});"  # noqa: S608 - numbers
                f"SELECT id, body FROM plain WHERE taken = 0 ORDER BY id LIMIT {BATCH} FOR UPDATE SKIP LOCKED"
            )
            if not taken:
                self._ask("COMMIT")
                return count / (time.perf_counter() - start)
            held = ",".join([str(row[0]) for row in taken])
            self._ask(f"UPDATE plain SET taken = 1 WHERE id IN ({held});COMMIT")  # noqa: S608 - numbers
            count += len(taken)

    def close(self) -> None:
        self._ask("DROP TABLE IF EXISTS plain")
        self._db.close()

    def _ask(self, statements: str) -> list[tuple[Any, ...]]:
        self._cursor.execute(statements)
        answers = [tuple(self._cursor.fetchall())]
        while self._cursor.nextset():
            answers.append(tuple(self._cursor.fetchall()))
        return answers
