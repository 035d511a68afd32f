"""The suite's runner: it reports what was kept, refused and broken, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest

from multiq.backend import State
from multiq.backend.capabilities import Gap
from multiq.backend.memory import MemoryBackend
from multiq.conformance import ConformanceNotInstalled, ManualHarness, Report, Row, UrlHarness, run
from multiq.conformance.paragraphs import PARAGRAPHS
from multiq.conformance.planted import PLANTED
from multiq.conformance.runner import ConformanceBroken, run_harness
from multiq.errors import BackendNotInstalled, MultiqError, OptionInvalid, UrlInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from multiq.backend.capabilities import Capabilities


class MemoryHarness(ManualHarness):
    walks = 10
    rounds = 5

    def open(self) -> MemoryBackend:
        return MemoryBackend(name=self.prefix, clock=self.clock)


class BoastfulBackend(MemoryBackend):
    """Declares a capability that it does not have."""

    declared: ClassVar[Capabilities] = msgspec.structs.replace(MemoryBackend.declared, transactional_enqueue=True)


class BoastfulHarness(ManualHarness):
    def open(self) -> BoastfulBackend:
        return BoastfulBackend(name=self.prefix, clock=self.clock)


class ModestHarness(MemoryHarness):
    """An installation that lacks what the driver claims."""

    gaps: Mapping[str, Gap] = {"waits_in_server": Gap("cannot today", "a proxy in between cuts off waiting clients")}


@pytest.fixture(scope="module")
def whole() -> Report:
    """The report of the whole suite on a backend without bugs."""
    return run_harness(MemoryHarness)


# --- reports ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_honest_backend_keeps_all_that_it_claims(whole: Report) -> None:
    assert whole.ok
    assert (whole.backend, whole.target, whole.is_whole) == ("memory", "MemoryHarness", True)
    assert whole.failed == []
    assert whole.unproved == ()
    assert len(whole.kept) > 300


@pytest.mark.long
def test_every_paragraph_is_reported(whole: Report) -> None:
    paragraphs = {paragraph.number: paragraph for paragraph in whole.paragraphs()}
    assert list(paragraphs) == list(PARAGRAPHS)
    assert paragraphs["4.3"].verdict == "kept"
    assert paragraphs["11.7"].verdict == "refused"
    assert paragraphs["11.4"].verdict == "kept in part"
    assert [number for number, paragraph in paragraphs.items() if paragraph.verdict == "broken"] == []


@pytest.mark.long
def test_a_refusal_says_what_kind_of_gap_it_is_and_why(whole: Report) -> None:
    refused = {row.power: (row.gap, row.reason) for row in whole.refused}
    assert refused["persistent"] == ("never", "the jobs end with the process")
    (paragraph,) = (paragraph for paragraph in whole.paragraphs() if paragraph.number == "2.7")
    assert paragraph.refused == ("transactional_enqueue: never: there is no database whose transaction it could join",)


@pytest.mark.long
def test_a_report_is_json_and_markdown(whole: Report) -> None:
    document = json.loads(whole.to_json())
    assert document["ok"] is True
    assert len(document["rows"]) == len(whole.rows)
    assert {paragraph["number"] for paragraph in document["paragraphs"]} == set(PARAGRAPHS)
    lines = whole.markdown().splitlines()
    assert lines[0].startswith("| paragraph | promise |")
    assert sum(line.startswith("| 3.4 |") for line in lines) == 1
    assert "- `shared`, never: the jobs live in one process's memory" in lines


def test_a_broken_promise_is_reported_with_its_reason() -> None:
    # Given a backend with a bug
    report = run_harness(PLANTED["order as text"].harness(), select=["3.4"], walks=0)
    # Then the paragraph and the whole verdict are *broken*
    assert not report.ok
    assert {paragraph.verdict for paragraph in report.paragraphs() if paragraph.number == "3.4"} == {"broken"}
    row = next(row for row in report.failed if row.name.endswith("past_the_tenth"))
    # And the failure has the values that differ
    assert "b'10'" in (row.reason or "")
    assert "test_jobs_of_one_priority" in (row.detail or "")
    assert "past the tenth" in report.markdown()


@pytest.mark.long
def test_a_claim_that_the_harness_has_no_hook_for_is_not_tried() -> None:
    # Given a declared capability, and a harness without the connection that its tests need
    report = run_harness(BoastfulHarness, select=["transaction"])
    # Then the capability is neither kept nor broken
    assert report.ok
    assert (report.failed, report.unproved) == ([], ())
    assert {row.outcome for row in report.rows if row.name.startswith("test_the_commit")} == {"not tried"}
    assert any("override BoastfulHarness.transaction()" in why for why in report.why_not_tried())
    assert f"{len(report.not_tried)} not tried" in report.summary()
    assert "Not tried:" in report.markdown()


@pytest.mark.long
def test_without_a_proxy_lost_replies_are_not_tried(whole: Report) -> None:
    verdicts = {paragraph.number: paragraph.verdict for paragraph in whole.paragraphs()}
    assert verdicts["11.9"] == verdicts["11.10"] == "not tried"
    assert {row.topic for row in whole.not_tried} == {"LostReplies", "Hangs"}


@pytest.mark.long
def test_a_harness_can_lack_what_its_driver_claims() -> None:
    report = run_harness(ModestHarness, select=["an_idle_consumer"])
    assert [(row.power, row.gap, row.reason) for row in report.refused] == [
        ("waits_in_server", "cannot today", "a proxy in between cuts off waiting clients")
    ]
    assert report.ok


def test_a_report_without_rows_is_not_a_success() -> None:
    report = Report(backend="x", target="x", rows=(), unproved=(), is_whole=True, seconds=0)
    assert not report.ok


def test_an_unproved_claim_is_not_a_success() -> None:
    row = Row(topic="Ack", name="test_x", paragraphs=("5.1",), powers=(), outcome="kept", seconds=0)
    report = Report(backend="x", target="x", rows=(row,), unproved=("reasons",), is_whole=True, seconds=0)
    assert not report.ok
    assert "claimed without proof: reasons" in report.summary()


# --- choosing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "topics"),
    [
        ("kick-job", {"KickJob"}),
        pytest.param("ack", {"Ack"}, marks=pytest.mark.long),
        pytest.param("kick_job", {"KickJob"}, marks=pytest.mark.long),
        pytest.param("KickJob", {"KickJob"}, marks=pytest.mark.long),
    ],
)
def test_a_topic_can_be_selected(word: str, topics: set[str]) -> None:
    report = run_harness(MemoryHarness, select=[word])
    assert {row.topic for row in report.rows} == topics
    assert not report.is_whole


@pytest.mark.long
def test_a_paragraph_or_a_section_can_be_selected() -> None:
    paragraph = run_harness(MemoryHarness, select=["6.4"], walks=0)
    assert all("6.4" in row.paragraphs for row in paragraph.rows)
    section = run_harness(MemoryHarness, select=["6"], walks=0)
    assert {number for row in section.rows for number in row.paragraphs} >= {"6.1", "6.2", "6.3", "6.4"}
    assert len(section.rows) > len(paragraph.rows)


@pytest.mark.long
def test_a_selection_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(OptionInvalid, match="matches no test"):
        run_harness(MemoryHarness, select=["no such topic"])


@pytest.mark.long
def test_walks_can_be_chosen_and_left_out() -> None:
    assert [row.outcome for row in run_harness(MemoryHarness, select=["walk"], walks=3).rows] == ["kept"]
    with pytest.raises(OptionInvalid):
        run_harness(MemoryHarness, select=["walk"], walks=0)
    with pytest.raises(OptionInvalid, match="walks must be 0 or more"):
        run_harness(MemoryHarness, walks=-1)


@pytest.mark.long
def test_progress_is_reported_test_by_test() -> None:
    told: list[tuple[str, int, int]] = []
    report = run_harness(
        MemoryHarness, select=["ack"], progress=lambda row, done, total: told.append((row.name, done, total))
    )
    names = [row.name for row in report.rows]
    assert told == [(name, done, len(names)) for done, name in enumerate(names, 1)]


# --- by a URL --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_url_is_enough() -> None:
    report = run("memory://", select=["settle", "kick_job"], walks=0)
    assert report.ok
    assert (report.backend, report.target) == ("memory", "memory://")


@pytest.mark.long
def test_a_shared_store_is_used_in_queues_of_ones_own_and_left_clean() -> None:
    # Given a store that another program uses
    with MemoryBackend(name="runner-shared") as backend:
        backend.pause("theirs", 3600)
        # When topics that leave many jobs behind are run on this store
        assert run("memory://runner-shared", select=["queues", "paused_queue"]).ok
        # Then the store has the same jobs as before
        assert backend.queues() == ["theirs"]


def test_a_password_is_masked_and_a_wrong_url_is_an_error() -> None:
    with pytest.raises(BackendNotInstalled) as missing:
        run("nosuch://user:secret@host")
    assert "secret" not in str(missing.value)
    with pytest.raises(UrlInvalid):
        run("no url")


def test_a_backend_that_does_not_answer_is_reported_once_and_at_once(tmp_path: Path) -> None:
    with pytest.raises(MultiqError):
        run(f"sqlite:///{tmp_path}/no/such/folder/jobs.db")


def test_two_objects_for_one_private_url_are_one_store() -> None:
    harness = UrlHarness("memory://")
    one, other = harness.open(), harness.open()
    from multiq.backend import NewJob

    one.enqueue("q", [NewJob(b"x", "id")])
    assert other.peek("q", "id").state is State.READY
    harness.close()


# --- outside of this repository --------------------------------------------------------------------------

_RUN = """\
from multiq.conformance import run
report = run("memory://", select=["ack", "walk"], walks=1)
print(report.summary())
"""


@pytest.mark.long
def test_the_suite_runs_in_any_folder_and_leaves_nothing_behind(tmp_path: Path) -> None:
    # Given a folder with a project's own settings for pytest, broken ones among them
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('must not be imported')\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    # When the suite is run there
    environment = os.environ | {"PYTEST_ADDOPTS": "--no-such-option", "PYTEST_PLUGINS": "no_such_plugin"}
    command = [sys.executable, "-c", _RUN]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    # Then it runs, prints only the report, and leaves no file
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("memory: 6 kept")
    assert done.stderr == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == before


_FAILING = """\
from multiq.conformance.planted import PLANTED
from multiq.conformance.runner import ConformanceBroken, run_harness
report = run_harness(PLANTED["order as text"].harness(), select=["past_the_tenth"])
print(report.failed[0].reason)
"""


@pytest.mark.long
def test_a_failure_shows_the_values_outside_of_a_test_run_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FAILING]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    assert "b'10'" in done.stdout


_INTERRUPTED = """\
import os, signal, sys
from multiq.conformance import run
from multiq.backend.memory import MemoryBackend

def interrupt(row, done, total):
    if done == 2:
        os.kill(os.getpid(), signal.SIGINT)

backend = MemoryBackend(name="interrupted")
try:
    run("memory://interrupted", select=["pause"], progress=interrupt)
except KeyboardInterrupt:
    print("interrupted; left:", backend.queues())
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGINT"), reason="this system has no SIGINT")
def test_an_interrupt_comes_through_and_leaves_no_queue(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _INTERRUPTED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "interrupted; left: []\n"
    assert "Traceback" not in done.stderr


_MISSING = """\
import sys
sys.modules["pytest"] = None  # as if it were not installed
import multiq.conformance as conformance
try:
    conformance.run("memory://") if "{name}" == "run" else conformance.{name}
except conformance.ConformanceNotInstalled as exc:
    print(exc)
"""


@pytest.mark.parametrize("name", ["run", "suite"])
def test_a_missing_extra_says_how_to_install_it(name: str) -> None:
    code = _MISSING.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert "pip install 'multiq[conformance]'" in done.stdout
    assert "needs pytest" in done.stdout
    assert issubclass(ConformanceNotInstalled, MultiqError)


def test_a_harness_does_not_need_pytest() -> None:
    code = textwrap.dedent("""\
        import sys
        from multiq.conformance import Harness, ManualHarness, UrlHarness
        print("pytest" in sys.modules)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "False\n"


@pytest.mark.long
def test_a_suite_that_cannot_be_imported_is_reported_as_broken_and_not_as_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("multiq.conformance.runner._FILE", "raise RuntimeError('a topic is missing')")
    with pytest.raises(ConformanceBroken, match="a topic is missing"):
        run_harness(MemoryHarness)
