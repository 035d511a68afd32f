"""A weak store's driver against the contract: what it declares as a gap is refused, everything else is kept."""

from __future__ import annotations

import tempfile

import pytest
from multiq_folder import FolderBackend

from multiq.conformance import ManualHarness, suite

pytestmark = pytest.mark.exhaustive  # a file for each job is slow, and test_weak_store.py certifies the driver, too


class FolderHarness(ManualHarness):
    walks = 10
    rounds = 5

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()

    def open(self) -> FolderBackend:
        return FolderBackend(self._folder.name, clock=self.clock)

    def close(self) -> None:
        self._folder.cleanup()


globals().update(suite(FolderHarness))
