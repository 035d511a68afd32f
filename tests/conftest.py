"""What all tests share: assertions outside of tests show their values, and nobody's own settings leak in."""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest

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


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MULTIQ_") and not name.startswith("MULTIQ_TEST_"):
            monkeypatch.delenv(name)
