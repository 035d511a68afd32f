"""What all tests share: assertions of the shipped suite show their values, and nobody's own settings leak in."""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("multiq.conformance")


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MULTIQ_") and not name.startswith("MULTIQ_TEST_"):
            monkeypatch.delenv(name)
