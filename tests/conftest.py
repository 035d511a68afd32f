"""For all tests: assertions in helper modules show their values, and settings of the machine have no effect."""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

pytest.register_assert_rewrite("multiq.conformance", "faults", "scenes", "waits")

# shell: a command line on a SQLite file. stores: a store on each backend. turns: which rows run only in make test-long.
pytest_plugins = ["shell", "stores", "turns"]

# a shell starts background processes with these signals ignored, as nohup does, and the tests' children inherit that
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, None), (signal.SIGHUP, None)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual or signal.SIG_DFL)


# no deadline: the time that an example takes depends on how busy the machine is
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the long tests more time than the others, because some of them take two minutes on a machine with nothing
    else to do."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))  # seconds


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected: there is hardly any, and looking takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude the 300,000 objects of the collected tests from garbage collection: they live until the end anyway."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _unclosed_files_fail_their_own_module() -> Iterator[None]:
    """Collect garbage after each module, so that a socket or file left open fails this module and not a later one.

    ``PYTHONTRACEMALLOC=20`` shows where it was opened.
    """
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MULTIQ_") and not name.startswith("MULTIQ_TEST_"):
            monkeypatch.delenv(name)
