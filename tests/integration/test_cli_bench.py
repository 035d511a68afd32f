"""``multiq bench`` as a whole: real servers, all workloads, bugs that make the run fail, and that the run leaves
nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from multiq.bench import report
from multiq.bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from pathlib import Path

    from shell import Shell

pytestmark = pytest.mark.timeout(180)


def bench(shell: Shell, *arguments: str) -> tuple[int, str, report.Report]:
    """A quick run of one repeat: its exit code, what it printed, and the report that it wrote."""
    file = shell.folder / "report.json"
    done = shell("bench", *arguments, "--quick", "--repeats", "1", "--json", str(file))
    assert file.exists(), done
    return done.code, done.out, report.read(file)


@pytest.mark.long
def test_all_work_is_done_and_accounted_for(shell: Shell) -> None:
    code, out, done = bench(shell, "sqlite", "memory")
    assert code == 0, out
    assert [workload.name for workload in done.workloads] == [workload.name for workload in WORKLOADS]
    for result in done.results:
        where = result.workload, result.variant, result.target
        headline = next(workload for workload in WORKLOADS if workload.name == result.workload).metrics[0].name
        if result.skipped is not None:
            assert where == ("recovery", "", "memory")
            continue
        assert result.samples, where
        for sample in result.samples:
            value = sample.metrics[headline]
            assert value is not None, where
            assert value > 0, where
            assert sample.verification.violations == []
            assert sample.verification.finished == sample.verification.enqueued > 0, where
    assert {(result.workload, result.target) for result in done.warm_ups} == {
        ("warm-up", "sqlite"),
        ("warm-up", "memory"),
    }
    by_name = {(result.workload, result.target): result for result in done.results}
    (recovered,) = by_name["recovery", "sqlite"].samples
    assert recovered.verification.explained >= 1  # the job that ran when its process was killed
    (failed,) = by_name["failures", "memory"].samples
    assert failed.verification.explained == failed.verification.runs - failed.verification.enqueued > 0
    (latency,) = by_name["latency", "sqlite"].samples
    assert set(latency.histograms) == {"latency"}


@pytest.mark.long
def test_private_servers_and_a_users_server_run_side_by_side(shell: Shell) -> None:
    code, out, done = bench(shell, "redis", shell.url, "-w", "enqueue-one,drain", "-w", "settle")
    assert code == 0, out
    redis, sqlite = done.targets
    assert (redis.is_ours, sqlite.is_ours) == (True, False)
    assert redis.durability.survives == "power loss"
    drain = next(result for result in done.results if (result.workload, result.target) == ("drain", redis.name))
    assert drain.baseline is not None
    (sample,) = drain.samples
    assert sample.metrics["commands"] is not None
    assert sample.metrics["client CPU"] is not None
    assert sample.timeline
    assert shell.app.backend.queues() == []  # the queues that the bench made in the user's store are gone


@pytest.mark.long
@pytest.mark.parametrize(
    ("bug", "workload", "kind"),
    [
        ("half-a-batch", "enqueue-bulk", "lost"),
        pytest.param("handed-out-twice", "contention", "doubled", marks=pytest.mark.long),
        pytest.param("early", "delayed", "early", marks=pytest.mark.long),
        pytest.param("priority-reversed", "priorities", "out of order", marks=pytest.mark.long),
    ],
)
def test_a_backend_with_a_bug_turns_the_run_red(shell: Shell, bug: str, workload: str, kind: str) -> None:
    code, out, done = bench(shell, "memory", f"planted:{bug}", "-w", workload)
    assert code == 6
    ((result, violation),) = done.violations
    assert (result.target, result.workload, violation.kind) == (f"planted:{bug}", workload, kind)
    assert violation.count > 0
    lines = [line for line in out.splitlines() if kind in line and f"planted:{bug}" in line]
    assert lines, out


@pytest.mark.long
def test_a_report_is_set_beside_an_earlier_one(shell: Shell) -> None:
    _, _, done = bench(shell, "memory", "-w", "enqueue-one")
    old = shell.folder / "old.json"
    report.write(done, old)
    again = shell("bench", "memory", "-w", "enqueue-one", "--quick", "--repeats", "1", "--compare", str(old))
    assert again.code == 7, again  # one repeat is too few for a verdict
    assert "cannot tell for " in again.out.splitlines()[-1]
    assert "no difference" not in again.out.splitlines()[-1].partition(":")[0]
    assert "1 repeat: with fewer than 5 only large changes show" in again.err


@pytest.mark.long
def test_a_report_compared_with_itself_shows_no_difference(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, done = bench(shell, "memory", "-w", "settle")
    (first, *_) = done.results[0].samples  # other samples may differ by chance
    settled = structs.replace(done.results[0], samples=[first] * 5)
    five = structs.replace(done, repeats=5, results=[settled])
    report.write(five, shell.folder / "old.json")
    monkeypatch.setattr("multiq.bench.runner.run", lambda *_: five)
    same = shell("bench", "memory", "-w", "settle", "--quick", "--compare", str(shell.folder / "old.json"))
    assert same.code == 0, same
    assert same.out.splitlines()[-1].startswith("no difference: ")


@pytest.mark.long
def test_runs_with_different_work_are_not_compared(shell: Shell) -> None:
    _, _, done = bench(shell, "memory", "-w", "enqueue-one")
    old = shell.folder / "old.json"
    report.write(done, old)
    fewer = shell("bench", "memory", "-w", "settle", "--quick", "--repeats", "1", "--compare", str(old))
    assert fewer.code != 0
    assert "compared" in fewer.err


def test_json_output_is_alone_on_standard_output(shell: Shell) -> None:
    done = shell("bench", "memory", "--quick", "--repeats", "1", "-w", "settle", "--json", "-")
    assert done.code == 0
    assert done.json["contestants"][0]["name"] == "memory"
    assert "this takes about" in done.err


@pytest.mark.long
def test_a_page_is_written(shell: Shell) -> None:
    page = shell.folder / "report.html"
    done = shell("bench", "memory", "--quick", "--repeats", "1", "-w", "settle", "--html", str(page))
    assert done.code == 0
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_workloads_are_listed(shell: Shell) -> None:
    done = shell("bench", "--list")
    assert done.code == 0
    assert all(workload.name in done.out for workload in WORKLOADS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name what to run"),
        (("sqlite", "-w", "drian"), "there is no workload 'drian'; there are: enqueue-one,"),
        (("sqlite", "--repeats", "0"), "--repeats"),
        (("nothing",), "nothing"),
    ],
)
def test_a_run_that_cannot_start_is_reported(shell: Shell, arguments: tuple[str, ...], message: str) -> None:
    done = shell("bench", *arguments)
    assert done.code == 2
    assert message in done.err


def test_without_its_extra_it_says_what_to_install(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdrh", None)
    done = shell("bench", "sqlite")
    assert done.code == 2
    assert "pip install 'multiq[bench]'" in done.err


@pytest.mark.long
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "multiq", "bench", "redis", "sqlite", "--quick"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    try:
        give_up_at = time.monotonic() + 30
        while not list(tmp_path.glob("multiq-bench-*/0/*")) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"stopped" in told
    assert list(tmp_path.iterdir()) == []
