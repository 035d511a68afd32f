"""Enqueues the jobs of an outbox's table.

=====================  =====================================================================  =======================
guarantee              how                                                                    cost
=====================  =====================================================================  =======================
no job is lost         a row is deleted when its job is enqueued, and not before              none
one relay at a time    a relay claims rows for a time, which ends if the relay dies           an UPDATE for each group
takes a row
no second job          the rows of one claim are a group, whatever happens. The jobs of a     a note for each group;
                       group and a note are stored in one step, if the note does not exist    a later group drops it if
                       yet. So a relay that takes over a claim can find out whether the jobs  no other relay has seen
                       were enqueued before, even if they are done and forgotten              the claim
=====================  =====================================================================  =======================

A backend without notes (beanstalkd without a store) has no such step. If a relay dies between the enqueue and the
deletion of the rows, their jobs are enqueued again. So these jobs run at least once.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.ext.compiler import compiles

from multiq.backend import Drop, Enqueue, NewJob, Put, Version
from multiq.enqueue import add_jobs
from multiq.errors import BackendError, EnqueuePartial, EnqueueUncertain, MultiqError
from multiq.ids import new_id

from .table import job_of, now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from sqlalchemy import Connection, Row, Table, Update
    from sqlalchemy.sql.compiler import SQLCompiler
    from sqlalchemy.sql.dml import UpdateBase

    from multiq.app import App
    from multiq.backend import Step

Change = TypeVar("Change", bound="UpdateBase")

MOST = 100  # rows that are claimed together
_KEPT = 86400.0  # seconds for which a note records that a group was enqueued, if its rows cannot be deleted
_REFUSED_FOR = 600  # seconds until a job that the backend has refused is tried again
_LONGEST_WAIT = 60  # seconds between two attempts while the backend does not answer
_ERROR_MAX = 500  # characters


class _TableName(ColumnElement[Any]):
    """A table's name, quoted as in the rest of the statement. As a text, its ``%`` and ``:`` would be escaped again."""

    inherit_cache = False  # else the cached statement would have the name of the first table

    def __init__(self, table: Table) -> None:
        self.table = table


@compiles(_TableName)
def _compile_table_name(element: _TableName, compiler: SQLCompiler, **_: Any) -> str:
    return compiler.preparer.format_table(element.table)


class _Group(NamedTuple):
    """Rows of one queue that are claimed together."""

    queue: str
    claim: str
    rows: Sequence[Row[Any]]
    ours_until: float = 0.0
    """The monotonic time until which no other relay can have seen the claim. 0: another relay may have seen it."""

    @property
    def positions(self) -> list[int]:
        return [row.position for row in self.rows]

    @property
    def key(self) -> str:
        """The key of the note that records the enqueue of the group."""
        return f"multiq.outbox.{self.claim}"


class Relay:
    """Enqueues all jobs of a table that are due.

    - *connection*: a connection without an open transaction. Transactions are begun and committed on this connection.
    - *claim_for*: seconds after which another relay may take rows that this relay has claimed.
    - *pausing*: makes a context in which this relay does not use the database. It calls the backend only there.
    """

    def __init__(
        self,
        app: App,
        table: Table,
        connection: Connection,
        claim_for: float,
        pausing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._backend = app.backend
        self._table = table
        self._connection = connection
        self._claim_for = round(claim_for * 1000)
        self._pausing = pausing
        self._is_mysql = connection.dialect.name in {"mysql", "mariadb"}
        self._has_notes = bool(self._backend.declared.notes and self._backend.declared.holds)
        self._told: dict[str, list[str]] = {}
        """Keys of notes that are no longer needed, by queue."""

    def run(self) -> int:
        """Return the number of enqueued jobs. Raises the first error about a group, after all groups were tried.

        If the backend does not answer, the error is raised immediately.
        """
        done = 0
        first: MultiqError | None = None
        try:
            while True:
                groups, were_any = self._claim()
                if not were_any:
                    break
                for at, group in enumerate(groups):
                    try:
                        done += self._enqueue(group)
                    except BackendError as exc:
                        for other in groups[at:]:
                            self._put_off(other, exc)
                        raise
                    except MultiqError as exc:
                        first = first or exc
        finally:
            with contextlib.suppress(BackendError), self._pausing():  # they expire
                self._drop_notes()
        if first is not None:
            raise first
        return done

    # --- the table ---

    def _claim(self) -> tuple[list[_Group], bool]:
        """Claim rows that are due. Returns the claimed groups, and whether rows were due: other relays may have claimed
        these rows first.

        An old claim is taken over unchanged, with all of its rows.
        """
        columns = self._table.c
        seen = self._connection.execute(
            select(columns.position, columns.queue, columns.claim, columns.due)
            .where(columns.due <= now())
            .order_by(columns.position)
            .limit(MOST)
        ).all()
        # in SQLite, a transaction that has read cannot write if another connection has written after the read
        self._connection.commit()
        new: dict[str, list[int]] = {}
        old: dict[str, tuple[str, int]] = {}
        for row in seen:
            if row.claim is None:
                new.setdefault(row.queue, []).append(row.position)
            else:
                old[row.claim] = (row.queue, row.due)
        groups = [self._take_over(queue, claim, due) for claim, (queue, due) in old.items()]
        groups += [self._claim_new(queue, positions) for queue, positions in new.items()]
        return [group for group in groups if group.rows], bool(seen)

    def _claim_new(self, queue: str, positions: list[int]) -> _Group:
        columns = self._table.c
        claim, began = new_id(), time.monotonic()
        self._connection.execute(
            self._update(columns.position.in_(positions), columns.claim.is_(None)).values(
                claim=claim, due=now() + self._claim_for
            )
        )
        return self._group(queue, claim)._replace(ours_until=began + self._claim_for / 2000)

    def _take_over(self, queue: str, claim: str, due: int) -> _Group:
        columns = self._table.c
        positions = self._connection.scalars(select(columns.position).where(columns.claim == claim)).all()
        self._connection.commit()
        taken = self._connection.execute(
            self._update(columns.position.in_(positions), columns.claim == claim, columns.due == due).values(
                due=now() + self._claim_for
            )
        )
        if not taken.rowcount:
            self._connection.commit()
            return _Group(queue, claim, [])
        return self._group(queue, claim)

    def _group(self, queue: str, claim: str) -> _Group:
        """Return the rows that this relay has claimed, and commit the claim."""
        rows = self._connection.execute(
            select(self._table).where(self._table.c.claim == claim).order_by(self._table.c.position)
        ).all()
        self._connection.commit()
        return _Group(queue, claim, rows)

    def _delete(self, group: _Group, positions: Sequence[int]) -> None:
        statement = delete(self._table).where(*self._rows_of(group, positions))
        if self._is_mysql:  # MySQL allows FORCE INDEX only in a DELETE from several tables
            statement = statement.prefix_with(_TableName(self._table))
        self._connection.execute(self._by_key(statement))
        self._connection.commit()

    def _put_off(self, group: _Group, error: MultiqError, seconds: int | None = None) -> None:
        """Let relays try a group again later. The rows stay one group, because the group may have been
        enqueued."""
        if seconds is None:
            seconds = min(_LONGEST_WAIT, 2 ** min(10, group.rows[0].attempts))
        self._connection.execute(
            self._update(*self._rows_of(group, group.positions)).values(
                due=now() + seconds * 1000, attempts=self._table.c.attempts + 1, error=str(error)[:_ERROR_MAX]
            )
        )
        self._connection.commit()

    def _split(self, group: _Group) -> list[_Group]:
        """Make a group of each row."""
        groups = []
        for row in group.rows:
            claim = new_id()
            self._connection.execute(self._update(*self._rows_of(group, [row.position])).values(claim=claim))
            groups.append(_Group(group.queue, claim, [row]))
        self._connection.commit()
        return groups

    def _rows_of(self, group: _Group, positions: Sequence[int]) -> tuple[ColumnElement[bool], ...]:
        return self._table.c.position.in_(positions), self._table.c.claim == group.claim

    def _update(self, *rows: ColumnElement[bool]) -> Update:
        return self._by_key(update(self._table).where(*rows))

    def _by_key(self, statement: Change) -> Change:
        """Let MySQL find the rows by the primary key.

        MySQL locks every row that it examines, and waits for rows that a transaction of the application has just
        inserted. Without this hint (``FORCE INDEX``), MySQL may examine all rows of the table, or a range of another
        index.
        """
        return statement.with_hint("FORCE INDEX (PRIMARY)") if self._is_mysql else statement

    # --- the backend ---

    def _enqueue(self, group: _Group) -> int:
        """Enqueue the jobs of a group, and delete its rows. Returns the number of jobs.

        If the backend refuses a job, this job is put off, the other jobs are enqueued, and then the error is raised.
        """
        try:
            jobs = [job_of(row) for row in group.rows]
            with self._pausing():
                self._send(group, jobs)
        except (EnqueuePartial, EnqueueUncertain) as exc:
            stored = [group.rows[at].position for at in exc.accepted]
            if stored:
                self._delete(group, stored)
            raise
        except BackendError:
            raise
        except MultiqError as exc:
            if len(group.rows) == 1:
                self._put_off(group, exc, _REFUSED_FOR)
                raise
            return self._enqueue_each(self._split(group))
        self._delete(group, group.positions)
        if self._has_notes and time.monotonic() < group.ours_until:
            self._told.setdefault(group.queue, []).append(group.key)
        return len(group.rows)

    def _enqueue_each(self, groups: Sequence[_Group]) -> int:
        done = 0
        first: MultiqError | None = None
        for at, group in enumerate(groups):
            try:
                done += self._enqueue(group)
            except BackendError as exc:
                for other in groups[at + 1 :]:
                    self._put_off(other, exc)
                self._put_off(group, exc)
                raise
            except MultiqError as exc:
                first = first or exc
        if first is not None:
            raise first
        return done

    def _send(self, group: _Group, jobs: Sequence[NewJob]) -> None:
        if not self._has_notes:
            add_jobs(self._backend, group.queue, jobs)
            return
        queue, told = group.queue, self._told.pop(group.queue, [])
        steps: list[Step] = [Put(queue, group.key, b"", _KEPT), *(Drop(queue, key) for key in told)]
        steps += [Enqueue(queue, job) for job in jobs]
        # False: an earlier attempt has enqueued the jobs, but has not deleted the rows
        self._backend.carry_out(steps, when=[Version(queue, group.key, "")])

    def _drop_notes(self) -> None:
        for queue, keys in self._told.items():
            for at in range(0, len(keys), MOST):
                self._backend.carry_out([Drop(queue, key) for key in keys[at : at + MOST]])
