"""The suite as a driver's author uses it: in a test file outside of this repository, run by a separate pytest."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

HARNESS = """\
from multiq.conformance import ManualHarness, suite
from multiq.backend.memory import MemoryBackend


class AcmeHarness(ManualHarness):
    walks = 5

    def open(self):
        return MemoryBackend(name=self.prefix, clock=self.clock)

"""
ALL = HARNESS + "globals().update(suite(AcmeHarness))\n"
BY_HAND = (
    HARNESS
    + """\
from multiq.conformance.topics.ack import AckTests
from multiq.conformance.topics.capabilities import CapabilitiesTests


class TestAck(AckTests):
    harness_class = AcmeHarness


class TestCapabilities(CapabilitiesTests):
    harness_class = AcmeHarness
"""
)


def run_pytest(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with its strictest options, in a folder with one test file."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --strict-config\nfilterwarnings = error\n")
    (folder / "test_acme.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.long
def test_one_line_makes_the_suite_a_drivers(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, ALL, "-k", "Ack or Capabilities or Walk", "-rs")
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout


@pytest.mark.long
def test_a_refused_test_is_skipped_with_the_kind_of_gap_and_its_reason(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, ALL, "-k", "disconnect or whose_consumer_closed", "-rs")
    assert "refused for lack of disconnect_ends_lease: never: there is no connection that could drop" in done.stdout


@pytest.mark.long
def test_a_topic_that_was_left_out_leaves_a_claim_unproved(tmp_path: Path) -> None:
    # Given a driver's test file that has two topics only
    done = run_pytest(tmp_path, BY_HAND)
    # Then its tests pass, except the one that reports the missing topics
    assert done.returncode == 1
    assert "1 failed" in done.stdout
    assert "test_every_claimed_power_has_its_tests_in_this_run" in done.stdout
    assert "lists_jobs" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("selection", ["test_an_acked_job_is_gone", "every_claimed_power"])
def test_a_selection_of_tests_does_not_count_as_leaving_out_topics(tmp_path: Path, selection: str) -> None:
    done = run_pytest(tmp_path, ALL, "-k", selection)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_a_failure_shows_the_values_that_differ(tmp_path: Path) -> None:
    text = ALL.replace("MemoryBackend(name", 'PLANTED["order as text"].open(name').replace(
        "from multiq.backend.memory import MemoryBackend", "from multiq.conformance import PLANTED"
    )
    done = run_pytest(tmp_path, text, "-k", "past_the_tenth")
    assert "1 failed" in done.stdout
    assert "At index 1 diff: b'10' != b'2'" in done.stdout
