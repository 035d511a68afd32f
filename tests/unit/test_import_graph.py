"""The graph of run-time imports has no circles, and a driver's working code does not import the bench.

Imports inside functions count; those under ``TYPE_CHECKING`` do not.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

DRIVERS = ["multiq_beanstalk", "multiq_mysql", "multiq_redis", "multiq_sqlite"]


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("multiq", "multiq_start", *DRIVERS, exclude_type_checking_imports=True, cache_dir=None)


def circle_in(graph: grimp.ImportGraph) -> list[str]:
    """Return the modules of one circle, which begins and ends with the same module. Empty if there is none."""
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as exc:
        circle: list[str] = exc.args[1]
        return circle
    return []


def test_imports_have_no_circles(graph: grimp.ImportGraph) -> None:
    assert len(graph.modules) > 100
    assert circle_in(graph) == []


def test_a_circle_of_imports_inside_functions_is_found(graph: grimp.ImportGraph) -> None:
    assert graph.find_modules_directly_imported_by("multiq.backend.base")
    planted = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        planted.add_import(importer=importer, imported=imported)
    assert set(circle_in(planted)) == {"a", "b", "c"}


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_s_working_code_does_not_import_the_bench(graph: grimp.ImportGraph, driver: str) -> None:
    of_bench = {f"{driver}.bench", f"{driver}.baseline"}
    bench = {module for module in graph.modules if module == "multiq.bench" or module.startswith("multiq.bench.")}
    working = {module for module in graph.modules if module.startswith(f"{driver}.")} - of_bench
    assert f"{driver}.backend" in working
    for module in working:
        reached = graph.find_upstream_modules(module)
        assert not reached & (bench | of_bench), module
