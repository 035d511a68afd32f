"""What the tests of several drivers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from worker_app import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def producer() -> Iterator[Callable[[str], None]]:
    """The test app's producing side: ``producer(url)`` points it there."""
    yield app.connect
    app.close()
