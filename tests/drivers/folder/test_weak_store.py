"""Every part of multiq on a weak store: jobs are run, and what the store cannot do is refused with its reason."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from multiq_folder import FolderBackend

import multiq
from multiq.backend import Ack, Gap, QueueStats, Release

if TYPE_CHECKING:
    from shell import Shell

UNSUPPORTED = 5


# --- the command line ---


@pytest.mark.parametrize(
    ("command", "power"),
    [
        ("jobs mail", "inspection"),
        ("jobs mail buried -n 5000", "inspection"),
        ("peek 7", "inspection"),
        ("peek 7 -q mail", "inspection"),
        ("delete 7 -q mail", "management"),
        ("reschedule 7 -q mail --delay 10", "management"),
        ("kick --id 7 -q mail", "management"),
        ("pause mail 60", "pausing"),
        ("resume mail", "pausing"),
        ("purge mail", "purging"),
        ("purge mail --yes", "purging"),
        ("down", "inspection"),
        ("up", "inspection"),
        ("restart", "inspection"),
        ("top --once --workers", "inspection"),
        ("schema check", "schema"),
        ("soak {url} --seconds 1", "management"),
        ("bench {url}", "purging"),
    ],
)
def test_a_command_without_its_power_is_refused_with_the_reason(shell: Shell, command: str, power: str) -> None:
    shell.app.queue("mail").enqueue(b"x")
    done = shell(*command.format(url=shell.url).split())
    assert (done.code, done.out) == (UNSUPPORTED, "")
    assert f"the folder backend does not support {power} (" in " ".join(done.err.split())
    assert shell.app.queue("mail").stats().ready == 1


def test_commands_of_the_minimum_work(shell: Shell) -> None:
    assert shell("enqueue", "-q", "mail", "--body", '"x"').code == 0
    assert shell("stats", "--json").json["queues"][0]["ready"] == 1
    shell.app.queue("mail").reserve().bury()
    assert shell("kick", "mail", "all", "--json").json["kicked"] == 1
    assert shell("top", "--once").code == 0
    assert shell("doctor", "--json").code in {0, 1}
    assert shell("backends", "folder").code == 0


def test_a_kick_does_not_rely_on_estimates(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a store whose counts are estimates, and lag behind
    estimates = msgspec.structs.replace(FolderBackend.declared, exact_counts=Gap("never", "it estimates"))
    zero: Any = {"ready": 0, "delayed": 0, "reserved": 0, "buried": 0, "paused_for": None}
    monkeypatch.setattr(FolderBackend, "declared", estimates)
    monkeypatch.setattr(FolderBackend, "stats", lambda _, queue: QueueStats(queue=queue, **zero))
    queue = shell.app.queue("mail")
    queue.enqueue_many([b"a", b"b"])
    for _ in range(2):
        queue.reserve().bury()
    # When all buried jobs are kicked, then none is left buried
    assert shell("kick", "mail", "all", "--json").json["kicked"] == 2


@pytest.mark.parametrize("command", ["stats", "top --once", "kick mail all", "doctor"])
def test_a_command_that_only_looks_makes_no_folder(shell: Shell, command: str) -> None:
    # Given a URL of a folder that is not there
    folder = shell.folder / "elsewhere"
    # When a command looks for jobs there, then it reports the missing store, and creates none
    done = shell("-c", f"folder:///{folder}", *command.split())
    assert (done.code, done.out) == (1, "")
    assert f"{folder} cannot be used" in done.err
    assert not folder.exists()


# --- options that the store cannot keep ---


def test_a_priority_is_refused_before_the_driver_is_called(shell: Shell) -> None:
    queue = shell.app.queue("mail")
    for call in (
        lambda: queue.enqueue(b"x", priority=5),
        lambda: queue.enqueue_many([b"x"], priority=5),
    ):
        with pytest.raises(multiq.Unsupported, match=r"priorities .*got priority 5: leave it out"):
            call()
    assert queue.stats().ready == 0


def test_a_delay_beyond_the_longest_is_refused_with_value_and_limit(shell: Shell) -> None:
    queue = shell.app.queue("mail")
    queue.enqueue(b"x", delay=900)
    for call in (
        lambda: queue.enqueue(b"x", delay=901),
        lambda: queue.enqueue_many([b"x"], delay=901),
        lambda: queue.reschedule("1", delay=901),
    ):
        with pytest.raises(multiq.errors.OptionInvalid, match="at most 900 seconds on the folder backend, got 901"):
            call()
    assert queue.stats().delayed == 1


def test_a_release_takes_no_priority_and_no_longer_delay(shell: Shell) -> None:
    queue = shell.app.queue("mail")
    queue.enqueue(b"x")
    job = queue.reserve()
    with pytest.raises(multiq.Unsupported, match="priorities"):
        job.release(priority=5)
    with pytest.raises(multiq.errors.OptionInvalid, match="at most 900 seconds"):
        job.release(1000)
    job.release(900)
    assert queue.stats().delayed == 1


def test_the_backoff_of_a_retry_is_cut_to_the_longest_delay(shell: Shell) -> None:
    policy = multiq.retry.RetryPolicy(backoff=lambda _: 86400.0)
    queue = shell.app.queue("mail")
    queue.enqueue(b"x")
    job = queue.reserve()
    verdict = policy.after_failure(job.lease, "no luck", longest=shell.app.backend.declared.longest_delay)
    assert isinstance(verdict, Release)
    assert verdict.delay == 900


# --- the worker ---

TASKS = """
import os
import signal
import time
import multiq

app = multiq.App()

def note(word):
    with open("diary", "a") as diary:
        diary.write(word + "\\n")

@app.task(ttr=2)
def done(number):
    note(f"done {number}")

@app.task(ttr=2, max_attempts=2, backoff=86400)
def fails():
    note("fails")
    raise ValueError("as it should")

@app.task(ttr=2, max_crashes=1)
def dies():
    note("dies")
    os.kill(os.getpid(), signal.SIGKILL)

@app.task(ttr=2, timeout=0.5, max_attempts=1)
def hangs():
    note("hangs")
    while True:
        try:
            time.sleep(60)
        except BaseException:  # also the notice that its time is over
            pass
"""


@pytest.mark.long
def test_a_worker_runs_jobs_to_their_end(shell: Shell) -> None:
    # Given jobs that succeed, that fail, that kill their process, and that run too long
    (shell.folder / "work.py").write_text(TASKS)
    put = "[done.enqueue(n) for n in range(20)], fails.enqueue(), dies.enqueue(), hangs.enqueue()"
    (shell.folder / "put.py").write_text(f"from work import *\n{put}\n")
    subprocess.run([sys.executable, "put.py"], cwd=shell.folder, env=shell.all_environment(), check=True, timeout=60)
    backend = shell.app.backend
    # When workers run until nothing is due; one may end before a job that was taken from a dead process is ready again
    for _ in range(5):
        ended = shell.run("worker", "work:app", "--stop-when-empty", "-p", "1")
        assert ended.code == 0, ended.err
        if not backend.stats("default").ready:
            break
    # Then each job has the expected end: done, delayed by the longest delay, buried by the limits
    diary = (shell.folder / "diary").read_text().split("\n")
    assert {f"done {number}" for number in range(20)} <= set(diary)
    stats = backend.stats("default")
    assert (stats.ready, stats.delayed, stats.reserved, stats.buried) == (0, 1, 0, 2), ended.err
    # And buried jobs run again once they are kicked
    assert backend.kick("default", 10) == 2
    with backend.consumer(["default"]) as consumer:
        leases = consumer.reserve(10, 0)
        assert consumer.settle([Ack(lease) for lease in leases]) == [None, None]


# --- the suite ---


@pytest.mark.long
def test_the_conformance_suite_certifies_it_by_its_url(shell: Shell) -> None:
    command, environment = [sys.executable, "-m", "multiq", "conformance", shell.url], shell.all_environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert " 0 broken" in last
    assert "without proof" not in last


@pytest.mark.long
def test_the_suite_proves_its_refusals_by_its_url(shell: Shell) -> None:
    done = shell.run("conformance", shell.url, "-k", "capabilities,ack,peek")
    assert done.code == 0, done.out + done.err
    assert "0 broken" in done.out
    assert "inspection" in done.out
