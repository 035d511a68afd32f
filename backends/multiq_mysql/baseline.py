"""The baseline of ``multiq bench``: the fastest loops that PyMySQL and InnoDB allow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from pymysql.constants import CLIENT

from multiq.bench.adapter import PUT_BATCH, TAKE_BATCH, Baseline
from multiq.ids import new_id

if TYPE_CHECKING:
    from pymysql.connections import Connection

_COLUMNS = (
    "(id BIGINT AUTO_INCREMENT PRIMARY KEY, taken TINYINT NOT NULL DEFAULT 0, body LONGBLOB NOT NULL, "
    "KEY ready (taken, id)) ENGINE=InnoDB"
)


class MysqlBaseline(Baseline):
    """Sends as few statements and packets as possible. It has its own table and its own connection."""

    FLAG: ClassVar[int] = CLIENT.MULTI_STATEMENTS
    """The client flag with which the connection must be opened."""

    def __init__(self, connection: Connection[Any], body: bytes) -> None:
        """Raises ``pymysql.MySQLError``, after it has closed the connection."""
        self._row = f"(x'{body.hex()}')"
        self._db = connection
        self._cursor = connection.cursor()
        self._table = f"multiq_bench_{new_id().replace('-', '')}"
        try:
            self._ask("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            self._ask(f"CREATE TABLE {self._table} {_COLUMNS}")
        except BaseException:
            connection.close()
            raise

    def put_one_by_one(self, count: int) -> float:
        """One autocommitted INSERT per row."""
        start = time.perf_counter()
        for _ in range(count):
            self._cursor.execute(f"INSERT INTO {self._table} (body) VALUES {self._row}")  # noqa: S608 - hexadecimal
        return count / (time.perf_counter() - start)

    def put_in_batches(self, count: int) -> float:
        """One INSERT per batch. The statement repeats the text of each row, because the rows of real jobs differ."""
        start = time.perf_counter()
        for at in range(0, count, PUT_BATCH):
            rows = ",".join([self._row for _ in range(min(PUT_BATCH, count - at))])
            self._cursor.execute(f"INSERT INTO {self._table} (body) VALUES {rows}")  # noqa: S608 - hexadecimal
        return count / (time.perf_counter() - start)

    def take_in_batches(self) -> float:
        """Take all rows in batches. Each batch is one transaction of two packets. The transaction also deletes the
        previous batch."""
        start, count, held = time.perf_counter(), 0, "0"
        while True:
            (*_, taken) = self._ask(
                f"BEGIN;DELETE FROM {self._table} WHERE id IN ({held});"  # noqa: S608 - numbers
                f"SELECT id, body FROM {self._table} WHERE taken = 0 ORDER BY id LIMIT {TAKE_BATCH} "
                "FOR UPDATE SKIP LOCKED"
            )
            if not taken:
                self._ask("COMMIT")
                return count / (time.perf_counter() - start)
            held = ",".join([str(row[0]) for row in taken])
            self._ask(f"UPDATE {self._table} SET taken = 1 WHERE id IN ({held});COMMIT")  # noqa: S608 - numbers
            count += len(taken)

    def close(self) -> None:
        try:
            if self._db.open:
                self._ask(f"DROP TABLE IF EXISTS {self._table}")
        finally:
            self._db.close()

    def _ask(self, statements: str) -> list[tuple[Any, ...]]:
        self._cursor.execute(statements)
        answers = [tuple(self._cursor.fetchall())]
        while self._cursor.nextset():
            answers.append(tuple(self._cursor.fetchall()))
        return answers
