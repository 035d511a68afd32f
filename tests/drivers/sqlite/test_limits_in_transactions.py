"""Enqueues with ``connection=`` of jobs with limits. The caller's transaction has the write lock."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq.backend import Quota
from multiq.errors import BackendTimeout, LockedByCaller
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from pathlib import Path

    Connect = Callable[..., sqlite3.Connection]


def an_app(path: Path, **task: Any) -> tuple[multiq.App, multiq.Task[..., None]]:
    app = multiq.App(f"sqlite:///{path}?timeout=0.2")

    def work(number: int) -> None: ...

    return app, app.task(name="work", **task)(work)


def a_transaction(connect: Connect) -> sqlite3.Connection:
    caller = connect()
    caller.execute("CREATE TABLE orders (number)")
    caller.commit()
    caller.execute("INSERT INTO orders VALUES (7)")
    return caller


def quotas(path: Path) -> dict[str, Quota]:
    with SqliteBackend(str(path)) as backend:
        return {state.name: state.quota for state in backend.limits("default")}


@pytest.mark.parametrize(
    "task",
    [
        {"limits": [multiq.Limit("api", slots=1)]},
        {"unique": multiq.Unique(by=["number"], on_conflict="follow")},
    ],
)
def test_first_enqueue_stores_the_limits_in_the_transaction(path: Path, connect: Connect, task: dict[str, Any]) -> None:
    app, work = an_app(path, **task)
    app.queue().stats()
    caller = a_transaction(connect)
    work.options(connection=caller).enqueue(1)
    assert quotas(path) == {}
    caller.commit()
    assert [quota.slots for quota in quotas(path).values()] == [1]
    with app.queue().reserve(timeout=5):
        assert app.queue().stats().reserved == 1


def test_rollback_removes_the_limit_and_the_next_enqueue_stores_it(path: Path, connect: Connect) -> None:
    app, work = an_app(path, limits=[multiq.Limit("api", slots=1)])
    app.queue().stats()
    caller = a_transaction(connect)
    work.options(connection=caller).enqueue(1)
    caller.rollback()
    assert quotas(path) == {}
    work.enqueue(2)
    assert quotas(path) == {"api": Quota(slots=1)}


def test_new_numbers_take_effect_after_the_commit_and_pinned_ones_stay(path: Path, connect: Connect) -> None:
    app, work = an_app(path, limits=[multiq.Limit("api", slots=1), multiq.Limit("pinned", slots=5)])
    work.enqueue_many([(number,) for number in range(3)])
    app.limits.set("default", "pinned", slots=4)
    _, newer = an_app(path, limits=[multiq.Limit("api", slots=3), multiq.Limit("pinned", slots=5)])
    queue = app.queue()
    queue.reserve(timeout=5)
    with pytest.raises(multiq.QueueEmpty):
        queue.reserve(timeout=0)
    caller = a_transaction(connect)
    newer.options(connection=caller).enqueue(3)
    caller.commit()
    assert quotas(path) == {"api": Quota(slots=3), "pinned": Quota(slots=4)}
    assert [queue.reserve(timeout=5) for _ in range(2)]
    with pytest.raises(multiq.QueueEmpty):
        queue.reserve(timeout=0)


def test_async_enqueue_stores_the_limits_in_the_transaction(path: Path, connect: Connect) -> None:
    app, work = an_app(path, limits=[multiq.Limit("api", slots=1)])
    app.queue().stats()
    caller = a_transaction(lambda: connect(check_same_thread=False))
    asyncio.run(work.options(connection=caller).aenqueue(1))
    caller.commit()
    assert quotas(path) == {"api": Quota(slots=1)}


def test_limit_of_the_app_must_be_stored_before_the_transaction(path: Path, connect: Connect) -> None:
    app, work = an_app(path, limits=[multiq.Limit("api", slots=1, scope="app")])
    app.queue().stats()
    caller = a_transaction(connect)
    with pytest.raises((BackendTimeout, LockedByCaller)) as caught:
        work.options(connection=caller).enqueue(1)
    assert "start a worker of the app first" in caught.value.__notes__[0]
    caller.rollback()
    work.enqueue(1)
    _, other = an_app(path, limits=[multiq.Limit("api", slots=1, scope="app")])
    caller.execute("INSERT INTO orders VALUES (8)")
    other.options(connection=caller).enqueue(2)
    caller.commit()
    assert app.queue().stats().ready == 2
