"""``Outbox``: stores jobs in a table of the application's database, and enqueues them later.

=====================  =====================================================================  =======================
guarantee              how                                                                    cost
=====================  =====================================================================  =======================
a job exists if the    its row is written on the connection of the caller's session, with     an INSERT
transaction commits    that session's transaction
a commit does not      a thread of this process relays when the connection has returned to    a thread while there are
wait for the backend   its pool, which is after the end of the root transaction               jobs
no job waits for a     each worker of the app relays every few seconds                        a SELECT
dead process
no forked child hangs  a fork waits while a relay uses SQLite, whose locks a child would       a lock, for SQLite
                       inherit (``sqlite_forks``)
a relay reads each     a session on a database other than the outbox's is refused             a comparison of engines
stored row
=====================  =====================================================================  =======================
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - drivers import it, which is too late while the interpreter ends
import contextlib
import re
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar

from sqlalchemy import URL, Connection, Engine, MetaData, delete, event, insert, select
from sqlalchemy.engine.base import TwoPhaseTransaction
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, UnboundExecutionError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from multiq import outbox
from multiq.app import App
from multiq.async_calls import run
from multiq.driverkit.external_transaction import RUN_SYNC, TWO_PHASE, is_asyncio
from multiq.driverkit.fork import forks
from multiq.errors import (
    ArgumentsInvalid,
    BackendTimeout,
    BackendUnavailable,
    ConnectionElsewhere,
    MultiqError,
    OptionInvalid,
    PayloadTooLarge,
    SchemaNotReady,
)
from multiq.formatting import shown
from multiq.ids import new_id
from multiq.outbox import OutboxJob
from multiq.validation import check_count, check_timeout

from .relaying import Relay
from .sqlite_forks import sqlite_use
from .table import make_table, now, row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from sqlalchemy.ext.asyncio import AsyncEngine

    from multiq.backend import Backend, NewJob

    AnyEngine: TypeAlias = Engine | AsyncEngine

T = TypeVar("T")

CLAIM_FOR = 60.0
"""Seconds after which another relay may take the jobs of a relay that has died."""

_LINGER = 0.1  # seconds that the thread waits for further commits before it ends
_CHUNK_ROWS, _CHUNK_BYTES = 500, 1_000_000  # of one INSERT: SQLite takes 32,766 values, MySQL's packets are limited
_PORTS = {"mysql": 3306, "postgresql": 5432}
_MEMORY = (StaticPool, SingletonThreadPool)
"""The pools of SQLite databases in memory. In some cases, only the thread that has written to such a database can read
the data.
"""
_PARAMETER = re.compile(r"%\([^)]+\)s|__\[POSTCOMPILE_\S+\]")  # SQLAlchemy replaces these texts even within a name
_AS_IT_IS = {"schema_translate_map": None}  # with the session's own map, the table could be one that no relay reads
_MISSING = ("no such table", "doesn't exist", "does not exist")  # what SQLite, MySQL and PostgreSQL say


class Outbox(outbox.Outbox):
    """Lets an app enqueue within transactions of SQLAlchemy, even if the app's backend cannot take part in these
    transactions.

    ``task.options(connection=session).enqueue(...)`` then makes a job that exists if the session's transaction commits.
    If the backend can take part in the transaction, the job is enqueued within it. If the backend cannot, the job is
    stored in the outbox's table. After the commit, a thread of this process or a worker of the app enqueues the job.

    - *app*: the app. An app may have several outboxes, one for each database.
    - *engine*: the database's ``Engine`` or ``AsyncEngine``, or a function that returns the engine. This function is
      called at the first use.
    - *metadata*: the ``MetaData`` that gets the table, such as ``Base.metadata``, for your own migrations. Default: the
      outbox has its own ``MetaData``, and ``create`` makes the table.
    - *table*, *schema*: the table's name, and the database schema that it is in.
    - *after_commit*: whether this process relays after each commit. If not, only workers and calls of ``relay`` enqueue
      the stored jobs.
    - *claim_for*: seconds after which another relay may take the jobs of a relay that has died. This time must be
      longer than a call to the backend may take. Default: 60.

    Raises ``OptionInvalid``, ``ArgumentsInvalid``.
    """

    def __init__(
        self,
        app: App,
        engine: AnyEngine | Callable[[], AnyEngine],
        *,
        metadata: MetaData | None = None,
        table: str = "multiq_outbox",
        schema: str | None = None,
        after_commit: bool = True,
        claim_for: float = CLAIM_FOR,
    ) -> None:
        if not _is_engine(engine) and (isinstance(engine, type) or not callable(engine)):
            raise ArgumentsInvalid(
                f"engine must be an Engine or AsyncEngine, or a function that returns one, got {shown(engine)}"
            )
        if not isinstance(app, App):
            raise ArgumentsInvalid(f"app must be a multiq.App, got {shown(app)}")
        if metadata is not None and not isinstance(metadata, MetaData):
            raise ArgumentsInvalid(f"metadata must be a MetaData of SQLAlchemy, got {shown(metadata)}")
        if not isinstance(table, str) or not table:
            raise OptionInvalid(f"table must be a text, the name of a table, got {shown(table)}")
        if schema is not None and not (isinstance(schema, str) and schema):
            raise OptionInvalid(f"schema must be a text, the name of a schema, or None, got {shown(schema)}")
        for option, name in ("table", table), ("schema", schema or ""):
            if _PARAMETER.search(name):
                raise OptionInvalid(
                    f"{option} must be a name without '%(...)s' and '__[POSTCOMPILE_...]', got {name!r}"
                )
        self.app = app
        self.name = table
        self.table = make_table(MetaData() if metadata is None else metadata, table, schema)
        """The table, for example for ``binds`` of a session with several engines."""
        self._given_engine: Any = engine
        self._engine: AnyEngine | None = None
        self._after_commit = after_commit
        self._claim_for = check_timeout(claim_for, "claim_for")
        if self._claim_for <= 0:
            raise OptionInvalid(f"claim_for must be more than 0 seconds, got {claim_for:g}")
        self._mark = f"multiq.{table}.{new_id()}"  # marks a connection on which jobs were stored
        self._cannot_join: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._turn = threading.Lock()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_asked = False
        self._refuse_strangers()
        forks.watch(self)
        self.register()

    @property
    def engine(self) -> AnyEngine:
        """The database's engine."""
        if self._engine is None:
            given = self._given_engine
            made = given if _is_engine(given) else given()
            if not _is_engine(made):
                raise ArgumentsInvalid(f"engine= must return an Engine or AsyncEngine, got {shown(made)}")
            self._engine = made
        return self._engine

    @property
    def is_of_one_thread(self) -> bool:
        return self._is_memory(self._sync_engine)

    def create(self) -> None:
        """Create the table if it does not exist."""
        self._on_connection(self._create)

    async def acreate(self) -> None:
        """``create`` without blocking the event loop."""
        await self._aon_connection(self._create)

    def relay(self) -> int:
        """Enqueue the jobs that are stored. Returns their number.

        Waits for a relay that runs on another thread of this process. Raises the first ``MultiqError`` about a job or
        the backend, and ``BackendUnavailable`` about the database. Jobs that were not enqueued are tried again later.
        """
        self.app.backend  # noqa: B018 - opened here, because a fork waits for the rest, and the rest for a driver's import
        return self._on_connection(self._relay)

    async def arelay(self) -> int:
        """``relay`` without blocking the event loop."""
        return await self._aon_connection(self._relay)

    def waiting(self, limit: int = 100) -> list[OutboxJob]:
        """Return the first jobs that are stored, oldest first."""
        check_count(limit, "limit", least=0)
        return self._on_connection(lambda connection: self._waiting(connection, limit))

    async def awaiting(self, limit: int = 100) -> list[OutboxJob]:
        """``waiting`` without blocking the event loop."""
        check_count(limit, "limit", least=0)
        return await self._aon_connection(lambda connection: self._waiting(connection, limit))

    def store(self, queue: str, jobs: Sequence[NewJob], connection: Any) -> list[str] | None:
        """Store jobs within a transaction, as ``multiq.outbox.Outbox.store`` says. ``enqueue`` calls this."""
        own = self._connection_of(connection)
        if own is None:
            return None
        backend = self.app.backend
        if backend.declared.transactional_enqueue and own.engine not in self._cannot_join:
            try:
                return backend.enqueue(queue, jobs, connection=own)
            except ConnectionElsewhere:
                self._cannot_join.add(own.engine)
        self._refuse_elsewhere(own.engine)
        _refuse_too_large(backend, max((len(job.body) for job in jobs), default=0))
        with self._explained():
            self._insert(own, queue, jobs)
            if self._after_commit and not self._is_memory(own.engine):
                self._listen(own.engine)
                own.info[self._mark] = True
        return [job.id for job in jobs]

    def start_over_in_child(self) -> None:
        """Called in a forked child. The connections of the pool are the parent's."""
        self._turn = threading.Lock()
        self._condition = threading.Condition()
        self._thread = None
        self._is_asked = False
        if self._engine is not None and not self._is_memory(self._sync_engine):
            self._sync_engine.dispose(close=False)

    def __repr__(self) -> str:
        return f"Outbox({self.app!r}, table={self.name!r})"

    def _refuse_strangers(self) -> None:
        """Raise ``OptionInvalid`` if another app's outbox has the same table."""
        for other in outbox.known():
            if (
                isinstance(other, Outbox)
                and other._given_engine is self._given_engine  # noqa: SLF001 - of this class
                and other.table.fullname == self.table.fullname
                and other.app.url != self.app.url
            ):
                raise OptionInvalid(
                    f"table must be one that no other app uses, got {self.table.fullname}: each of the two "
                    "apps would enqueue the jobs of the other app"
                )

    # --- storing ---

    def _connection_of(self, given: Any) -> Connection | None:
        """Return the connection on which a session writes to the table. If *given* is a connection, return *given*.
        None: *given* is not an object of SQLAlchemy."""
        if is_asyncio(given):
            raise OptionInvalid(f"connection= got a {type(given).__name__}: {RUN_SYNC}")
        if isinstance(given, scoped_session):
            given = given()
        if isinstance(given, Session):
            if given.twophase:
                raise OptionInvalid(TWO_PHASE)
            with self._explained():
                try:
                    # the clause is an INSERT, because a session may send reads and writes to different servers
                    given = given.connection(bind_arguments={"clause": insert(self.table)})
                except UnboundExecutionError as exc:
                    raise OptionInvalid(
                        f"connection= got a session that has no engine for the table {self.name}: add outbox.table to "
                        "its binds, with the engine of the tables that the jobs belong to"
                    ) from exc
        if not isinstance(given, Connection):
            return None
        if isinstance(given.get_transaction(), TwoPhaseTransaction):
            raise OptionInvalid(TWO_PHASE)
        return given

    def _refuse_elsewhere(self, engine: Engine) -> None:
        """Raise ``ConnectionElsewhere`` for a connection to another database, because no relay would read the rows in
        that database."""
        ours = self._sync_engine
        if engine is ours or engine.pool is ours.pool or (not self._is_memory(ours) and _place(engine) == _place(ours)):
            return
        raise ConnectionElsewhere(
            f"connection= leads to {_shown_place(engine)}, and the outbox {self.name} is in {_shown_place(ours)}: use "
            "one engine for both, or the same host and database in the URLs of both, or make an Outbox for each"
        )

    def _insert(self, connection: Connection, queue: str, jobs: Sequence[NewJob]) -> None:
        """Insert all rows. If an error occurs, no row is inserted, even if the caller catches the error and commits."""
        created = now()
        rows = [row_of(queue, job, created) for job in jobs]
        if len(rows) == 1:
            connection.execute(insert(self.table), rows[0], execution_options=_AS_IT_IS)
            return
        stored: list[dict[str, Any]] = []
        try:
            for chunk in _chunks(rows):
                connection.execute(insert(self.table).values(chunk), execution_options=_AS_IT_IS)
                stored += chunk
        except BaseException:
            # a savepoint is not used here: with SQLite's usual driver, it may be the whole transaction
            with contextlib.suppress(Exception):
                for chunk in _chunks(stored):
                    ids = [row["job_id"] for row in chunk]
                    columns = self.table.c
                    ours = columns.job_id.in_(ids), columns.created == created, columns.queue == queue
                    connection.execute(delete(self.table).where(*ours), execution_options=_AS_IT_IS)
            raise

    def _listen(self, engine: Engine) -> None:
        # event.contains is not used, because engine.execution_options() makes another engine with the same pool
        if self._on_checkin not in engine.pool.dispatch.checkin:
            event.listen(engine.pool, "checkin", self._on_checkin)

    def _on_checkin(self, _dbapi_connection: Any, record: Any) -> None:
        """Called when a connection returns to its pool. The connection has no transaction any more."""
        if record.info.pop(self._mark, False):
            self._wake()

    # --- relaying ---

    def _relay(self, connection: Connection) -> int:
        with self._pausing():
            self._turn.acquire()
        try:
            return Relay(self.app, self.table, connection, self._claim_for, self._pausing).run()
        finally:
            self._turn.release()

    def _wake(self) -> None:
        """Relay soon, on a thread that ends when no job is left."""
        with self._condition:
            self._is_asked = True
            self._condition.notify()
            if self._thread is None:
                # the thread is not a daemon: when a program ends, it waits until its jobs are enqueued, or until the
                # backend's timeout
                thread = threading.Thread(target=self._work, name="multiq-outbox")
                # if the interpreter ends, or the system refuses to start a thread, a worker relays later
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def _work(self) -> None:
        while True:
            with self._condition:
                if not self._is_asked:
                    self._condition.wait(_LINGER)
                if not self._is_asked:
                    self._thread = None
                    return
                self._is_asked = False
            self.relay_or_log()

    # --- the database ---

    @property
    def _sync_engine(self) -> Engine:
        engine = self.engine
        return engine if isinstance(engine, Engine) else engine.sync_engine

    @staticmethod
    def _is_memory(engine: Engine) -> bool:
        return isinstance(engine.pool, _MEMORY)

    def _create(self, connection: Connection) -> None:
        self.table.create(connection, checkfirst=True)
        connection.commit()

    def _waiting(self, connection: Connection, limit: int) -> list[OutboxJob]:
        columns = self.table.c
        rows = connection.execute(
            select(columns.queue, columns.job_id, columns.created, columns.due, columns.attempts, columns.error)
            .order_by(columns.position)
            .limit(limit)
        ).all()
        time = now()
        return [
            OutboxJob(
                queue=row.queue,
                id=row.job_id,
                age=max(0, time - row.created) / 1000,
                attempts=row.attempts,
                retry_in=max(0, row.due - time) / 1000,
                error=row.error or "",
            )
            for row in rows
        ]

    def _on_connection(self, work: Callable[[Connection], T]) -> T:
        """Call *work* with a connection. Raises ``MultiqError``."""
        engine = self.engine
        with self._explained(), self._using():
            if isinstance(engine, Engine):
                with engine.connect() as connection:
                    return work(connection)
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return asyncio.run(self._on_own_loop(engine, work))
        raise MultiqError("an outbox with an AsyncEngine must be awaited on an event loop: await outbox.arelay()")

    def _using(self) -> AbstractContextManager[None]:
        """While the block lasts, this thread uses the database, and ``_pausing`` may be called."""
        return sqlite_use.using() if self._is_sqlite else contextlib.nullcontext()

    def _pausing(self) -> AbstractContextManager[None]:
        """While the block lasts, this thread does not use the database."""
        return sqlite_use.pausing() if self._is_sqlite else contextlib.nullcontext()

    @property
    def _is_sqlite(self) -> bool:
        """Whether the database is a file of SQLite."""
        engine = self._sync_engine
        return engine.dialect.name == "sqlite" and not self._is_memory(engine)

    async def _on_own_loop(self, engine: AsyncEngine, work: Callable[[Connection], T]) -> T:
        """Call *work* on the loop of this thread, with a new connection: those of the engine belong to another loop."""
        sync = engine.sync_engine
        from sqlalchemy.ext.asyncio import AsyncEngine

        own = AsyncEngine(Engine(sync.pool.recreate(), sync.dialect, sync.url, hide_parameters=sync.hide_parameters))
        try:
            async with own.connect() as connection:
                return await connection.run_sync(work)
        finally:
            await own.dispose()

    async def _aon_connection(self, work: Callable[[Connection], T]) -> T:
        engine = self.engine
        if not isinstance(engine, Engine) and self._is_memory(engine.sync_engine):
            with self._explained():
                async with engine.connect() as connection:
                    return await connection.run_sync(work)
        return await run(await self.app.abackend(), self._on_connection, work)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Translate SQLAlchemy's errors while the block lasts, because the texts of these errors contain the rows."""
        try:
            yield
        except DBAPIError as exc:
            text = str(exc.orig)
            if self.name in text and any(words in text for words in _MISSING):
                raise SchemaNotReady(
                    f"the database has no table {self.name}: outbox.create() makes it, or a migration of your own, "
                    "with metadata= of the Outbox"
                ) from exc
            raise BackendUnavailable(f"the outbox {self.name} cannot be used: {text}") from exc
        except PoolTimeout as exc:
            raise BackendTimeout(f"the outbox {self.name} cannot be used: {exc}") from exc
        except SQLAlchemyError as exc:
            raise OptionInvalid(f"the outbox {self.name} cannot be used: {exc}") from exc


def _refuse_too_large(backend: Backend, size: int) -> None:
    """Raise ``PayloadTooLarge`` for a body that the backend would refuse. The server is asked only for a large body."""
    limit = backend.declared.max_body
    if limit is not None and size > limit:
        limit = backend.capabilities.max_body
        if limit is not None and size > limit:
            raise PayloadTooLarge(size, limit, f"{backend.declared.backend} takes no larger body")


def _is_engine(thing: object) -> TypeGuard[AnyEngine]:
    """Whether *thing* is an engine. ``AsyncEngine`` is not imported, because that needs greenlet."""
    if isinstance(thing, Engine):
        return True
    module = sys.modules.get("sqlalchemy.ext.asyncio")
    return module is not None and isinstance(thing, module.AsyncEngine)


def _chunks(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        if chunk and (len(chunk) == _CHUNK_ROWS or size + len(row["job"]) > _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += len(row["job"])
    if chunk:
        yield chunk


def _place(engine: Engine) -> tuple[str | int | None, ...]:
    """Return a value that is equal for two engines of one database."""
    url: URL = engine.url
    kind = "mysql" if url.get_backend_name() == "mariadb" else url.get_backend_name()
    if kind == "sqlite":
        return kind, str(Path(url.database or "").resolve())
    socket = url.query.get("unix_socket")
    return kind, url.host or "", url.port or _PORTS.get(kind), url.database, socket if isinstance(socket, str) else None


def _shown_place(engine: Engine) -> str:
    url = engine.url
    if url.get_backend_name() == "sqlite":
        return url.database or "a database in memory"
    return f"{url.get_backend_name()} at {url.host or 'localhost'}{f':{url.port}' if url.port else ''}, {url.database}"
