"""What all tests share: assertions outside of tests show their values, and nobody's own settings leak in."""

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

# a command line on a SQLite file, a store on each backend, and which rows of a matrix of these are long
pytest_plugins = ["shell", "stores", "turns"]

# a shell starts what it puts into the background with these ignored, as nohup does, and what tests start inherits that
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, None), (signal.SIGHUP, None)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual or signal.SIG_DFL)


# how long an example takes says how busy the machine is
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


def pytest_collection_finish() -> None:
    """What was collected stays until the end: no later collection of garbage need look at its 300,000 objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _what_is_left_open_is_told_of_its_own_module() -> Iterator[None]:
    """A socket or file that is not closed is an error when it is collected, here and not in a later module's test.

    ``PYTHONTRACEMALLOC=20`` shows where it was opened.
    """
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MULTIQ_") and not name.startswith("MULTIQ_TEST_"):
            monkeypatch.delenv(name)
