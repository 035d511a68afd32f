"""Every line of the API that the README shows, on a real SQLite file."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
from processes import until

import multiq
from multiq import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def app(tmp_path: Path) -> Iterator[multiq.App]:
    with multiq.App(f"sqlite:///{tmp_path}/jobs.db") as app:
        yield app


def test_producing_with_a_task(app: multiq.App) -> None:
    @app.task(queue="mail", priority=100, timeout=30, max_attempts=5, backoff=multiq.exponential(base=2, cap=3600))
    def send_reset_mail(address: str, name: str) -> None: ...

    handle = send_reset_mail.enqueue("ann@example.com", name="Ann")
    assert (handle.state(), handle.peek().priority, handle.peek().task) == (State.READY, 100, "send_reset_mail")

    handle = send_reset_mail.options(delay=30, priority=0).enqueue("ann@example.com", name="Ann")
    assert (handle.state(), handle.peek().priority) == (State.DELAYED, 0)
    at = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    assert send_reset_mail.options(at=at).enqueue("ann@example.com", "Ann").state() is State.DELAYED

    handles = send_reset_mail.enqueue_many([("a@x.org", "A"), ("b@x.org", "B")])
    assert [handle.peek().value["args"] for handle in handles] == [["a@x.org", "A"], ["b@x.org", "B"]]

    handle = asyncio.run(send_reset_mail.aenqueue("ann@example.com", name="Ann"))
    assert handle.state() is State.READY

    handle.reschedule(delay=300)
    assert handle.state() is State.DELAYED
    handle.cancel()
    assert handle.state() is State.GONE


def test_a_queue_without_tasks(app: multiq.App) -> None:
    queue = app.queue("mail")
    queue.enqueue({"any": "json"}, delay=0.05)
    with queue.reserve(timeout=5) as job:
        assert (job.body, job.attempt) == ({"any": "json"}, 1)
    assert queue.stats().ready == 0

    ids = [handle.id for handle in queue.enqueue_many([1, 2, 3, 4])]
    acked, released, buried, touched = (queue.reserve() for _ in range(4))
    acked.ack()
    released.release(delay=10)
    buried.bury("why")
    touched.touch()
    assert [queue.peek(job_id).state for job_id in ids[1:]] == [State.DELAYED, State.BURIED, State.RESERVED]

    (info,) = queue.jobs("buried")
    assert (info.id, info.reason, info.value) == (ids[2], "why", 3)
    assert queue.kick(10) == 1
    queue.delete(ids[1])
    queue.pause(60)
    assert queue.reserve_many(1) == []
    queue.resume()
    assert queue.purge() == 1
    stats = queue.stats()
    assert (stats.ready, stats.delayed, stats.reserved, stats.buried, stats.paused_for) == (0, 0, 1, 0, None)


def test_a_worker_of_two_processes_and_four_threads(app: multiq.App, tmp_path: Path) -> None:
    # Given jobs in two queues, of which the urgent queue is named first, and a task that records its process
    notes = tmp_path / "notes"

    @app.task
    def note(queue: str) -> None:
        with notes.open("a") as file:
            file.write(f"{queue} {os.getpid()} {threading.get_native_id()}\n")

    for name in ("default", "high"):
        note.options(queue=name).enqueue_many([(name,)] * 100)

    # When the worker of the documentation runs, and is stopped once all jobs are done
    def stop_when_done() -> None:
        try:
            until(lambda: app.backend.queues() == [], what=lambda: f"all is done: {app.backend.queues()}")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_done).start()
    exit_code = multiq.Worker(app, queues=["high", "default"], processes=2, threads=4).run()

    # Then every job ran once, none in this process, and the urgent ones began first
    assert exit_code == 0
    lines = [line.split() for line in notes.read_text().splitlines()]
    assert sorted(queue for queue, _, _ in lines) == ["default"] * 100 + ["high"] * 100
    pids = {int(pid) for _, pid, _ in lines}
    assert os.getpid() not in pids
    assert len(pids) <= 2
    assert lines[0][0] == "high"


def test_jobs_are_enqueued_inside_the_caller_s_transaction(app: multiq.App, tmp_path: Path) -> None:
    import sqlite3

    @app.task
    def ship(order: int) -> None: ...

    app.queue().stats()  # creates the tables
    shop = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    for ending, state in [("ROLLBACK", State.GONE), ("COMMIT", State.READY)]:
        shop.execute("BEGIN IMMEDIATE")
        handle = ship.options(connection=shop).enqueue(7)
        raw = app.queue().enqueue({"order": 7}, connection=shop)
        shop.execute(ending)
        assert (handle.state(), raw.state()) == (state, state)
    shop.close()
