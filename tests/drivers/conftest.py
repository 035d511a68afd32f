"""What the tests of several drivers share."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from worker_app import app

from multiq.backend import NewJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def producer() -> Iterator[Callable[[str], None]]:
    """``producer(url)`` makes the test app enqueue to that URL."""
    yield app.connect
    app.close()


@pytest.fixture
def jobs() -> Callable[..., list[NewJob]]:
    """Makes jobs with ids of their own: ``jobs(3, delay=1)``."""
    numbers = itertools.count(1)

    def make(count: int = 1, body: bytes = b"x", **options: float) -> list[NewJob]:
        return [NewJob(body=body, id=f"job-{next(numbers)}", **options) for _ in range(count)]  # type: ignore[arg-type]

    return make
