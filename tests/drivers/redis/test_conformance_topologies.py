"""The conformance suite over TLS, on a Sentinel's primary and on a cluster: ``conformance_*.py``, all at once.

It is in real time, which means that it mostly waits: three of them together take no longer than one. A single one:
``pytest tests/drivers/redis/conformance_cluster.py``. ``make test`` has a few topics, ``make test-long`` all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from servers.process import require

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
TOPOLOGIES = ("tls", "sentinel", "cluster")
#: one of each kind: what is stored, which consumer has it, what is found again, what a connection's end does
SOME = "TestAck or TestPeek or TestQueues or TestAbandon"
PATIENCE = 600  # seconds; all topics take about 140
SHOWN = 6000  # characters of a failure's report

Runs = dict[str, tuple[subprocess.Popen[bytes], Path]]


@pytest.fixture(
    scope="module", params=[pytest.param(SOME, id="some"), pytest.param("", id="all", marks=pytest.mark.long)]
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """For each topology the process that runs its suite, and the file that it reports to."""
    require("redis-server")
    folder = tmp_path_factory.mktemp("suites")
    started = {}
    for name in TOPOLOGIES:
        report = folder / name
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", request.param]
        with report.open("wb") as file:
            started[name] = (
                subprocess.Popen([*command, str(HERE / f"conformance_{name}.py")], stdout=file, stderr=file),
                report,
            )
    yield started
    for process, _ in started.values():
        process.terminate()
        process.wait(60)


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_suite_passes(runs: Runs, name: str) -> None:
    process, report = runs[name]
    code = process.wait(PATIENCE)
    text = report.read_text()
    print(f"{name}: {text.splitlines()[-1]}")
    assert code == 0, text[-SHOWN:]
    assert " passed" in text
