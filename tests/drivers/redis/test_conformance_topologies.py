"""The conformance suite over TLS, on a Sentinel's primary and on a cluster: ``conformance_*.py``, all at once.

The suite runs in real time, and mostly waits, so three suites together take no longer than one. To run one suite:
``pytest tests/drivers/redis/conformance_cluster.py``. Only ``make test-long`` runs them, because each
of the three processes costs seconds of CPU time even for a few topics. Over TLS and with Sentinel, it runs the topics
in which the connection matters, and ``make test-exhaustive`` runs the others.
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
TOPOLOGIES = {"long": ("tls", "sentinel", "cluster"), "exhaustive": ("tls", "sentinel")}
CHOSEN = {"long": "not exhaustive", "exhaustive": "exhaustive"}  # the marker expressions of the suites
PATIENCE = 1800  # seconds; all topics take about 140 on an idle machine, and took 741 on two cores with a load of 12
SHOWN = 6000  # characters of a failure's report

Runs = dict[str, tuple[subprocess.Popen[bytes], Path]]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """For each topology, the process that runs the suite, and the file with its report."""
    require("redis-server")
    folder = tmp_path_factory.mktemp("suites")
    started = {}
    for name in TOPOLOGIES[request.param]:
        report = folder / name
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", CHOSEN[request.param]]
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
@pytest.mark.parametrize(
    ("runs", "name"),
    [
        pytest.param(mark, name, marks=getattr(pytest.mark, mark))
        for mark, names in TOPOLOGIES.items()
        for name in names
    ],
    indirect=["runs"],
)
def test_the_suite_passes(runs: Runs, name: str) -> None:
    process, report = runs[name]
    code = process.wait(PATIENCE)
    text = report.read_text()
    print(f"{name}: {text.splitlines()[-1]}")
    assert code == 0, text[-SHOWN:]
    assert " passed" in text
