"""The page about the bench says what the workloads do."""

from __future__ import annotations

from bench_definitions import definitions, written


def test_the_page_defines_each_workload_as_it_is() -> None:
    assert written().splitlines() == definitions().strip().splitlines(), "run: python tests/bench_definitions.py"
