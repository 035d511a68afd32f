"""``multiq stats``, ``jobs``, ``peek`` and ``top``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from multiq.backend import State

if TYPE_CHECKING:
    from shell import Shell


def one_in_each_state(shell: Shell) -> dict[str, str]:
    """A job in each state of queue ``mail``: state -> id."""
    queue = shell.app.queue("mail")
    queue.enqueue({"for": "burial"})
    with queue.reserve() as job:
        buried = job.id
        job.bury("550 no\x1b[31m such mailbox")
    queue.enqueue("for a lease")
    reserved = queue.reserve().id
    return {
        "buried": buried,
        "reserved": reserved,
        "delayed": queue.enqueue([1, 2], delay=3600).id,
        "ready": queue.enqueue(b"\x00\xff raw", priority=7).id,
    }


# --- stats -----------------------------------------------------------------------------------------------


def test_stats_counts_every_queue_and_their_total(shell: Shell) -> None:
    one_in_each_state(shell)
    shell.app.queue("other").enqueue_many([1, 2])
    done = shell("stats")
    assert done.code == 0
    assert [line.split() for line in done.out.splitlines()] == [
        ["QUEUE", "READY", "DELAYED", "RESERVED", "BURIED"],
        ["mail", "1", "1", "1", "1"],
        ["other", "2", "0", "0", "0"],
        ["total", "3", "1", "1", "1"],
    ]
    assert shell.url in done.err


def test_stats_of_named_queues_only(shell: Shell) -> None:
    shell.app.queue("a").enqueue(1)
    shell.app.queue("b").enqueue(1)
    assert [row["queue"] for row in shell("stats", "b", "never-used", "--json").json["queues"]] == ["b", "never-used"]


def test_stats_shows_a_pause_with_the_time_that_is_left(shell: Shell) -> None:
    shell.app.queue("mail").pause(7200)
    done = shell("stats")
    assert "PAUSED FOR" in done.out
    assert "2h" in done.out
    assert 7100 < shell("stats", "--json").json["queues"][0]["paused_for"] <= 7200


def test_stats_as_json_has_the_documented_keys(shell: Shell) -> None:
    one_in_each_state(shell)
    assert shell("stats", "--json").json == {
        "connection": shell.url,
        "queues": [
            {"queue": "mail", "ready": 1, "delayed": 1, "reserved": 1, "buried": 1, "paused_for": None, "held": 0}
        ],
    }


def test_stats_without_queues_says_where_it_looked(shell: Shell) -> None:
    shell.make_store()
    done = shell("stats")
    assert done.code == 0
    assert done.out == f"no queue on {shell.url} holds a job\n"
    assert shell("stats", "--json").json["queues"] == []


# --- jobs ------------------------------------------------------------------------------------------------


def test_jobs_lists_every_state_with_whole_ids(shell: Shell) -> None:
    ids = one_in_each_state(shell)
    done = shell("jobs", "mail")
    rows = [line.split() for line in done.out.splitlines()[1:]]
    assert {row[1]: row[0] for row in rows} == ids
    assert "\x1b" not in done.out
    assert "\\x1b[31m such mailbox" in done.out


def test_jobs_of_one_state_only(shell: Shell) -> None:
    ids = one_in_each_state(shell)
    for state, job_id in ids.items():
        assert [job["id"] for job in shell("jobs", "mail", state, "--json").json["jobs"]] == [job_id]


def test_buried_jobs_are_listed_with_their_reasons(shell: Shell) -> None:
    one_in_each_state(shell)
    out = shell("jobs", "mail", "buried").out
    assert out.splitlines()[0].split() == ["ID", "TRY", "REASON", "JOB"]
    assert "550 no" in out


def test_jobs_as_json_has_the_documented_keys(shell: Shell) -> None:
    ids = one_in_each_state(shell)
    document = shell("jobs", "mail", "--json").json
    assert set(document) == {"queue", "jobs", "after"}
    jobs = {job["state"]: job for job in document["jobs"]}
    assert set(jobs["ready"]) == {
        "queue", "id", "state", "priority", "ttr", "attempt", "crashes", "kicks", "due_in", "age", "reason", "task",
        "body", "body_base64", "size", "failure", "awaits", "unique_key", "held_by",
    }  # fmt: skip
    assert jobs["delayed"]["body"] == [1, 2]
    assert jobs["delayed"]["body_base64"] is None
    assert jobs["ready"]["body"] is None
    assert jobs["ready"]["body_base64"] == "AP8gcmF3"
    assert jobs["ready"]["priority"] == 7
    assert jobs["buried"]["reason"] == "550 no\x1b[31m such mailbox"
    assert jobs["reserved"]["id"] == ids["reserved"]


def test_a_long_listing_comes_in_pages_that_say_how_to_go_on(shell: Shell) -> None:
    ids = [handle.id for handle in shell.app.queue("mail").enqueue_many(range(5))]
    first = shell("jobs", "mail", "-n", "3")
    hint = first.err.strip().removeprefix("there are more: multiq ").split()
    second = shell(*hint)
    seen = [line.split()[0] for page in (first, second) for line in page.out.splitlines()[1:]]
    assert seen == ids


def test_the_command_for_more_jobs_names_the_connection_that_was_given(shell: Shell) -> None:
    shell.app.queue("many").enqueue_many(range(3))
    for arguments in (["-c", shell.url, "jobs", "many"], ["jobs", "many", "-c", shell.url]):
        said = shell(*arguments, "-n", "1", MULTIQ_URL="sqlite:///elsewhere.db").err
        assert said.rstrip().endswith(f" -c {shell.url}")


def test_pages_as_json_carry_the_cursor(shell: Shell) -> None:
    ids = [handle.id for handle in shell.app.queue("mail").enqueue_many(range(5))]
    first = shell("jobs", "mail", "ready", "-n", "3", "--json").json
    second = shell("jobs", "mail", "ready", "-n", "3", "--after", first["after"]["ready"], "--json").json
    assert [job["id"] for page in (first, second) for job in page["jobs"]] == ids
    assert second["after"] == {}


def test_a_queue_without_jobs_says_so(shell: Shell) -> None:
    shell.make_store()
    assert shell("jobs", "mail").out == "queue mail has no jobs\n"
    assert shell("jobs", "mail", "buried").out == "queue mail has no buried jobs\n"


def test_a_task_is_listed_as_its_call(shell: Shell) -> None:
    shell.app.task(name="mail.reset", queue="mail")(lambda address, name: None).enqueue("ann@x.org", name="Ann")
    assert 'mail.reset("ann@x.org", name="Ann")' in shell("jobs", "mail").out


# --- peek ------------------------------------------------------------------------------------------------


def test_peek_finds_the_job_in_whatever_queue_and_says_which(shell: Shell) -> None:
    shell.app.queue("other").enqueue(1)
    ids = one_in_each_state(shell)
    done = shell("peek", ids["buried"])
    assert done.code == 0
    facts = dict(line.split(maxsplit=1) for line in done.out.split("\n\n")[0].splitlines())
    assert facts["queue"] == "mail"
    assert facts["state"] == "buried"
    assert facts["reason"] == "550 no\\x1b[31m such mailbox"
    assert '"for": "burial"' in done.out


@pytest.mark.parametrize(
    ("state", "says"),
    [("delayed", "delayed, due in 1h"), ("reserved", "reserved, its lease ends in"), ("ready", "ready")],
)
def test_peek_returns_the_state_with_its_time(shell: Shell, state: str, says: str) -> None:
    assert says in shell("peek", one_in_each_state(shell)[state], "-q", "mail").out


def test_peek_as_json_is_one_job(shell: Shell) -> None:
    job = shell("peek", one_in_each_state(shell)["delayed"], "--json").json
    assert (job["queue"], job["state"], job["body"]) == ("mail", "delayed", [1, 2])
    assert 3500 < job["due_in"] <= 3600


def test_peek_raw_gives_the_body_to_the_byte(shell: Shell) -> None:
    body = bytes(range(256))
    job = shell.app.queue("mail").enqueue(body)
    assert job.peek().body == body
    import subprocess
    import sys

    command = [sys.executable, "-m", "multiq", "peek", job.id, "--raw"]
    assert subprocess.run(command, env=shell.all_environment(), capture_output=True, check=True).stdout == body


def test_a_large_body_is_cut_to_a_screen(shell: Shell) -> None:
    job = shell.app.queue("mail").enqueue(list(range(10_000)))
    out = shell("peek", job.id).out
    assert len(out.splitlines()) < 45
    assert out.endswith("... (--raw prints all of it)\n")


@pytest.mark.parametrize("body", [b"\x1b]0;title\x07", '"\u202e\u009b31m"'.encode(), b"\x1b[2J\xff"])
def test_a_hostile_body_does_not_reach_the_terminal(shell: Shell, body: bytes) -> None:
    job = shell.app.queue("mail").enqueue(body)
    for arguments in (("peek", job.id), ("jobs", "mail"), ("peek", job.id, "--json"), ("jobs", "mail", "--json")):
        out = shell(*arguments).out
        assert all(character.isprintable() or character == "\n" for character in out)


def test_peek_as_json_keeps_what_it_escapes(shell: Shell) -> None:
    job = shell.app.queue("mail").enqueue("\u202e\u009b\U000e0001 grüße")
    assert shell("peek", job.id, "--json").json["body"] == "\u202e\u009b\U000e0001 grüße"


def test_inspection_changes_nothing(shell: Shell) -> None:
    ids = one_in_each_state(shell)
    before = shell.everything()
    for arguments in (("stats",), ("jobs", "mail"), ("peek", ids["reserved"]), ("top", "--once")):
        assert shell(*arguments).code == 0
    assert shell.everything() == before
    assert shell.app.queue("mail").peek(ids["reserved"]).state is State.RESERVED


# --- top -------------------------------------------------------------------------------------------------


def test_top_once_prints_one_frame(shell: Shell) -> None:
    one_in_each_state(shell)
    lines = shell("top", "--once").out.splitlines()
    assert lines[0].startswith("multiq top")
    assert lines[1].split() == ["QUEUE", "READY", "DELAYED", "RESERVED", "BURIED"]
    assert lines[2].split() == ["mail", "1", "1", "1", "1"]


def test_top_without_a_terminal_ends_after_one_frame(shell: Shell) -> None:
    shell.make_store()
    assert "no queue holds a job" in shell.run("top").out


def test_top_as_json_is_a_line_for_each_frame(shell: Shell) -> None:
    shell.app.queue("mail").enqueue(1)
    process = shell.start("top", "--json", "-i", "100ms")
    assert process.stdout is not None
    looks = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.terminate()
    process.communicate()
    assert [look["queues"][0]["ready"] for look in looks] == [1, 1, 1]
    assert looks[0]["at"] < looks[1]["at"] < looks[2]["at"]
