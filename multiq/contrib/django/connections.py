"""Handles Django's database connections between jobs in the same way as Django handles them between requests.

=====================  =====================================================================  =======================
guarantee              how                                                                    cost
=====================  =====================================================================  =======================
no dead connection     before and after each job, connections are closed that are too old     what ``CONN_MAX_AGE``
                       (``CONN_MAX_AGE``), unusable, or without their usual autocommit        and health checks cost
no open transaction    if a job leaves an ``atomic()`` block open, its connection is closed   none
                       and forgotten
no half of a reply     after a time limit or a cancellation, the connections are closed,      none
                       because the interrupted statement may have left a part of its reply
no connection of a     a forked child forgets the connections of its parent, and the pools    none
parent                 of connections that Django has for PostgreSQL and Oracle. It does not
                       close them: the server would end the parent's session
none of a coroutine    each coroutine has a thread for its queries, whose connections are     a connection for each
in another one         closed when the coroutine ends                                         coroutine with queries
=====================  =====================================================================  =======================

A job that runs within its enqueue (``sync://`` and the fake of ``multiq.testing``) uses the caller's connections, so
nothing is done to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, sync_to_async
from django.db import connections, reset_queries
from django.db.backends.signals import connection_created
from django.dispatch import receiver

from multiq.driverkit.fork import forks
from multiq.errors import JobCancelled
from multiq.retry import SoftTimeout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from multiq.app import App
    from multiq.job import JobContext

_log = logging.getLogger("multiq.django")

_imported_in = os.getpid()
_inherited: list[Any] = []
"""Connections of a parent process. These objects are kept in memory, because the deletion of one of them would end the
parent's session."""
_pooling: set[Any] = set()
"""The connection classes with a pool (``OPTIONS = {"pool": ...}``)."""


def guard(app: App) -> None:
    """Keep the connections in order around each job of *app*."""

    @app.middleware
    def around_a_job(job: JobContext) -> Iterator[None]:  # noqa: ARG001 - what middleware gets
        if is_on_loop() or _runs_within_enqueue(app):
            yield
            return
        before_a_job()
        open_before = {connection.alias for connection in _here() if connection.in_atomic_block}
        try:
            yield
        except (SoftTimeout, JobCancelled):
            _close_except(open_before)
            raise
        finally:
            after_a_job(open_before)

    @app.middleware
    async def around_a_coroutine(job: JobContext) -> AsyncIterator[None]:  # noqa: ARG001 - what middleware gets
        if _runs_within_enqueue(app):
            yield
            return
        async with ThreadSensitiveContext() as context:
            try:
                yield
            finally:
                if context in SyncToAsync.context_to_thread_executor:  # else it has run nothing on a thread
                    await sync_to_async(close_all_here)()


@contextlib.contextmanager
def after_the_run(app: App) -> Iterator[None]:
    """Keep the connections in order around code that is called after a job's run, on a thread without an event loop."""
    if _runs_within_enqueue(app):
        yield
        return
    before_a_job()
    open_before = {connection.alias for connection in _here() if connection.in_atomic_block}
    try:
        yield
    finally:
        after_a_job(open_before)


def before_a_job() -> None:
    """Close the connections of this thread that a job must not use."""
    reset_queries()  # with DEBUG, the queries would accumulate
    for connection in _here():
        if getattr(connection, "_multiq_process", _imported_in) != os.getpid():
            _inherited.append(connection)
            _forget(connection)
        else:
            connection.close_if_unusable_or_obsolete()


def after_a_job(open_before: set[str]) -> None:
    """Close the connections of this thread that the next job must not use.

    *open_before*: the connections with an ``atomic()`` block around the job.
    """
    for connection in _here():
        if connection.in_atomic_block and connection.alias not in open_before:
            _log.warning("a job has left a transaction open on the database %r: it is rolled back", connection.alias)
            connection.close()
            _forget(connection)
        else:
            connection.close_if_unusable_or_obsolete()


def close_all_here() -> None:
    """Close the connections of this thread."""
    connections.close_all()


def is_in_transaction(connection: Any) -> bool:
    """Whether writes on this Django connection need a commit."""
    if connection.in_atomic_block:
        return True
    if connection.connection is None:
        # the connection is not open yet; its setting decides whether it begins with autocommit
        return not connection.settings_dict.get("AUTOCOMMIT", True)
    return not connection.get_autocommit()


def is_on_loop() -> bool:
    """Whether this code runs on an event loop, where Django refuses queries."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _close_except(open_before: set[str]) -> None:
    for connection in _here():
        if connection.alias not in open_before:
            connection.close()
            _forget(connection)


def _here() -> list[Any]:
    """Return the connections of this thread."""
    return list(connections.all(initialized_only=True))


def _forget(connection: Any) -> None:
    """Drop this connection, whatever its state is. The next query makes a new connection."""
    del connections[connection.alias]


def _runs_within_enqueue(app: App) -> bool:
    return hasattr(app.backend, "attach_app")


@receiver(connection_created, dispatch_uid="multiq.contrib.django.connections")
def _note_process(*, connection: Any, **_: Any) -> None:
    connection._multiq_process = os.getpid()  # noqa: SLF001 - a name of multiq's
    if getattr(connection, "_connection_pools", None):
        _pooling.add(type(connection))


def _leave_pools() -> None:
    """Called in a forked child, because the connections in the pools are shared with the parent and its other
    children."""
    for kind in _pooling:
        _inherited.append(dict(kind._connection_pools))  # noqa: SLF001 - Django closes a pool, and cannot leave it
        kind._connection_pools.clear()  # noqa: SLF001


forks.register(in_child=_leave_pools)
