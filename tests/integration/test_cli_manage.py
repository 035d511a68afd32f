"""``multiq kick``, ``delete``, ``reschedule``, ``pause``, ``resume`` and ``purge``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from multiq.backend import State

if TYPE_CHECKING:
    from shell import Shell

    from multiq import Job, Queue


@pytest.fixture
def mail(shell: Shell) -> Queue:
    return shell.app.queue("mail")


def bury(queue: Queue, number: int) -> list[str]:
    """So many buried jobs."""
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
def test_a_job_that_is_not_there_ends_with_3(shell: Shell, mail: Queue, command: list[str], where: list[str]) -> None:
    mail.enqueue(1)
    before = shell.everything()
    done = shell(*command, "no-such-job", *where)
    assert (done.code, done.out) == (3, "")
    assert "has no job no-such-job" in done.err or "no queue has job no-such-job" in done.err
    assert shell(*command, "no-such-job", *where, "--json").error["type"] == "JobNotFound"
    assert shell.everything() == before


@pytest.mark.parametrize("command", [["delete"], ["kick", "--id"], ["reschedule", "--delay", "0"]])
def test_a_job_that_runs_ends_with_4_and_is_let_be(shell: Shell, mail: Queue, command: list[str]) -> None:
    job = hold(mail)
    before = shell.everything()
    done = shell(*command, job.id)
    assert (done.code, done.out) == (4, "")
    assert "is being run right now" in done.err
    assert shell(*command, job.id, "--json").error["type"] == "JobReserved"
    assert shell.everything() == before
