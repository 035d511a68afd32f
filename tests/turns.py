"""Choose which rows of a parametrized test ``make test`` and ``make test-long`` run.

The mode of a worker and its store matter to few of the worker's tests, and a process for each combination takes long.
Of a test with such a parameter, ``make test`` runs each value of the other parameters, and no more rows than these
need. Which rows it runs depends on the test's name, so that each mode and store is used by some test. ``make
test-long`` runs half of the other rows, and ``make test-exhaustive`` the rest. This holds for tests in
``tests/integration``, and elsewhere for tests that are marked ``few_rows``.

Of a test that is marked ``one_row``, ``make test`` runs the first row only. The mark is for tests whose rows each take
long, and which check the same promise at another place: on another store, for another call, in another mode.

A test or row that is marked ``exhaustive`` is long, too, and only ``make test-exhaustive`` runs it.

Of the conformance suite, ``make test`` runs each test in memory and on one store: on one of SQLite, Redis and MySQL if
it is about outcomes, memos, held jobs, steps, notes, unique keys, limits and schedules, otherwise on one of these three
and beanstalkd.
"""

from __future__ import annotations

import collections
import zlib
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: parameters of which ``make test`` runs at least one value, and not all
IN_TURN = frozenset({"mode", "store", "url"})

#: topics of the conformance suite that beanstalkd has no part in, because it has not the power
_TOPICS_WITHOUT_BEANSTALK = frozenset(
    {
        "TestCompareAndSet",
        "TestDetails",
        "TestHeldJobs",
        "TestHolds",
        "TestLimits",
        "TestLimitsUnique",
        "TestLimitsWaking",
        "TestMemos",
        "TestNotes",
        "TestOneStep",
        "TestOneStepEverywhere",
        "TestOutcomes",
        "TestPermits",
        "TestSchedules",
        "TestSteps",
        "TestUnique",
        "TestUniqueKicks",
        "TestUniqueReplace",
    }
)
_STORES = ("sqlite", "redis", "mysql", "beanstalk")

_QUICK = "not long"  # the marker expression of ``make test``
#: marker expression -> the marks of the tests that it leaves out
_LEFT_OUT = {_QUICK: frozenset({"long", "exhaustive"}), "long and not exhaustive": frozenset({"exhaustive"})}


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Do not even collect tests that a command leaves out as a whole: each of its processes collects all tests."""
    chosen = collector.config.option.markexpr
    if _has_mark(obj, _LEFT_OUT.get(chosen, frozenset())):
        return []
    return [] if chosen == _QUICK and _has_turn_elsewhere(collector, name) else None


@pytest.hookimpl(trylast=True)  # when all rows are known
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Do not make the items of rows that a command leaves out. At least one row stays, and is deselected later."""
    if left_out := _LEFT_OUT.get(metafunc.config.option.markexpr):
        rows = metafunc._calls  # private: pytest offers no way to leave rows out
        metafunc._calls = [row for row in rows if not any(mark.name in left_out for mark in row.marks)] or rows[:1]


def _has_turn_elsewhere(topic: pytest.Collector | None, test: str) -> bool:
    """Whether ``make test`` runs this test of the conformance suite on another store."""
    if not isinstance(topic, pytest.Class) or topic.path.name != "test_conformance.py":
        return False
    if topic.path.parent.name not in _STORES:
        return False
    stores = _STORES[:-1] if topic.name in _TOPICS_WITHOUT_BEANSTALK else _STORES
    return topic.path.parent.name != stores[zlib.crc32(test.encode()) % len(stores)]


def _has_mark(obj: object, names: frozenset[str]) -> bool:
    marks = getattr(obj, "pytestmark", None)
    return isinstance(marks, list) and any(mark.name in names for mark in marks)


def _mark_exhaustive_as_long(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("exhaustive") is not None:
            item.add_marker(pytest.mark.long)


Rows = dict[pytest.Item, frozenset[tuple[str, str]]]


@pytest.hookimpl(tryfirst=True)  # before those marked are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    matrices: Mapping[str, Rows] = collections.defaultdict(dict)
    begun: set[str] = set()
    _mark_exhaustive_as_long(items)
    for item in items:
        if isinstance(item, pytest.Function) and _has_turn_elsewhere(item.getparent(pytest.Class), item.originalname):
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("one_row") is not None:
            if item.get_closest_marker("long") is None:
                test = item.nodeid.partition("[")[0]
                if test in begun:
                    item.add_marker(pytest.mark.long)
                begun.add(test)
            continue
        is_about_workers = item.path.parent.name == "integration" and not item.path.name.startswith("test_cli")
        is_marked = item.get_closest_marker("few_rows") is not None
        if (is_about_workers or is_marked) and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            row = frozenset((name, repr(value)) for name, value in item.callspec.params.items())
            has_turns = is_marked or any(name in IN_TURN for name, _ in row)
            if has_turns and item.get_closest_marker("long") is None:
                matrices[item.nodeid.partition("[")[0]][item] = row
    for rows in matrices.values():
        for item in rows.keys() - set(_some(rows)):
            _leave_to_longer_runs(item)


def _leave_to_longer_runs(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.long)
    if zlib.crc32(item.nodeid.encode()) % 2:
        item.add_marker(pytest.mark.exhaustive)


def _some(rows: Rows) -> Iterator[pytest.Item]:
    """As few rows as are needed to use every required value."""
    values = collections.Counter(name for name, _ in frozenset().union(*rows.values()))
    missing = {name: 1 if name in IN_TURN else count for name, count in values.items()}
    seen: set[tuple[str, str]] = set()
    for item in sorted(rows, key=lambda item: zlib.crc32(item.nodeid.encode())):
        new = rows[item] - seen
        if any(missing[name] > 0 for name, _ in new):
            yield item
            seen |= new
            missing = {name: count - sum(name == met for met, _ in new) for name, count in missing.items()}
