"""The conformance suite: tests of ``docs/contract.md`` for any driver.

A driver's test file is a harness and a call of ``suite``::

    from multiq.conformance import Harness, suite

    class AcmeHarness(Harness):
        def open(self):
            return AcmeBackend("acme://localhost/test")

    globals().update(suite(AcmeHarness))

The suite needs pytest: ``pip install 'multiq[conformance]'``.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from multiq.errors import MultiqError

if TYPE_CHECKING:
    from .case import Topic
    from .harness import Harness, ManualHarness, UrlHarness
    from .planted import PLANTED
    from .report import Report, Row
    from .requirements import promise, requires, without
    from .runner import run
    from .suites import suite

__all__ = [
    "PLANTED", "ConformanceNotInstalled", "Harness", "ManualHarness", "Report", "Row", "Topic", "UrlHarness", "promise",
    "requires", "run", "suite", "without",
]  # fmt: skip

_HOMES = {
    "PLANTED": "planted",
    "Harness": "harness",
    "ManualHarness": "harness",
    "Report": "report",
    "Row": "report",
    "Topic": "case",
    "UrlHarness": "harness",
    "promise": "requirements",
    "requires": "requirements",
    "run": "runner",
    "suite": "suites",
    "without": "requirements",
}
_EXTRA = ("pytest", "_pytest")
_WITH_ASSERTIONS = ("case", "threads", "topics")


class ConformanceNotInstalled(MultiqError, ImportError):
    """The suite needs pytest, but multiq itself does not."""


def need_extra() -> None:
    """Raise ``ConformanceNotInstalled`` if pytest is missing."""
    try:
        importlib.import_module("pytest")
    except ModuleNotFoundError as exc:
        raise _not_installed(exc) from exc


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _show_values()
    try:
        module = importlib.import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in _EXTRA:
            raise
        raise _not_installed(exc) from exc
    return getattr(module, name)


def _show_values() -> None:
    """In a pytest run, make failed assertions show the values that differ. A module that is already imported keeps its
    plain assertions.
    """
    pytest = sys.modules.get("pytest")
    if pytest is not None:
        names = (f"{__name__}.{name}" for name in _WITH_ASSERTIONS)
        pytest.register_assert_rewrite(*(name for name in names if name not in sys.modules))


def _not_installed(exc: ModuleNotFoundError) -> ConformanceNotInstalled:
    return ConformanceNotInstalled(
        f"the conformance suite needs {exc.name}, which is not installed: pip install 'multiq[conformance]'"
    )
