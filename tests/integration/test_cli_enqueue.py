"""``multiq enqueue``."""

from __future__ import annotations

import datetime as dt
import sys
from typing import TYPE_CHECKING

import pytest
from proxy import CutReply, Proxy
from servers.process import HOST
from servers.redis import RedisServer

from multiq import open_backend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shell import Shell

    from multiq import JobInfo


@pytest.fixture
def shell(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A shell in whose folder each test's app can be imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield shell
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def only_job(shell: Shell, queue: str) -> JobInfo:
    (job,) = [job for state in ("ready", "delayed") for job in shell.app.queue(queue).jobs(state)]
    return job


def test_the_documented_form_enqueues_a_task(shell: Shell) -> None:
    done = shell("enqueue", "shop.tasks:app", "mail.reset", "--args", '["ann@example.com"]')
    assert done.code == 0
    job = only_job(shell, "mail")
    assert done.out == job.id + "\n"
    assert done.err == "enqueued in queue mail, due now\n"
    assert job.value == {"multiq": 1, "task": "mail.reset", "args": ["ann@example.com"]}


def test_all_options_reach_the_job(shell: Shell) -> None:
    document = shell(
        "enqueue", "shop.tasks:app", "mail.reset", "--args", '["a"]', "--kwargs", '{"name": "Ann"}', "-q", "other",
        "--delay", "5m", "--priority", "7", "--ttr", "30", "--json",
    ).json  # fmt: skip
    job = only_job(shell, "other")
    assert document == {"queue": "other", "id": job.id, "task": "mail.reset", "due_in": 300.0, "new": True}
    assert (job.priority, job.ttr, job.value["kwargs"]) == (7, 30.0, {"name": "Ann"})
    assert 290 < (job.due_in or 0) <= 300


def test_a_point_in_time_may_have_a_zone(shell: Shell) -> None:
    moment = dt.datetime.now(dt.timezone(dt.timedelta(hours=-5))) + dt.timedelta(hours=1)
    assert shell("enqueue", "-q", "a", "--body", "1", "--at", moment.isoformat()).code == 0
    assert 3500 < (only_job(shell, "a").due_in or 0) <= 3600


def test_a_point_in_time_in_the_past_means_now(shell: Shell) -> None:
    assert shell("enqueue", "-q", "a", "--body", "1", "--at", "2001-01-01T00:00Z").err.endswith("due now\n")
    assert only_job(shell, "a").state == "ready"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), ("250ms", 0.25), ("5m", 300), ("1h30m", 5400), ("2d", 172800), ("1H", 3600), ("0", 0)],
)
def test_durations_are_seconds_or_have_units(shell: Shell, text: str, seconds: float) -> None:
    document = shell("enqueue", "-q", "a", "--body", "1", "--delay", text, "--json").json
    assert document["due_in"] == seconds


@pytest.mark.parametrize("body", ['{"any": "json"}', "1.0", "12345678901234567890123", "null", '"grüße"', "[]"])
def test_a_json_body_is_stored_as_it_was_written(shell: Shell, body: str) -> None:
    assert shell("enqueue", "-q", "raw", "--body", body).code == 0
    assert only_job(shell, "raw").body == body.encode()


def test_a_body_without_a_queue_goes_to_default(shell: Shell) -> None:
    assert shell("enqueue", "--body", "1", "--json").json["queue"] == "default"


def test_a_json_body_from_standard_input(shell: Shell) -> None:
    assert shell("enqueue", "-q", "raw", "--body", "-", stdin='{"a": 1}\n').code == 0
    assert only_job(shell, "raw").body == b'{"a": 1}'


def test_bytes_from_standard_input_are_stored_to_the_byte(shell: Shell) -> None:
    body = bytes(range(256)) + b"\r\n"
    assert shell("enqueue", "-q", "raw", "--bytes", "-", stdin=body).code == 0
    assert only_job(shell, "raw").body == body


def test_bytes_may_come_from_the_command_line_and_may_be_empty(shell: Shell) -> None:
    assert shell("enqueue", "-q", "raw", "--bytes", "not json").code == 0
    assert only_job(shell, "raw").body == b"not json"
    assert shell("enqueue", "-q", "empty", "--bytes", "").code == 0
    assert only_job(shell, "empty").body == b""


def test_a_chosen_connection_wins_over_the_apps_own(shell: Shell, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    for arguments in (["-c", other, "enqueue"], ["enqueue", "-c", other]):
        assert shell(*arguments, "shop.tasks:app", "mail.reset", "--args", '["a"]').code == 0
    assert shell.everything() == []
    assert shell("stats", "-c", other, "--json").json["queues"][0]["ready"] == 2


def test_a_connection_option_that_comes_after_the_apps_first_use_is_an_error(shell: Shell) -> None:
    (shell.folder / "eager.py").write_text("import multiq\napp = multiq.App()\napp.queue().stats()\n")
    done = shell.run("enqueue", "eager:app", "task", "-c", "memory://")
    assert done.code == 2
    assert "-c comes too late" in done.err


def test_a_connection_after_the_command_wins_over_one_before(shell: Shell, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    assert shell("-c", "memory://", "enqueue", "-c", other, "--body", "1").code == 0
    assert shell("stats", "-c", other, "--json").json["queues"][0]["ready"] == 1


def test_a_configured_connection_is_chosen_by_name(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "multiq.toml").write_text(f'[connections]\nspare = "sqlite:///{tmp_path}/spare.db"')
    assert shell("enqueue", "-c", "spare", "--body", "1").code == 0
    assert shell.everything() == []
    assert shell("stats", "-c", "spare", "--json").json["queues"][0]["ready"] == 1


REFUSED = {
    "unknown task": (3, ["shop.tasks:app", "mail.rest"], "no task 'mail.rest' in this app; registered: mail.reset"),
    "too few arguments": (2, ["shop.tasks:app", "mail.reset"], "missing a required argument: 'address'"),
    "unknown argument": (
        2,
        ["shop.tasks:app", "mail.reset", "--args", '["a"]', "--kwargs", '{"nmae": 1}'],
        "unexpected keyword argument 'nmae'",
    ),
    "args that are no JSON": (2, ["shop.tasks:app", "mail.reset", "--args", "a@x.org"], "must be JSON like"),
    "args that are no list": (2, ["shop.tasks:app", "mail.reset", "--args", '"a"'], "write it like '[\"ann@"),
    "kwargs that are no object": (2, ["shop.tasks:app", "mail.reset", "--kwargs", "[]"], "write it like '{\"name\""),
    "NaN": (2, ["shop.tasks:app", "mail.reset", "--args", "[NaN]"], "JSON has no NaN"),
    "infinity by overflow": (2, ["shop.tasks:app", "mail.reset", "--args", "[1e999]"], "args[0] is inf"),
    "half a surrogate": (2, ["shop.tasks:app", "mail.reset", "--args", '["\\ud800"]'], "cannot be written as JSON"),
    "no module": (2, ["shop.takss:app", "mail.reset"], "there is no module 'shop.takss'"),
    "no package": (2, ["shp.tasks:app", "mail.reset"], "there is no module 'shp'"),
    "no attribute": (2, ["shop.tasks:ap", "mail.reset"], "has no 'ap'; the apps in it: app, empty"),
    "not an app": (2, ["shop.tasks:number", "mail.reset"], "is of type int, not a multiq.App"),
    "no colon": (2, ["shop.tasks", "mail.reset"], "write module:attribute, like shop.tasks:app"),
    "no colon, another name": (2, ["mails", "mail.reset"], "write module:attribute, like mails:app"),
    "an app alone": (2, ["shop.tasks:app"], "say what to enqueue"),
    "nothing": (2, [], "say what to enqueue"),
    "a task and a body": (2, ["shop.tasks:app", "mail.reset", "--body", "1"], "are for jobs without one"),
    "two bodies": (2, ["--body", "1", "--bytes", "1"], "one of --body and --bytes"),
    "a body that is no JSON": (2, ["--body", "{a: 1}"], "must be JSON like"),
    "an empty body": (2, ["--body", ""], "must be JSON like"),
    "a body over the limit": (2, ["--body", '"' + "x" * 300_000 + '"'], "300,002 bytes is over the limit"),
    "a name with a line end": (2, ["-q", "a\r\nput 0 0 60 1", "--body", "1"], "a queue name must have"),
    "an empty name": (2, ["-q", "", "--body", "1"], "a queue name must have"),
    "a negative delay": (2, ["--body", "1", "--delay", "-5"], "must be from 0 seconds to a century, got '-5'"),
    "a delay that is none": (2, ["--body", "1", "--delay", "soon"], "must be seconds (90, 1.5), or like 250ms, 5m"),
    "a delay of NaN": (2, ["--body", "1", "--delay", "nan"], "to a century, got 'nan'"),
    "an endless delay": (2, ["--body", "1", "--delay", "inf"], "to a century, got 'inf'"),
    "a delay of a millennium": (2, ["--body", "1", "--delay", "365000d"], "to a century, got"),
    "a moment without a zone": (2, ["--body", "1", "--at", "2027-01-31T09:00"], "must have a time zone"),
    "a moment that is none": (2, ["--body", "1", "--at", "tomorrow"], "must be an ISO 8601 time like"),
    "two due times": (2, ["--body", "1", "--at", "2099-01-31T09:00Z", "--delay", "1"], "must not both be given"),
    "a negative priority": (2, ["--body", "1", "--priority", "-1"], "priority must be a whole number from 0 (first)"),
    "a priority out of range": (2, ["--body", "1", "--priority", "4294967296"], "4294967295 (last), got 4294967296"),
    "a priority that is none": (2, ["--body", "1", "--priority", "high"], "'high' is not a valid int"),
    "a ttr below a second": (2, ["--body", "1", "--ttr", "0.5"], "ttr must be 1 second or more, got 0.5"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_enqueue_is_refused_with_advice_and_changes_nothing(shell: Shell, case: str) -> None:
    code, arguments, says = REFUSED[case]
    before = shell.everything()
    done = shell("enqueue", *arguments)
    assert (done.code, done.out) == (code, "")
    assert says in done.err
    assert len(done.err) < 24 * 80  # one screen
    assert "Traceback" not in done.err
    assert shell("enqueue", *arguments, "--json").error["message"]
    assert shell.everything() == before


@pytest.mark.one_row
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def", "SyntaxError"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("raise SystemExit(3)", "it called sys.exit: 3"),
    ],
)
def test_a_module_that_fails_is_reported_with_its_error_and_line(shell: Shell, code: str, says: str) -> None:
    (shell.folder / "broken.py").write_text(f"x = 1\n{code}\n")
    done = shell.run("enqueue", "broken:app", "task")
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err
    if "SystemExit" not in code and "import" not in code:
        assert "broken.py, line 2" in done.err


# --- ids that the caller chooses, and uncertain enqueues ---


def test_an_id_chosen_by_the_caller_makes_a_second_enqueue_harmless(shell: Shell) -> None:
    for text in ("first", "second"):
        assert shell("enqueue", "--bytes", text, "--id", "dump:2027-01-31").out == "dump:2027-01-31\n"
    task = "shop.tasks:app", "mail.reset", "--args", '["a@x"]'
    assert shell("enqueue", *task, "--id", "m", "--json").json["id"] == "m"
    assert shell("stats", "--json").json["queues"][0]["ready"] == 1
    assert "first" in shell("peek", "dump:2027-01-31").out


def test_an_invalid_id_is_refused(shell: Shell) -> None:
    done = shell.run("enqueue", "--bytes", "x", "--id", "")
    assert done.code == 2
    assert done.err.startswith("error: id='' must be one word of ASCII, of 1 to 200 characters")


def test_an_uncertain_enqueue_says_so_and_how_it_is_repeated(shell: Shell) -> None:
    # Given a server whose replies to scripts are all lost
    with RedisServer() as server, Proxy((HOST, server.port)) as proxy:
        far, near = f"redis://{HOST}:{proxy.port}", f"redis://{HOST}:{server.port}"
        command = "enqueue", "-q", "raw", "--bytes", "x", "--id", "it's-7"
        assert shell("enqueue", "-q", "raw", "--bytes", "before", MULTIQ_URL=near).code == 0
        proxy.arm(CutReply(after=b"EVALSHA", times=1000))
        # When a job is enqueued, then the command reports that it may be enqueued or not, with an exit code of its own
        done = shell.run(*command, MULTIQ_URL=far)
        assert (done.code, done.out) == (7, "")
        assert "they may or may not be there" in done.err
        assert "repeat()" not in done.err
        assert done.err.endswith("the same command with --id 'it'\"'\"'s-7' adds nothing if the job is there\n")
        done = shell.run(*command, "--json", MULTIQ_URL=far)
        assert done.error["type"] == "EnqueueUncertain"
        assert done.error["ids"] == ["it's-7"]
        # And the same command again adds nothing to what is there
        proxy.disarm()
        assert shell(*command, MULTIQ_URL=far).out == "it's-7\n"
        assert shell("stats", "raw", "--json", MULTIQ_URL=near).json["queues"][0]["ready"] == 2


def test_a_job_whose_unique_key_is_taken_is_not_said_to_be_enqueued(shell: Shell) -> None:
    (shell.folder / "unique.py").write_text(
        "import multiq\n"
        "app = multiq.App()\n"
        "@app.task(unique=multiq.Unique(), limits=multiq.Limit('api', key='{number}', slots=0))\n"
        "def call(number): ...\n"
    )
    command = ("enqueue", "unique:app", "call", "--args", "[1]")
    first = shell.run(*command)
    assert first.code == 0
    again = shell.run(*command)
    assert (again.code, again.out) == (0, first.out)
    assert again.err == "no job was added: this job of queue default has the same unique key\n"
    document = shell.run(*command, "--json").json
    assert document == {"queue": "default", "id": first.out.strip(), "task": "call", "due_in": None, "new": False}
    # A job that waits at a limit says so, as soon as a reserve has looked at it
    with open_backend(shell.url) as backend, backend.consumer(["default"]) as consumer:
        assert consumer.reserve(1, 0) == []
    assert "ready, waits for limit " in shell.run("peek", first.out.strip(), "-q", "default").out
    assert " limit " in shell.run("jobs", "default").out.splitlines()[1]
