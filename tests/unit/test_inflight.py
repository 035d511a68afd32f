"""The in-flight table: another process reads about a lease only what the child wrote about this lease."""

from __future__ import annotations

import os
import random
import signal
import time

import msgspec
import pytest

from multiq.backend import Ack, After, Arrive, Bury, GiveBack, Lease, Release, Verdict
from multiq.outcome import AttemptError, encode_outcome
from multiq.worker.processes.dead_children import _pending_verdict, lease_of
from multiq.worker.processes.inflight import (
    ACKED,
    DEAD,
    ENDED,
    FREE,
    LIVE,
    NEVER,
    WAITING,
    Held,
    InflightTable,
    InflightWriter,
    make_tables,
)


def lease(number: int, token: str = "t") -> Lease:  # noqa: S107
    return Lease("default", f"job-{number}", f"{token}-{number}", b"", 1024, 60.0, 1, 0, 0, 0.0)


def held_in(inflight: InflightWriter, one: Lease) -> Held:
    held = Held(one, None, 0.0, NEVER)
    inflight.hold([held])
    return held


@pytest.fixture
def table() -> InflightTable:
    (table,) = make_tables(1, 4)
    table.assign()
    return table


def test_a_held_lease_waits_in_the_table(table: InflightTable) -> None:
    inflight = InflightWriter(table)
    held_in(inflight, lease(1))
    (entry,) = table.entries()
    assert (entry.held.queue, entry.held.id, entry.held.token, entry.held.ttr) == ("default", "job-1", "t-1", 60.0)
    assert (entry.mark, entry.kill_at) == (WAITING, NEVER)
    assert not entry.is_running


def test_a_slot_that_is_used_again_has_nothing_of_the_lease_before(table: InflightTable) -> None:
    # Given a lease that ran under a time limit, was acked and is settled
    inflight = InflightWriter(table)
    for number in range(4):
        held = held_in(inflight, lease(number))
        held.began_at = 5.0
        inflight.begin(held)
        inflight.set_kill_at(held, 7.0)
        held.verdict = Ack(held.lease)
        inflight.end(held)
        inflight.drop([held])
    # When another lease takes its slot
    later = held_in(inflight, lease(9))
    # Then the table shows a waiting job without a limit, with a number of its own
    (entry,) = table.entries()
    assert (entry.held.id, entry.mark, entry.kill_at) == ("job-9", WAITING, NEVER)
    assert entry.serial == 5
    later.began_at = 6.0
    inflight.begin(later)
    assert table.kill_at() == NEVER


def test_a_job_that_ends_after_its_lease_was_given_back_marks_no_other_lease(table: InflightTable) -> None:
    # Given a job that still runs although its lease was given back and its slot taken by other leases
    inflight = InflightWriter(table)
    aborted = held_in(inflight, lease(1))
    aborted.began_at = 5.0
    inflight.begin(aborted)
    aborted.is_aborted = True
    inflight.drop([aborted])
    assert table.entries() == []
    for number in range(2, 6):
        held_in(inflight, lease(number))
    # When it ends
    aborted.verdict = Ack(aborted.lease)
    inflight.end(aborted)
    inflight.set_kill_at(aborted, 1.0)
    # Then the jobs of the other leases still wait. The job's verdict is stored with its own lease, and the backend
    # refuses it
    others = [entry for entry in table.entries() if entry.held.id != "job-1"]
    assert [(entry.mark, entry.kill_at) for entry in others] == [(WAITING, NEVER)] * 3


def test_a_finished_job_s_verdict_stands_with_its_lease(table: InflightTable) -> None:
    inflight = InflightWriter(table)
    verdicts: list[Verdict] = [
        Ack(lease(0)),
        Release(lease(1), 30.0, 7, "x" * 5000),
        Bury(lease(2), "no use"),
        GiveBack(lease(3)),
    ]
    for verdict in verdicts:
        held = held_in(inflight, verdict.lease)
        held.began_at = 5.0
        inflight.begin(held)
        held.verdict = verdict
        inflight.end(held)
    acked, released, buried, given_back = table.entries()
    assert acked.mark == ACKED
    assert (released.mark, released.held.verdict, released.held.delay) == (ENDED, "release", 30.0)
    assert (released.held.priority, released.held.id, released.held.token) == (7, "job-1", "t-1")
    assert "x" * 100 in (released.held.reason or "")
    assert (buried.mark, buried.held.verdict, buried.held.reason) == (ENDED, "bury", "no use")
    assert given_back.mark == WAITING


def test_a_verdict_stands_without_its_reason_where_names_leave_no_room_for_it(table: InflightTable) -> None:
    # Given a job with the longest names
    writer = InflightWriter(table)
    long = Lease("q" * 128, "i" * 200, "t" * 60, b"", 0, 5.0, 1, 0, 0, 0.0)
    for verdict in (Release(long, 7.0, 3, "r" * 2000), Bury(long, "é" * 2000)):
        held = Held(long, None, 0.0, NEVER)
        writer.hold([held])
        held.began_at = 1.0
        writer.begin(held)
        # When it has failed
        held.verdict = verdict
        writer.end(held)
        # Then the job no longer counts as running, and its verdict can be carried out
        (entry,) = table.entries()
        assert (entry.mark, type(_pending_verdict(long, entry))) == (ENDED, type(verdict))
        writer.drop([held])


def test_a_delayed_give_back_stands_with_its_delay(table: InflightTable) -> None:
    # Given a job that was given back with a delay, and whose process dies before the verdict is settled
    inflight = InflightWriter(table)
    held = held_in(inflight, lease(1))
    held.began_at = 5.0
    inflight.begin(held)
    held.verdict = GiveBack(held.lease, 2.5)
    inflight.end(held)
    # Then the table has the delay, and recovery gives the job back with this delay
    (entry,) = table.entries()
    assert (entry.mark, entry.held.verdict, entry.held.delay) == (ENDED, "give_back", 2.5)
    assert _pending_verdict(held.lease, entry) == GiveBack(held.lease, 2.5)


def test_a_long_reason_is_cut_and_its_verdict_kept_whatever_it_is_written_in(table: InflightTable) -> None:
    inflight = InflightWriter(table)
    for reason in ("x" * 5000, "原因" * 500, "\ud800" * 400):
        held = held_in(inflight, lease(1))
        held.began_at = 5.0
        inflight.begin(held)
        held.verdict = Bury(held.lease, reason)
        inflight.end(held)
    assert [(entry.mark, entry.held.verdict) for entry in table.entries()] == [(ENDED, "bury")] * 3


def test_a_job_that_has_ended_without_room_for_its_verdict_is_not_overdue(table: InflightTable) -> None:
    # Given a job with a time limit, whose ack has steps that do not fit into the table
    inflight = InflightWriter(table)
    held = held_in(inflight, lease(1))
    held.began_at = 5.0
    inflight.begin(held)
    inflight.set_kill_at(held, 7.0)
    steps = tuple(Arrive("default", f"job-{number}", "job-1") for number in range(100))
    held.verdict = Ack(held.lease, After(steps=steps))
    # When the job has ended, and the backend is unreachable
    inflight.end(held)
    # Then the job counts as running, and its process is not killed at its time limit
    (entry,) = table.entries()
    assert entry.is_running
    assert table.kill_at() == NEVER


def test_a_lease_without_room_is_left_to_its_end(table: InflightTable) -> None:
    inflight = InflightWriter(table)
    jobs = [Held(one, None, 0.0, NEVER) for one in (lease(1, token="t" * 2000), *map(lease, range(5)))]
    inflight.hold(jobs)
    assert [held.slot is None for held in jobs] == [True, False, False, False, False, True]
    assert len(table.entries()) == 4


def test_a_child_has_ended_in_order_only_if_it_wrote_its_exit_code(table: InflightTable) -> None:
    for write, left in ((False, None), (True, 0)):
        pid = os.fork()
        if not pid:
            if write:
                table.note_exit(0)
            os._exit(0)
        os.waitpid(pid, 0)
        assert table.exit_code == left


def test_a_table_is_assigned_dead_and_freed(table: InflightTable) -> None:
    inflight = InflightWriter(table)
    held_in(inflight, lease(1))
    inflight.set_next_touch(1.0)
    assert table.has_held
    table.note_exit(3)
    assert (table.state, table.life) == (LIVE, 1)
    table.mark_dead(-9, 12.0, is_late=True)
    assert (table.state, table.status, table.is_late, table.died_at, len(table.entries())) == (DEAD, -9, True, 12.0, 1)
    table.free()
    assert table.state == FREE
    table.assign()
    assert (table.state, table.life, table.exit_code, table.entries(), table.has_held) == (LIVE, 2, None, [], False)


@pytest.mark.one_row
@pytest.mark.parametrize("seed", range(5))
def test_a_child_killed_at_any_moment_leaves_no_mark_of_one_lease_at_another(seed: int) -> None:
    """A token shows in which state its lease may be. The reader shares only the table with the writer."""
    (table,) = make_tables(1, 8)
    luck = random.Random(seed)
    for _ in range(12):
        table.assign()
        pid = os.fork()
        if not pid:
            _churn(InflightWriter(table))
        time.sleep(luck.uniform(0.002, 0.02))
        living = table.entries()  # reads while the child writes must be right, too
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for entry in [*living, *table.entries()]:
            kind = entry.held.token.split("-")[0]
            if kind == "wait":
                assert entry.mark == WAITING
                assert entry.kill_at == NEVER
            elif kind == "run":
                assert entry.mark in {WAITING, 5.0}
            else:
                assert entry.mark in {WAITING, 5.0, ACKED}
        table.free()


def _churn(inflight: InflightWriter) -> None:
    """Hold, run and settle leases until this process is killed."""
    number = 0
    while True:
        batch = []
        for kind in ("wait", "run", "ack", "ack"):
            number += 1
            held = held_in(inflight, lease(number, token=kind))
            batch.append(held)
            if kind != "wait":
                held.began_at = 5.0
                inflight.begin(held)
                inflight.set_kill_at(held, 9.0)
            if kind == "ack":
                held.verdict = Ack(held.lease)
                inflight.end(held)
        inflight.drop(batch)


@pytest.mark.parametrize(("size", "has_value"), [(10, True), (300, False), (100_000, False)])
def test_a_dead_child_s_kept_ack_is_settled_with_its_outcome_as_far_as_there_is_room(
    table: InflightTable, size: int, has_value: bool
) -> None:
    # Given a child that died after its job was done, and before the ack was settled
    inflight = InflightWriter(table)
    held = held_in(inflight, msgspec.structs.replace(lease(1), attempt=2))
    held.began_at = 5.0
    inflight.begin(held)
    errors = [AttemptError(1, "ValueError: " + "x" * size, 1.0, "w:1")]
    body, _ = encode_outcome(
        b'"' + b"x" * size + b'"', None, started=1.0, finished=2.0, worker="w:1", attempt=2, errors=errors
    )
    held.verdict = Ack(held.lease, After(keep=60.0, outcome=body, kind="cancelled" if size == 10 else "done"))
    inflight.end(held)
    # Then its job is acked and not run again, with the outcome's value if the slot has room for it
    (entry,) = table.entries()
    assert entry.mark == ENDED
    verdict = _pending_verdict(lease_of(entry.held), entry)
    assert isinstance(verdict, Ack)
    assert verdict.lease.attempt == 2  # some backends store the attempt with the outcome
    assert verdict.after is not None
    assert (verdict.after.keep, verdict.after.kind) == (60.0, "cancelled" if size == 10 else "done")
    fields = msgspec.json.decode(verdict.after.outcome)
    assert ("value" in fields, fields["attempt"]) == (has_value, 2)
    assert has_value or fields["omitted"] == "the worker process died before it had stored the value"
