"""``multiq failed``, ``multiq history`` and ``multiq result``.

Most tests run the commands in this process, on a store in memory. The others run them as processes on each real store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from shell import Done
from worker_app import app as worker_app

import multiq
from multiq import BuryJob, State
from multiq.backend import Ack, After
from multiq.cli import cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_numbers = itertools.count()


class Store:
    """A named store in memory, an app on it, and ``multiq`` on it in this process."""

    def __init__(self) -> None:
        self.url = f"memory://failed-{next(_numbers)}"
        self.app = app = multiq.App(self.url)

        @app.task(queue="mail", max_attempts=1)
        def send(address: str) -> None:
            raise BuryJob(f"550 no such mailbox: {address}")

        @app.task(queue="orders", max_attempts=1)
        def ship(order: int) -> None:
            raise ValueError(f"order {order} is empty")

    def __call__(self, *arguments: str, stdin: str | None = None) -> Done:
        result = CliRunner().invoke(cli, arguments, input=stdin, env={"MULTIQ_URL": self.url})
        return Done(result.exit_code, result.stdout, result.stderr)

    def fail(self, *calls: tuple[str, Any]) -> list[str]:
        """Enqueue and bury jobs of these tasks. Returns their ids."""
        handles = [self.app.tasks[task].enqueue(argument) for task, argument in calls]
        multiq.Worker(self.app, queues=["mail", "orders"], stop_when_empty=True).run()
        return [handle.id for handle in handles]

    def end(self, queue: str, after: After | None = None) -> str:
        """Store a finished job's outcome."""
        handle = self.app.queue(queue).enqueue(1)
        consumer = self.app.backend.consumer([queue])
        (lease,) = consumer.reserve(1, 0)
        assert consumer.settle([Ack(lease, after)]) == [None]
        return handle.id

    def states(self) -> dict[str, State]:
        found: dict[str, State] = {}
        for queue in self.app.backend.queues():
            for state in ("ready", "delayed", "buried", "reserved"):
                found |= {job.id: job.state for job in self.app.queue(queue).jobs(state)}
        return found


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.app.close()


# --- failed list, failed show ---


def test_failed_list_shows_the_failed_jobs_of_all_queues(store: Store) -> None:
    one, two = store.fail(("send", "ann@example.com"), ("ship", 7))
    done = store("failed", "list")
    head, first, second = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert head.split() == ["ID", "QUEUE", "TRY", "FAILED", "REASON", "JOB"]
    assert re.fullmatch(
        rf'{one} +mail +1 +\S+ ago +550 no such mailbox: ann@example.com +send\("ann@example.com"\)', first
    )
    assert re.fullmatch(rf"{two} +orders +1 +\S+ ago +ValueError: order 7 is empty +ship\(7\)", second)


def test_failed_list_filters_and_says_that_there_are_more(store: Store) -> None:
    one, two, three = store.fail(("send", "a"), ("ship", 7), ("send", "b"))

    def listed(*options: str) -> list[str]:
        return [job["id"] for job in store("failed", "list", *options, "--json").json["jobs"]]

    assert listed() == [one, three, two]
    assert listed("-q", "orders") == [two]
    assert listed("--queue", "orders", "--queue", "mail") == [two, one, three]
    assert listed("--task", "send") == [one, three]
    assert listed("--reason", "mailbox: b") == [three]
    assert listed("--older", "1h") == []
    assert listed("--older", "0") == [one, three, two]
    done = store("failed", "list", "--limit", "2")
    assert (len(done.out.splitlines()), done.err) == (
        3,
        "there are more: --limit shows them, multiq stats counts them\n",
    )
    assert store("failed", "list", "-n", "2", "--json").json["more"] is True


def test_failed_list_as_json_has_the_failure(store: Store) -> None:
    (failed,) = store.fail(("ship", 7))
    document = store("failed", "list", "--json").json
    (job,) = document["jobs"]
    assert (document["more"], document["undated"]) == (False, 0)
    assert (job["id"], job["queue"], job["task"], job["reason"]) == (
        failed,
        "orders",
        "ship",
        "ValueError: order 7 is empty",
    )
    assert job["failure"]["traceback"].endswith("ValueError: order 7 is empty\n")
    assert not {"detail", "memo"} & set(job)


def test_failed_list_without_any_says_so(store: Store) -> None:
    done = store("failed", "list")
    assert (done.code, done.out) == (0, "there are no such failed jobs\n")


def test_failed_show_has_the_traceback_and_the_body(store: Store) -> None:
    (failed,) = store.fail(("ship", 7))
    done = store("failed", "show", failed)
    assert done.code == 0
    assert re.search(r"^failed +\d{4}-\d\d-\d\d .*, on .+:\d+$", done.out, re.MULTILINE)
    assert 'raise ValueError(f"order {order} is empty")' in done.out
    assert '"task": "ship"' in done.out
    assert store("failed", "show", failed, "-q", "orders", "--json").json["failure"]["attempt"] == 1


def test_failed_show_of_a_job_that_has_not_failed_ends_with_3(store: Store) -> None:
    waiting = store.app.queue("mail").enqueue(1)
    for job_id, words in ((waiting.id, "has not failed"), ("nope", "no queue has job nope")):
        done = store("failed", "show", job_id)
        assert (done.code, done.out) == (3, "")
        assert words in done.err
    assert store("failed", "show", waiting.id, "--json").error["type"] == "JobNotFailed"


def test_terminal_codes_in_a_traceback_are_escaped(store: Store) -> None:
    @store.app.task(queue="mail", max_attempts=1)
    def evil() -> None:
        raise ValueError("\x1b[31mred\nTraceback")

    (failed,) = store.fail(("send", "a"))[:1]
    evil.enqueue()
    multiq.Worker(store.app, queues=["mail"], stop_when_empty=True).run()
    ids = [job["id"] for job in store("failed", "list", "--task", "evil", "--json").json["jobs"]]
    assert failed not in ids
    assert "\x1b" not in store("failed", "show", ids[0]).out
    assert "\x1b" not in store("failed", "list").out


# --- failed retry, forget, prune ---


def test_failed_retry_shows_how_many_and_follows_the_answer(store: Store) -> None:
    store.fail(("send", "a"), ("ship", 7), ("send", "b"))
    before = store.states()
    for answer in ("n\n", "\n", ""):
        done = store("failed", "retry", stdin=answer)
        assert (done.code, done.out) == (130, "")
        assert f"Retry 3 failed jobs (mail 2, orders 1) on {store.url}?" in done.err
    assert store.states() == before
    done = store("failed", "retry", stdin="y\n")
    assert (done.code, done.out) == (0, "retried 3 failed jobs\n")
    assert set(store.states().values()) == {State.READY}


def test_failed_forget_asks_and_deletes(store: Store) -> None:
    one, two, _ = store.fail(("send", "a"), ("ship", 7), ("send", "b"))
    assert "Delete 1 failed job (mail 1)" in store("failed", "forget", "--reason", "mailbox: b", stdin="y\n").err
    assert sorted(store.states()) == sorted([one, two])
    document = store("failed", "forget", "--yes", "--json").json
    assert document == {
        "matched": 2, "changed": 2, "left": 0, "awaited": 0, "taken": 0, "undated": 0, "dry_run": False,
    }  # fmt: skip
    assert store.states() == {}


def test_failed_prune_needs_an_age_and_leaves_what_is_younger(store: Store) -> None:
    (failed,) = store.fail(("send", "a"))
    assert store("failed", "prune", "--yes").code == 2
    assert store("failed", "prune", "--older", "1h", "--yes").out == "there are no such failed jobs\n"
    assert store("failed", "prune", "--older", "0", "--queue", "orders", "--yes").code == 0
    assert list(store.states()) == [failed]
    assert store("failed", "prune", "--older", "0s", "-y").out == "deleted 1 failed job\n"


def test_jobs_whose_time_of_failure_is_unknown_are_reported_and_left(store: Store) -> None:
    store.app.queue("mail").enqueue(1)
    store.app.queue("mail").reserve().bury("by hand")
    for command in (("list",), ("prune", "--yes")):
        done = store("failed", *command, "--older", "0")
        assert (done.code, done.out) == (0, "there are no such failed jobs\n")
        assert done.err == "it is unknown when 1 further job failed, so --older leaves them out\n"
    assert store("failed", "prune", "--older", "0", "--yes", "--json").json["undated"] == 1


@pytest.mark.parametrize("verb", ["retry", "forget"])
def test_a_dry_run_says_how_many_and_neither_asks_nor_changes_anything(store: Store, verb: str) -> None:
    store.fail(("send", "a"), ("ship", 7))
    before = store.states()
    done = store("failed", verb, "--dry-run")
    word = "retried" if verb == "retry" else "deleted"
    assert (done.code, done.out, done.err) == (0, f"2 failed jobs would be {word}\n", "")
    assert store("failed", verb, "--dry-run", "--limit", "1", "--json").json["matched"] == 1
    assert store.states() == before


def test_jobs_that_are_named_are_changed_without_a_question(store: Store) -> None:
    one, two, three = store.fail(("send", "a"), ("ship", 7), ("send", "b"))
    assert store("failed", "retry", one, two).out == "retried 2 failed jobs\n"
    assert store("failed", "forget", three, "-q", "mail").out == "deleted 1 failed job\n"
    assert store.states() == {one: State.READY, two: State.READY}


def test_one_wrong_id_changes_no_job(store: Store) -> None:
    (one,) = store.fail(("send", "a"))
    for verb in ("retry", "forget"):
        assert store("failed", verb, one, "nope").code == 3
        assert store("failed", verb, one, "--task", "send").code == 2
        assert store("failed", verb, one, "-q", "mail", "-q", "orders").code == 2
    assert store.states() == {one: State.BURIED}


def test_jobs_that_fail_while_the_user_is_asked_are_left(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given two failed jobs. Before the user answers, one of them is kicked, and a third job fails
    one, two = store.fail(("send", "a"), ("send", "b"))
    late: list[str] = []

    def answer(*_: Any, **__: Any) -> bool:
        store.app.queue("mail").kick_job(one)
        late.extend(store.fail(("ship", 7)))
        store.app.queue("mail").kick_job(one) if store.app.queue("mail").peek(one).state is State.DELAYED else None
        return True

    monkeypatch.setattr("multiq.cli.failed.click.confirm", answer)
    done = store("failed", "forget")
    # Then only the job that was counted, and has not run since, is deleted
    assert done.out == "deleted 1 failed job; left 1 job that changed meanwhile\n"
    assert store.states() == {one: State.BURIED, late[0]: State.BURIED}
    assert two not in store.states()


def test_a_job_with_followers_is_left_without_the_option_followers(store: Store) -> None:
    send, ship = store.app.tasks["send"], store.app.tasks["ship"]
    for verb in (["forget"], ["prune", "--older", "0s"]):
        multiq.chain(ship.s(1), send.s()).enqueue()
        multiq.Worker(store.app, queues=["mail", "orders"], stop_when_empty=True).run()
        done = store("failed", *verb, "--yes")
        assert (
            done.out == "deleted 0 failed jobs; left 1 job for which other jobs wait (--followers says what they do)\n"
        )
        assert store("failed", *verb, "--yes", "--followers", "stop").out == "deleted 1 failed job\n"


# --- history, result ---


def test_history_lists_what_became_of_jobs(store: Store) -> None:
    one = store.end("mail", After(keep=60, outcome=b'{"v":1,"value":[1,"two"]}'))
    two = store.end("mail", After(keep=3600, outcome=b'{"v":1,"omitted":"too large"}'))
    three = store.end("mail", After(keep=90, outcome=b"\xff", kind="cancelled"))
    done = store("history", "mail")
    lines = done.out.splitlines()
    assert (done.code, [line.split()[0] for line in lines]) == (0, ["ID", two, three, one])
    assert re.fullmatch(rf'{one} +mail +done +1 +\S+ ago +(1m|60s|59s) +\[1, "two"\]', lines[3])
    assert "(too large)" in lines[1]
    assert [each["id"] for each in store("history", "mail", "--kind", "cancelled", "--json").json["outcomes"]] == [
        three
    ]


def test_history_goes_on_after_a_page(store: Store) -> None:
    ids = [store.end("mail", After(keep=60 + number, outcome=b"{}")) for number in range(3)]
    page = store("history", "mail", "-n", "2", "--json").json
    assert [each["id"] for each in page["outcomes"]] == [ids[2], ids[1]]
    done = store("history", "mail", "-n", "2")
    (cursor,) = re.findall(r"--after=(\S+)", done.err)
    assert cursor == page["after"]["mail"]
    page = store("history", "mail", "-n", "2", f"--after={cursor}", "--json").json
    assert ([each["id"] for each in page["outcomes"]], page["after"]) == ([ids[0]], {})
    assert store("history", "--after", cursor).code == 2


def test_history_of_all_queues_says_which_are_not_known(store: Store) -> None:
    kept = store.end("mail", After(keep=60, outcome=b"{}"))
    done = store("history")
    assert (done.code, done.out) == (0, "no outcome is kept in default\n")
    assert "queues that hold no job are not known" in done.err
    store.app.queue("mail").enqueue(1)
    document = store("history", "--json").json
    assert (document["queues"], [each["id"] for each in document["outcomes"]]) == (["default", "mail"], [kept])


def test_result_prints_the_value(store: Store) -> None:
    kept = store.end("default", After(keep=60, outcome=b'{"v":1,"value":{"pages":[1,2]}}'))
    assert json.loads(store("result", kept).out) == {"pages": [1, 2]}
    assert json.loads(store("result", f"default~{kept}").out) == {"pages": [1, 2]}
    document = store("result", kept, "-q", "default", "--json").json
    assert (document["kind"], document["attempt"], document["outcome"]["value"]) == ("done", 1, {"pages": [1, 2]})


def test_result_of_a_job_without_a_value_says_why(store: Store) -> None:
    kept = store.end("default", After(keep=60, outcome=b'{"v":1,"omitted":"300,000 bytes"}'))
    done = store("result", kept)
    assert (done.code, done.out) == (0, "")
    assert "its value was left out: 300,000 bytes" in done.err


def test_result_of_a_cancelled_job_ends_with_1(store: Store) -> None:
    kept = store.end("default", After(keep=60, outcome=b'{"v":1,"omitted":"it expired"}', kind="cancelled"))
    done = store("result", kept)
    assert (done.code, done.out) == (1, "")
    assert "was cancelled: it expired" in done.err
    done = store("result", kept, "--json")
    assert (done.code, json.loads(done.out)["kind"]) == (1, "cancelled")


def test_result_does_not_print_the_value_of_an_earlier_job_with_the_same_id(store: Store) -> None:
    # Given the outcome of an earlier job, and a later job with the same id
    kept = store.end("orders", After(keep=60, outcome=b'{"v":1,"value":"earlier"}'))
    later = store.app.tasks["ship"].options(id=kept).enqueue(7)
    done = store("result", kept)
    # Then the command is about the later job, before it runs and when it has failed
    assert (done.code, done.out) == (3, "")
    assert "is not done yet: it is ready" in done.err
    multiq.Worker(store.app, queues=["orders"], stop_when_empty=True).run()
    done = store("result", kept)
    assert (later.state(), done.code, done.out) == (State.BURIED, 1, "")


def test_result_does_not_guess_at_an_id_of_two_queues(store: Store) -> None:
    kept = store.end("orders", After(keep=60, outcome=b'{"v":1,"value":1}'))
    store.app.queue("mail").enqueue(1, id=kept)
    store.app.queue("orders").enqueue(1)
    done = store("result", kept)
    assert (done.code, done.out) == (2, "")
    assert f"queues mail, orders each have a job {kept}, or its outcome: say which one with -q QUEUE" in done.err
    assert store("result", kept, "-q", "orders").out == "1\n"


def test_result_of_a_failed_job_ends_with_1(store: Store) -> None:
    (failed,) = store.fail(("ship", 7))
    done = store("result", failed)
    assert (done.code, done.out) == (1, "")
    assert "failed: ValueError: order 7 is empty" in done.err
    assert f"multiq failed show {failed} has the traceback" in done.err
    assert '"type": "JobFailed"' in store("result", failed, "--json").err


def test_result_of_a_job_that_waits_or_is_unknown_ends_with_3(store: Store) -> None:
    waiting = store.app.queue("orders").enqueue(1)
    forgotten = store.end("mail")
    for job_id, words in ((waiting.id, "is not done yet: it is ready"), (forgotten, "no known queue has an outcome")):
        done = store("result", job_id)
        assert (done.code, done.out) == (3, "")
        assert words in done.err
    assert "queue mail has no outcome of job" in store("result", forgotten, "-q", "mail").err
    assert store("result", forgotten, "--json").error["type"] == "JobNotFound"


# --- real stores, and processes ---


@pytest.fixture
def run(url: str) -> Callable[..., Done]:
    """``multiq`` as a process of its own, on the store."""

    def run(*arguments: str, stdin: str | None = None) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "multiq", *arguments],
            env={**os.environ, "MULTIQ_URL": url},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


def bury(queue: str, number: int) -> list[str]:
    """Bury this many jobs of a task."""
    place = worker_app.queue(queue)
    place.enqueue_many([{"multiq": 1, "task": f"task-{each % 2}"} for each in range(number)])
    jobs = place.reserve_many(number, 5)
    for job in jobs:
        job.bury(f"no {job.id}")
    assert len(jobs) == number
    return [job.id for job in jobs]


@pytest.mark.few_rows
def test_failed_jobs_are_listed_retried_and_deleted_on_each_store(url: str, run: Callable[..., Done]) -> None:
    backend = worker_app.backend
    lists_all = bool(backend.declared.lists_jobs)
    # Given three failed jobs in two queues
    mail, orders = bury("mail", 2), bury("orders", 1)
    listed = run("failed", "list", "--json").json
    shown = [job["id"] for job in listed["jobs"]]
    assert shown == ([*mail, *orders] if lists_all else [mail[0], *orders])
    assert ("unlisted" in listed) is not lists_all
    assert run("failed", "show", mail[1]).code == 0
    # When one is retried by its id, and the others are deleted after a question
    assert run("failed", "retry", mail[1]).out == "retried 1 failed job\n"
    assert run("failed", "forget", "--dry-run", "--json").json["matched"] == 2
    refused = run("failed", "forget", stdin="n\n")
    assert refused.code == 130
    assert "Delete 2 failed jobs" in refused.err
    done = run("failed", "forget", stdin="y\n")
    assert (done.code, done.out) == (0, "deleted 2 failed jobs\n")
    # Then only the retried job is left
    assert worker_app.queue("mail").peek(mail[1]).state is State.READY
    assert (worker_app.queue("mail").stats().buried, worker_app.queue("orders").stats().buried) == (0, 0)


@pytest.mark.long
@pytest.mark.one_row
def test_a_filter_works_as_far_as_the_store_can_see(url: str, run: Callable[..., Done]) -> None:
    ids = bury("mail", 4)
    done = run("failed", "retry", "--task", "task-1", "--yes")
    if worker_app.backend.declared.lists_jobs:
        assert done.out == "retried 2 failed jobs\n"
        assert {worker_app.queue("mail").peek(each).state for each in ids[1::2]} == {State.READY}
    else:
        assert (done.code, done.out) == (5, "")
        assert "lists_jobs" in done.err
    for option, power in ((["--reason", f"no {ids[0]}"], "reasons"), (["--older", "0"], "memos")):
        done = run("failed", "list", *option, "--json")
        if worker_app.backend.capabilities.claim(power):
            assert done.code == 0
        else:
            assert (done.code, done.error["type"]) == (5, "Unsupported")
            assert power in done.error["message"]


@pytest.mark.few_rows
def test_a_failed_job_shows_its_traceback_on_each_store_that_keeps_it(url: str, run: Callable[..., Done]) -> None:
    if not worker_app.backend.capabilities.memos:
        pytest.skip("the backend keeps no details")
    with contextlib.closing(multiq.App(url)) as app:

        @app.task(max_attempts=1)
        def divide(by: int) -> float:
            return 1 / by

        failed = divide.enqueue(0)
        multiq.Worker(app, stop_when_empty=True).run()
    done = run("failed", "show", failed.id)
    assert "return 1 / by" in done.out
    assert run("failed", "prune", "--older", "0", "--yes").out == "deleted 1 failed job\n"
    assert run("failed", "list").out == "there are no such failed jobs\n"


@pytest.mark.one_row
def test_a_store_without_outcomes_says_so(url: str, run: Callable[..., Done]) -> None:
    if worker_app.backend.capabilities.outcomes:
        pytest.skip("the backend keeps outcomes")
    worker_app.backend.queues()
    for command in (["history"], ["history", "mail"], ["result", "1"]):
        done = run(*command)
        assert (done.code, done.out) == (5, "")
        assert "does not support outcomes" in done.err
