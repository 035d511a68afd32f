"""Runs the suite without a test file and makes a report, for ``multiq conformance URL`` and ``run``.

pytest runs in this process, in a temporary folder, without the user's configuration and plugins. The run leaves no
cache and no files behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiq.backend.capabilities import POWERS
from multiq.errors import MultiqError, OptionInvalid
from multiq.settings.url import redact

from . import need_extra
from .harness import UrlHarness, first_contact
from .report import Report, Row
from .requirements import DOES_NOT_APPLY, NOT_TRIED, PROMISES, REFUSED, REQUIRES, declared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

    from .harness import Harness

_runs = itertools.count()  # pytest caches modules by name, so each run's file has a new name
_TRIED = {"kept", "failed", "not tried"}  # outcomes of tests that have tried a capability
_SHORT = 12  # the largest number of lines in a failure's summary
_PYTEST_VARIABLES = "PYTEST_ADDOPTS", "PYTEST_PLUGINS"  # the user's settings for pytest, which must not affect this run


def run(
    url: str,
    *,
    progress: Callable[[Row, int, int], None] | None = None,
    walks: int | None = None,
    select: Sequence[str] = (),
    harness: type[UrlHarness] | None = None,
) -> Report:
    """Run the suite against the backend of *url*, in real time. The suite uses new queues, and empties them afterwards.

    - *progress*: called after each test.
    - *walks*: the number of random walks, 0 for none. The default is the harness's number.
    - *select*: words. A test runs if it matches one of the words. A word may be a topic (``lease``), a paragraph
      (``4.3``) or a section (``4``) of the contract. A word may also be a part of a test's name. By default, all tests
      run.
    - *harness*: a subclass of ``UrlHarness``. The methods of the harness provide what the suite needs besides the URL.

    After Ctrl-C, the running test cleans up before ``KeyboardInterrupt`` is raised.

    Raises ``ConformanceNotInstalled``, ``OptionInvalid``, and the error of a backend that does not answer at all.
    """
    return run_harness(
        (harness or UrlHarness).of(url), target=redact(url), progress=progress, walks=walks, select=select
    )


def run_harness(
    harness_class: type[Harness],
    *,
    target: str | None = None,
    progress: Callable[[Row, int, int], None] | None = None,
    walks: int | None = None,
    select: Sequence[str] = (),
) -> Report:
    """Like ``run``, but for a harness.

    - *harness_class*: the harness, whose ``open`` makes the backend.
    - *target*: the backend's name in the report. By default, the target is the name of the class.
    - *progress*, *walks*, *select*: as for ``run``.
    """
    need_extra()
    if walks is not None and walks < 0:
        raise OptionInvalid(f"walks must be 0 or more, got {walks}")
    made = _with_walks(harness_class, walks)
    started = time.monotonic()
    harness = made()
    capabilities = first_contact(harness)
    collector = _Collector(select, progress, without_walks=walks == 0)
    _run_pytest(made, collector)
    collector.raise_if_stopped()
    if not collector.rows:
        raise OptionInvalid(
            f"select={list(select)!r} matches no test: name a topic, a paragraph, or a part of a test's name"
        )
    claimed = {power for power in POWERS if capabilities.claim(power)}
    if not claimed & {"memos", "outcomes", "holds"}:  # without these, no verdict has a second step
        claimed.discard("one_step")
    tried = {power for row in collector.rows if row.outcome in _TRIED for power in row.powers}
    return Report(
        backend=capabilities.backend,
        target=target or harness_class.__name__,
        rows=tuple(collector.rows),
        unproved=() if select else tuple(sorted(claimed - tried)),
        is_whole=not select,
        seconds=time.monotonic() - started,
    )


def _with_walks(harness_class: type[Harness], walks: int | None) -> type[Harness]:
    if walks is None:
        return harness_class
    return type(harness_class.__name__, (harness_class,), {"walks": walks})


def _run_pytest(harness_class: type[Harness], collector: _Collector) -> None:
    import pytest

    module = f"multiq_conformance_{os.getpid()}_{next(_runs)}"
    with (
        tempfile.TemporaryDirectory(prefix="multiq-conformance-") as folder,
        _isolated(),
        _current(harness_class),
    ):
        Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        file = Path(folder, f"{module}.py")
        file.write_text(_FILE, encoding="utf-8")
        options = ["-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:faulthandler", "-p", "no:warnings"]
        options += ["--import-mode=importlib", f"--rootdir={folder}", f"--confcutdir={folder}", "-c"]
        options += [str(Path(folder, "pytest.ini")), "--capture=no", str(file)]
        try:
            pytest.main(options, plugins=[collector])
        finally:
            sys.modules.pop(module, None)


#: The content of the run's only test file.
_FILE = """\
from multiq.conformance import suite
from multiq.conformance.runner import current_harness
globals().update(suite(current_harness()))
"""

_harnesses: list[type[Harness]] = []


def current_harness() -> type[Harness]:
    return _harnesses[-1]


@contextlib.contextmanager
def _current(harness_class: type[Harness]) -> Iterator[None]:
    _harnesses.append(harness_class)
    try:
        yield
    finally:
        _harnesses.pop()


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Keep the user's pytest settings out of the run. The environment and the interpreter's settings are restored
    afterwards.
    """
    kept = {name: os.environ.get(name) for name in (*_PYTEST_VARIABLES, "PYTEST_DISABLE_PLUGIN_AUTOLOAD")}
    writes = sys.dont_write_bytecode
    for name in _PYTEST_VARIABLES:
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class _Collector:
    """A pytest plugin that selects the tests and collects their results."""

    def __init__(
        self, select: Sequence[str], progress: Callable[[Row, int, int], None] | None, *, without_walks: bool
    ) -> None:
        self.rows: list[Row] = []
        self._select = [_plain(word) for word in select]
        self._progress = progress
        self._without_walks = without_walks
        self._total = 0
        self._items: dict[str, pytest.Item] = {}
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._errors: list[str] = []
        self._stopped_by: BaseException | None = None

    def raise_if_stopped(self) -> None:
        if self._errors:  # checked first, because after an error pytest ends the run like an interrupted run
            raise ConformanceBroken("the suite itself cannot be run: " + "\n".join(self._errors))
        if self._stopped_by is not None:
            raise self._stopped_by

    # --- pytest's hooks ---

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors.append(str(report.longrepr))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._is_chosen(item)]
        self._total = len(items)
        self._items = {item.nodeid: item for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.setdefault(report.nodeid, []).append(report)
        if report.when == "teardown":
            row = _row(self._items[report.nodeid], self._reports.pop(report.nodeid))
            self.rows.append(row)
            if self._progress is not None:
                self._progress(row, len(self.rows), self._total)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._stopped_by = KeyboardInterrupt()

    def pytest_internalerror(self, excrepr: object) -> bool:
        self._errors.append(str(excrepr))
        return True  # the error is reported as ``ConformanceBroken``, not on standard error

    # --- internals ---

    def _is_chosen(self, item: pytest.Item) -> bool:
        topic = _topic(item)
        if self._without_walks and topic == "Walk":
            return False
        return not self._select or any(self._fits(word, item, topic) for word in self._select)

    @staticmethod
    def _fits(word: str, item: pytest.Item, topic: str) -> bool:
        from .suites import TOPICS, topic_name

        name = word.replace("_", "")
        if name in {topic_name(known).lower() for known in TOPICS}:
            return name == topic.lower()
        if word.replace(".", "").isdigit():
            return any(number == word or number.startswith(f"{word}.") for number in _declared(item, PROMISES))
        return f"_{word}" in f"_{_plain(item.name)}"


class ConformanceBroken(MultiqError):
    """The suite itself could not be run. This error says nothing about the backend."""


def _row(item: pytest.Item, reports: Sequence[pytest.TestReport]) -> Row:
    row = Row(
        topic=_topic(item),
        name=item.name,
        paragraphs=_declared(item, PROMISES),
        powers=(*declared(getattr(item, "cls", None), REQUIRES), *_declared(item, REQUIRES)),
        outcome="kept",
        seconds=sum(report.duration for report in reports),
    )
    return _with_outcome(row, reports)


def _with_outcome(row: Row, reports: Sequence[pytest.TestReport]) -> Row:
    import msgspec

    properties: dict[str, Any] = {name: value for report in reports for name, value in report.user_properties}
    failure = next((report for report in reports if report.failed), None)
    changes: dict[str, Any] = {}
    if failure is not None:
        changes = {"outcome": "failed", "reason": _short(failure), "detail": failure.longreprtext}
    elif REFUSED in properties:
        power, kind, reason = properties[REFUSED]
        changes = {"outcome": "refused", "power": power, "gap": kind, "reason": reason}
    elif NOT_TRIED in properties:
        changes = {"outcome": "not tried", "reason": properties[NOT_TRIED]}
    elif any(report.skipped for report in reports):
        changes = {"outcome": "does not apply", "reason": properties.get(DOES_NOT_APPLY, "it was skipped")}
    return msgspec.structs.replace(row, **changes)


def _topic(item: pytest.Item) -> str:
    return (item.parent.name if item.parent is not None else "").removeprefix("Test")


def _declared(item: pytest.Item, name: str) -> tuple[str, ...]:
    return declared(getattr(item, "function", None), name)


def _plain(words: str) -> str:
    return words.lower().replace(" ", "_").replace("-", "_")


def _short(report: pytest.TestReport) -> str:
    """The message of a failure's exception, cut to ``_SHORT`` lines."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else report.longreprtext).strip().splitlines()
    cut = [*lines[:_SHORT], f"... and {len(lines) - _SHORT} more lines"] if len(lines) > _SHORT else lines
    return "\n".join(cut)
