"""``multiq kick``, ``delete``, ``reschedule``, ``pause``, ``resume`` and ``purge``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import multiq
from multiq.backend import Put, State
from multiq.flows.record import HOME, FlowRecord, put

if TYPE_CHECKING:
    from shell import Shell

    from multiq import Job, Queue


@pytest.fixture
def mail(shell: Shell) -> Queue:
    return shell.app.queue("mail")


def bury(queue: Queue, number: int) -> list[str]:
    """Bury this many jobs."""
    queue.enqueue_many(range(number), priority=0)
    jobs = queue.reserve_many(number)
    for job in jobs:
        job.bury("for a test")
    return [job.id for job in jobs]


def hold(queue: Queue) -> Job:
    queue.enqueue("held", priority=0)
    return queue.reserve()


# --- kick ------------------------------------------------------------------------------------------------


def test_kick_takes_the_longest_buried_first_and_says_what_is_left(shell: Shell, mail: Queue) -> None:
    ids = bury(mail, 5)
    done = shell("kick", "mail", "3")
    assert (done.code, done.out) == (0, "kicked 3 jobs of queue mail; 2 still buried\n")
    assert [job.id for job in mail.jobs("buried")] == ids[3:]


def test_kick_takes_one_by_default(shell: Shell, mail: Queue) -> None:
    bury(mail, 2)
    assert shell("kick", "mail", "--json").json == {"queue": "mail", "kicked": 1, "buried": 1}


def test_kick_of_nothing_succeeds(shell: Shell) -> None:
    shell.make_store()
    done = shell("kick", "mail", "10")
    assert (done.code, done.out) == (0, "kicked 0 jobs of queue mail\n")


@pytest.mark.parametrize("where", [[], ["-q", "mail"], ["mail"]])
def test_kick_by_id_takes_a_buried_or_delayed_job_wherever_it_is(shell: Shell, mail: Queue, where: list[str]) -> None:
    delayed = mail.enqueue(1, delay=3600)
    for job_id in (bury(mail, 1)[0], delayed.id):
        done = shell("kick", "--id", job_id, *where)
        assert (done.code, done.out) == (0, f"job {job_id} of queue mail is ready\n")
        assert mail.peek(job_id).state is State.READY


# --- delete ----------------------------------------------------------------------------------------------


def test_delete_takes_the_job_away_and_says_where_it_was(shell: Shell, mail: Queue) -> None:
    job = mail.enqueue(1)
    done = shell("delete", job.id)
    assert (done.code, done.out) == (0, f"deleted job {job.id} of queue mail\n")
    assert job.state() is State.GONE


def test_delete_as_json(shell: Shell, mail: Queue) -> None:
    job = mail.enqueue(1)
    assert shell("delete", job.id, "--json").json == {"queue": "mail", "id": job.id, "deleted": 1}


def test_the_same_id_in_two_queues_is_not_guessed_at(shell: Shell) -> None:
    from multiq.backend import NewJob

    for queue in ("one", "two"):
        shell.app.backend.enqueue(queue, [NewJob(b"1", "twin")])
    refused = shell("delete", "twin")
    assert refused.code == 2
    assert "queues one, two each have a job twin: say which one with -q QUEUE" in refused.err
    assert shell("delete", "twin", "-q", "two").code == 0
    assert [name for name in ("one", "two") if len(shell.app.queue(name).jobs("ready"))] == ["one"]


# --- reschedule ------------------------------------------------------------------------------------------


def test_reschedule_moves_the_due_time_later_and_earlier(shell: Shell, mail: Queue) -> None:
    job = mail.enqueue(1)
    done = shell("reschedule", job.id, "--delay", "1h30m")
    assert (done.code, done.out) == (0, f"job {job.id} of queue mail is due in 1h 30m\n")
    assert 5300 < (job.peek().due_in or 0) <= 5400
    assert shell("reschedule", job.id, "--delay", "0").out == f"job {job.id} of queue mail is due now\n"
    assert job.state() is State.READY


def test_reschedule_to_a_moment(shell: Shell, mail: Queue) -> None:
    job = mail.enqueue(1)
    document = shell("reschedule", job.id, "--at", "2099-01-01T00:00+02:00", "--json").json
    assert (document["queue"], document["id"]) == ("mail", job.id)
    assert document["due_in"] > 365 * 86400
    assert shell("reschedule", job.id, "--at", "2001-01-01T00:00Z").out.endswith("is due now\n")


# --- pause, resume ---------------------------------------------------------------------------------------


def test_pause_and_resume(shell: Shell, mail: Queue) -> None:
    mail.enqueue(1)
    assert shell("pause", "mail", "10m").out == "queue mail is paused for 10m\n"
    assert mail.reserve_many(1) == []
    assert shell("resume", "mail").out == "queue mail is not paused\n"
    assert len(mail.reserve_many(1)) == 1


def test_pause_and_resume_as_json(shell: Shell) -> None:
    assert shell("pause", "mail", "90", "--json").json == {"queue": "mail", "paused_for": 90.0}
    assert shell("resume", "mail", "--json").json == {"queue": "mail", "paused_for": None}


# --- purge -----------------------------------------------------------------------------------------------


def fill(mail: Queue) -> None:
    bury(mail, 2)
    hold(mail)
    mail.enqueue_many([1, 2, 3])
    mail.enqueue(1, delay=3600)


def test_purge_asks_with_the_numbers_and_follows_the_answer(shell: Shell, mail: Queue) -> None:
    fill(mail)
    done = shell("purge", "mail", stdin="y\n")
    assert f"Delete the jobs of queue mail on {shell.url}: 3 ready, 1 delayed, 2 buried?" in done.err
    assert (done.code, done.out) == (0, "deleted 6 jobs of queue mail (ready, delayed, buried)\n")
    stats = mail.stats()
    assert (stats.ready, stats.delayed, stats.reserved, stats.buried) == (0, 0, 1, 0)


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_purge_does_nothing_without_a_yes(shell: Shell, mail: Queue, answer: str) -> None:
    fill(mail)
    before = shell.everything()
    done = shell("purge", "mail", stdin=answer)
    assert (done.code, done.out) == (130, "")
    assert shell.everything() == before


@pytest.mark.parametrize("states", [["ready,buried"], ["ready", "buried"], ["ready, buried,ready"]])
def test_purge_of_some_states(shell: Shell, mail: Queue, states: list[str]) -> None:
    fill(mail)
    document = shell("purge", "mail", *states, "--yes", "--json").json
    assert document == {"queue": "mail", "states": ["ready", "buried"], "purged": 5}
    assert mail.stats().delayed == 1


# --- missing and reserved jobs ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["delete"], ["kick", "--id"], ["peek"], ["reschedule", "--delay", "0"]])
@pytest.mark.parametrize("where", [[], ["-q", "mail"]])
def test_a_missing_job_ends_the_command_with_3(shell: Shell, mail: Queue, command: list[str], where: list[str]) -> None:
    mail.enqueue(1)
    before = shell.everything()
    done = shell(*command, "no-such-job", *where)
    assert (done.code, done.out) == (3, "")
    assert "has no job no-such-job" in done.err or "no queue has job no-such-job" in done.err
    assert shell(*command, "no-such-job", *where, "--json").error["type"] == "JobNotFound"
    assert shell.everything() == before


@pytest.mark.parametrize("command", [["delete"], ["kick", "--id"], ["reschedule", "--delay", "0"]])
def test_a_running_job_ends_the_command_with_4_and_is_unchanged(shell: Shell, mail: Queue, command: list[str]) -> None:
    job = hold(mail)
    before = shell.everything()
    done = shell(*command, job.id)
    assert (done.code, done.out) == (4, "")
    assert "is being run right now" in done.err
    assert shell(*command, job.id, "--json").error["type"] == "JobReserved"
    assert shell.everything() == before


# --- cancel ----------------------------------------------------------------------------------------------


def test_cancel_deletes_a_job_that_has_not_started_and_asks_the_worker_of_a_running_one(
    shell: Shell, mail: Queue
) -> None:
    running, waiting = hold(mail), mail.enqueue(1)
    done = shell("cancel", waiting.id)
    assert (done.code, done.out) == (0, f"deleted job {waiting.id} of queue mail: it had not started\n")
    asked = shell("cancel", running.id, "--grace", "1s", "--reason", "late", "--json").json
    assert asked == {"queue": "mail", "id": running.id, "answer": "requested"}
    assert mail.peek(running.id).state is State.RESERVED
    missing = shell("cancel", waiting.id)
    assert missing.code == 3


@pytest.mark.parametrize(
    ("lost", "statuses"),
    [(0, ["lost", "held", "held"]), (1, ["unknown", "unknown", "held"]), (None, ["ended", "queued", "held"])],
)
def test_flows_show_does_not_show_a_lost_job_as_ended(shell: Shell, lost: int | None, statuses: list[str]) -> None:
    # Given a chain of three jobs, of which the first one is done
    task = shell.app.task(name="mail.reset", queue="mail")(lambda address: None)
    flow = multiq.chain(task.s("ann"), task.s("bob"), task.s("cy")).enqueue()
    jobs = list(flow.jobs())
    if lost != 0:
        multiq.Worker(shell.app, max_jobs=1).run()
    # When the store loses one of the jobs
    if lost is not None:
        shell.app.backend.delete("mail", jobs[lost].id)
    # Then it does not count as done, and is not shown as ended
    shown = shell("flows", "show", flow.id, "--json").json
    assert [job["status"] for job in shown["jobs"]] == statuses
    assert shown["done"] == (0 if lost == 0 else 1)
    text = shell("flows", "show", flow.id)
    assert ("the store has lost it" in text.err) == (lost is not None)


def test_flows_show_does_not_show_a_lost_member_of_a_batch_as_ended(shell: Shell) -> None:
    # Given a batch of two jobs, of which one is lost, and one is done
    task = shell.app.task(name="mail.reset", queue="mail")(lambda address: None)
    flow = multiq.batch([task.s("ann"), task.s("bob")]).enqueue()
    member = next(job for job, task_name in flow.tasks() if task_name == "mail.reset")
    shell.app.backend.delete("mail", member.id)
    multiq.Worker(shell.app, stop_when_empty=True).run()
    # Then neither is shown as ended, because it is not known which one is lost
    shown = shell("flows", "show", flow.id, "--json").json
    assert [job["status"] for job in shown["jobs"] if job["task"] == "mail.reset"] == ["unknown", "unknown"]
    assert (shown["done"], shown["total"]) == (1, 2)


def test_flows_forget_deletes_a_record_that_cannot_be_read(shell: Shell) -> None:
    # Given the record of a flow that has ended, and a record that cannot be read
    shell.app.backend.carry_out([Put(HOME, "flow/f0", b"[]"), put("f1", FlowRecord("", "finished", 0.0, 60.0, []))])
    refused = shell("flows", "list")
    assert "multiq flows forget f0" in refused.err
    # When it is forgotten, then the other commands work again
    assert shell("flows", "forget", "f0").out == "flow f0 is forgotten\n"
    assert [flow["id"] for flow in shell("flows", "list", "--json").json["flows"]] == ["f1"]
    assert shell("flows", "forget", "f1", "--json").json == {"flow": "f1"}
    assert shell("flows", "forget", "f1").code == 3


def test_flows_sweep_drops_a_flow_whose_producer_has_died(shell: Shell) -> None:
    # Given the record of a flow of which no job was enqueued
    record = FlowRecord("import 7", "enqueuing", 0.0, 60.0, [], last=0, is_batch=True)
    record.add("mail", "multiq.end")
    shell.app.backend.carry_out([put("f1", record)])
    # When the record is swept, then a dry run changes nothing
    assert shell("flows", "sweep", "--dry-run").out == "f1  would be dropped  import 7\n"
    assert shell("flows", "sweep", "--json").json == {
        "flows": [{"id": "f1", "name": "import 7", "action": "dropped"}],
        "dry_run": False,
    }
    assert shell.app.flows.get("f1").info().state == "cancelled"
    assert shell("flows", "sweep").out == "no flow has been left half enqueued\n"
