"""The tables, and the numbered migrations that create and change them.

Each migration runs once, even if several processes try to run it, or if a process is killed in the middle.
``multiq_schema`` has one row with these columns:

- ``version`` is the last migration that is done.
- ``oldest`` is the oldest version whose programs can work with the present tables. A migration that removes something
  raises ``oldest``.
- ``doing`` belongs to the migration after ``version``. It is the number of the last statement that this migration has
  begun, or NULL. DDL commits by itself, so a migration that was killed continues at this statement.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
import random
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pymysql

from multiq.backend import Schema, SchemaState
from multiq.driverkit.replies import guarded
from multiq.driverkit.sql import code_lines
from multiq.errors import BackendCorrupt, BackendTimeout, SchemaNotReady

from .errors import explain
from .opening import open_connection
from .pymysql_private import set_deadline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.resources.abc import Traversable

    from pymysql.connections import Connection

    from .dsn import Dsn

_MIGRATIONS = importlib.resources.files(__package__) / "migrations"
_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_OLDEST = re.compile(r"^-- oldest: (\d+)$", re.MULTILINE)

_BOOKKEEPING = (
    (
        "CREATE TABLE IF NOT EXISTS multiq_schema (only_one TINYINT NOT NULL PRIMARY KEY, "
        "version INT NOT NULL, oldest INT NOT NULL, doing INT NULL) ENGINE=InnoDB"
    ),
    "INSERT IGNORE INTO multiq_schema VALUES (1, 0, 0, NULL)",
)
_READ = "SELECT version, oldest, doing FROM multiq_schema WHERE only_one = 1"

_NO_SUCH_TABLE = 1146
_NO_SUCH_COLUMN = 1054
_FORBIDDEN = frozenset({1044, 1142, 1227, 1370})
_WAITED_TOO_LONG = 1205
#: Errors for a table, column or index that exists already or was dropped already.
_DONE_ALREADY = frozenset({1050, 1060, 1061, 1091})

PLAIN_MODE = "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'"
"""The SQL mode of the sessions. The server's default may be ORACLE, in which a column cannot be called ``body``."""

_LONGEST = 86400.0  # seconds for one statement. An index on a large table takes long.
_LOCK_WAIT = 2  # seconds. While a DDL statement waits for its lock, all other statements on the table wait behind it.
_PAUSE = 0.5  # seconds for other statements before the next attempt
_MAKING = 15.0  # seconds that the first call may take to create the tables of a new database
_PATIENCE = 300.0  # seconds for which a statement is retried under load


class Migration(NamedTuple):
    version: int
    name: str
    oldest: int
    statements: tuple[str, ...]


class Found(NamedTuple):
    """The row of ``multiq_schema``."""

    version: int
    oldest: int
    doing: int | None


NO_TABLES = Found(0, 0, None)


@guarded("check", "up", server="a MySQL or MariaDB")
class MysqlSchema(Schema):
    """The tables of one database. Opens connections of its own."""

    def __init__(self, dsn: Dsn, timeout: float) -> None:
        self._dsn = dsn
        self._timeout = timeout

    def check(self) -> SchemaState:
        with self._connection() as connection:
            found = look(connection)
        needed = len(shipped())
        if not found.version:
            return SchemaState("missing", 0, needed)
        if found.version < needed:
            return SchemaState("older", found.version, needed)
        return SchemaState("newer" if found.oldest > needed else "ready", found.version, needed)

    def up(self) -> list[str]:
        with self._connection(period=_LONGEST) as connection:
            return up(connection)

    def sql(self, since: int = 0) -> str:
        return sql(since=since)

    @contextlib.contextmanager
    def _connection(self, **options: Any) -> Iterator[Connection[Any]]:
        ours = {"autocommit": True, "init_command": PLAIN_MODE, **options}
        try:
            with contextlib.closing(open_connection(self._dsn, self._timeout, **ours)) as connection:
                yield connection
        except (pymysql.MySQLError, OSError) as exc:
            raise explain(exc, self._dsn.place, self._timeout) from exc


@functools.cache
def shipped() -> tuple[Migration, ...]:
    """Return the migrations of this version of multiq."""
    return read(_MIGRATIONS)


def read(folder: Traversable) -> tuple[Migration, ...]:
    """Return the migrations in a folder, in their order.

    A semicolon at the end of a line ends a statement. A line ``-- oldest: N`` names the oldest version whose programs
    can still use the tables.
    """
    found = [
        _parse(int(match[1]), match[2], entry.read_text(encoding="utf-8"))
        for entry in folder.iterdir()
        if (match := _FILE.fullmatch(entry.name))
    ]
    migrations = tuple(sorted(found))
    if [migration.version for migration in migrations] != list(range(1, len(migrations) + 1)):
        raise ValueError(f"the migrations in {folder} are not numbered 1, 2, 3...")
    return migrations


def ensure(
    connection: Connection[Any],
    *,
    timeout: float = 5.0,
    create: bool = True,
    migrations: Sequence[Migration] | None = None,
) -> None:
    """Check with one query that this multiq can use the tables. Creates the tables if there are none.

    Older tables stay unchanged. An upgrade may take long, so an operator decides when to run it. Without *create*, the
    tables must exist. *connection* must autocommit. Raises ``SchemaNotReady`` with the command to run,
    ``BackendCorrupt`` if this multiq is too old, ``BackendTimeout``, and ``pymysql.MySQLError``.
    """
    known = shipped() if migrations is None else migrations
    found = look(connection)
    if not found.version and not create:
        raise SchemaNotReady(
            f"the database {_database(connection)} has no tables of multiq's: nothing was enqueued there yet, and no "
            "worker has run; if your jobs are elsewhere, say where, with multiq -c mysql://user@host/database or in "
            "MULTIQ_URL"
        )
    if not found.version:
        set_deadline(connection, time.monotonic() + max(timeout, _MAKING))
        try:
            with _migration_lock(connection, timeout):
                apply_missing(connection, known, upgrade=False)
        except pymysql.MySQLError as exc:
            if exc.args and exc.args[0] in _FORBIDDEN:
                raise SchemaNotReady(_missing(connection)) from exc
            raise
        found = look(connection)
    elif create and found.version < len(known):
        # another process may be creating the tables now: it holds the lock until all migrations have run
        with _migration_lock(connection, timeout):
            found = look(connection)
    check_version(found, known, _database(connection))


def check_version(found: Found, known: Sequence[Migration], database: str) -> None:
    """Raises ``SchemaNotReady`` if the tables are too old for this multiq, ``BackendCorrupt`` if they are too new."""
    version = len(known)
    if found.version < version:
        raise SchemaNotReady(
            f"the tables in database {database} are of version {found.version}, and this multiq needs {version}: run "
            "multiq schema up with this connection's URL (running programs need not be stopped)"
        )
    if found.oldest > version:
        raise BackendCorrupt(
            f"the tables in database {database} are of schema version {found.version}. This multiq must know "
            f"at least schema version {found.oldest} to use them, got {version}: upgrade multiq here"
        )


def look(connection: Connection[Any]) -> Found:
    """Return the version of the existing tables.

    Raises ``pymysql.MySQLError``, and ``BackendCorrupt`` if another program made ``multiq_schema``.
    """
    try:  # Not pymysql.err: after pymysql.install_as_MySQLdb() and an import of MySQLdb.err, it is a second module.
        rows = _rows(connection, _READ)
    except pymysql.ProgrammingError as exc:
        if exc.args[0] == _NO_SUCH_TABLE:
            return NO_TABLES
        raise
    except pymysql.OperationalError as exc:
        if exc.args[0] == _NO_SUCH_COLUMN:
            raise BackendCorrupt(
                f"database {_database(connection)} has a table multiq_schema that is not multiq's: rename it, or use "
                "another database"
            ) from exc
        raise
    return Found(*rows[0]) if rows else NO_TABLES


def up(
    connection: Connection[Any], *, timeout: float = 60.0, migrations: Sequence[Migration] | None = None
) -> list[str]:
    """Run the missing migrations and return their names. Only one process at a time can do this.

    Workers may run at the same time. Raises the errors of ``ensure``.
    """
    known = shipped() if migrations is None else migrations
    try:
        with _migration_lock(connection, timeout):
            done = apply_missing(connection, known, upgrade=True)
    except pymysql.MySQLError as exc:
        if exc.args and exc.args[0] in _FORBIDDEN:
            raise SchemaNotReady(_missing(connection)) from exc
        raise
    check_version(look(connection), known, _database(connection))
    return done


def apply_missing(connection: Connection[Any], known: Sequence[Migration], *, upgrade: bool) -> list[str]:
    """Run the missing migrations, under the lock. Without *upgrade*, do so only if there are no tables."""
    found = look(connection)
    if found.version >= len(known) or (found.version and not upgrade):
        return []
    if found == NO_TABLES:
        for text in _BOOKKEEPING:
            _run(connection, text)
    doing = found.doing
    todo = known[found.version :]
    for migration in todo:
        _migrate(connection, migration, doing)
        doing = None
    return [f"{migration.version:04}_{migration.name}" for migration in todo]


def sql(*, since: int = 0, migrations: Sequence[Migration] | None = None) -> str:
    """Return the migrations after version *since* as a script. Does no I/O.

    The script is for databases in which programs may not create tables.
    """
    known = shipped() if migrations is None else migrations
    lines = [] if since else [f"{text};" for text in _BOOKKEEPING]
    for migration in known[since:]:
        lines.append(f"\n-- {migration.version:04}_{migration.name}")
        lines += [f"{text};" for text in migration.statements]
        lines.append(f"{_finished(migration)};")
    return "\n".join(lines).lstrip("\n") + "\n"


# --- one migration ---------------------------------------------------------------------------------------


def _migrate(connection: Connection[Any], migration: Migration, doing: int | None) -> None:
    """Run the migration's statements.

    *doing* is the number of the statement at which an earlier run was killed. The server may or may not have carried
    out that statement.
    """
    for number, text in enumerate(migration.statements):
        if doing is not None and number < doing:
            continue
        _run(connection, f"UPDATE multiq_schema SET doing = {number} WHERE only_one = 1")  # noqa: S608 - a number
        try:
            _run_with_retries(connection, text)
        except pymysql.MySQLError as exc:
            if number != doing or exc.args[0] not in _DONE_ALREADY:
                raise
    _run(connection, _finished(migration))


def _finished(migration: Migration) -> str:
    to = f"version = {migration.version}, oldest = {migration.oldest}, doing = NULL"
    return f"UPDATE multiq_schema SET {to} WHERE only_one = 1"  # noqa: S608 - two numbers


def _run_with_retries(connection: Connection[Any], text: str) -> None:
    """Run a statement with short lock waits, and retry.

    While a DDL statement waits for its lock, all other statements on the table wait behind it.
    """
    give_up_at = time.monotonic() + _PATIENCE
    while True:
        try:
            _run(connection, text)
        except pymysql.OperationalError as exc:
            if exc.args[0] != _WAITED_TOO_LONG or time.monotonic() > give_up_at:
                raise
            time.sleep(_PAUSE * random.uniform(0.5, 1.5))  # noqa: S311 - a pause
        else:
            return


@contextlib.contextmanager
def _migration_lock(connection: Connection[Any], timeout: float) -> Iterator[None]:
    """Hold the lock under which this database is migrated. The server releases the lock if this process dies."""
    name = f"multiq schema {hashlib.sha256(_database(connection).encode()).hexdigest()[:32]}"
    if _rows(connection, "SELECT GET_LOCK(%s, %s)", name, max(1, int(timeout))) != ((1,),):
        raise BackendTimeout(
            f"another process has been changing the tables in database {_database(connection)} for {timeout:g} s: try "
            "again later (SHOW PROCESSLIST shows it)"
        )
    try:
        _run(connection, f"SET SESSION lock_wait_timeout = {_LOCK_WAIT}")
        yield
    finally:
        with contextlib.suppress(pymysql.MySQLError):  # An error that ends the connection also ends the lock.
            _run(connection, "SET SESSION lock_wait_timeout = DEFAULT")
            _rows(connection, "SELECT RELEASE_LOCK(%s)", name)


# --- texts -----------------------------------------------------------------------------------------------


def _parse(version: int, name: str, text: str) -> Migration:
    told = _OLDEST.search(text)
    statements = re.split(r";[ \t]*(?:\n|$)", "\n".join(code_lines(text)))
    kept = tuple(statement.strip() for statement in statements if statement.strip())
    return Migration(version, name, int(told[1]) if told else version, kept)


def _missing(connection: Connection[Any]) -> str:
    return (
        f"the tables in database {_database(connection)} are missing or too old, and this user has no right to make "
        "them: run multiq schema up with the URL of a user that has it, or give a database administrator the output of "
        "multiq schema show-sql"
    )


def _database(connection: Connection[Any]) -> str:
    name = connection.db
    return name.decode() if isinstance(name, bytes) else str(name)


def _run(connection: Connection[Any], text: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(text)


def _rows(connection: Connection[Any], text: str, *values: object) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        cursor.execute(text, values or None)
        return tuple(cursor.fetchall())
