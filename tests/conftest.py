"""What all tests share: assertions in helper modules show their values, and settings of the machine have no effect."""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.register_assert_rewrite("multiq.conformance", "faults", "scenes", "waits")

# fixtures for a command line on a SQLite file and for a store on each backend; and which of their rows are long
pytest_plugins = ["shell", "stores", "turns"]

# a shell starts background processes with these signals ignored, as nohup does, and the tests' children inherit that
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, None), (signal.SIGHUP, None)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual or signal.SIG_DFL)


# no deadline: the time that an example takes depends on how busy the machine is
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


def pytest_collection_finish() -> None:
    """Exclude the 300,000 objects of the collected tests from garbage collection: they live until the end anyway."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _what_is_left_open_is_told_of_its_own_module() -> Iterator[None]:
    """Collect garbage after each module: a socket or file left open is an error then, and not in a later module.

    ``PYTHONTRACEMALLOC=20`` shows where it was opened.
    """
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MULTIQ_") and not name.startswith("MULTIQ_TEST_"):
            monkeypatch.delenv(name)
