"""How many of a driver's files one call passes through. A reader of an enqueue or a reserve opens these files, and no
more. Counted by a call trace on a real server, in a process that has enqueued and reserved before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import Ack, NewJob
from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_OF_ENQUEUE = 5
_MOST_OF_RESERVE = 6


def _jobs(*ids: str) -> Sequence[NewJob]:
    return [NewJob(body=b"x", id=job_id) for job_id in ids]


def _passed(package: str, call: Callable[[], object]) -> list[str]:
    """Return the files of *package* that have a function which *call* enters, in this order."""
    files: dict[str, None] = {}

    def note(frame: Any, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent.name == package:
            files[path.name] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(files)


@pytest.fixture
def passed(url: str) -> dict[str, list[str]]:
    """The files that a warm enqueue and a warm reserve have passed, by verb."""
    package = f"multiq_{url.partition(':')[0]}"
    with open_backend(url) as backend:
        consumer = backend.consumer(["q"])
        for number in range(3):
            backend.enqueue("q", _jobs(f"warm-{number}"))
            (lease,) = consumer.reserve(1, 0)
            assert consumer.settle([Ack(lease)]) == [None]
        enqueue = _passed(package, lambda: backend.enqueue("q", _jobs("one")))
        reserved = []
        reserve = _passed(package, lambda: reserved.extend(consumer.reserve(1, 0)))
        assert len(reserved) == 1
        consumer.close()
    return {"enqueue": enqueue, "reserve": reserve}


def test_enqueue_passes_at_most_five_files_of_its_driver(passed: dict[str, list[str]]) -> None:
    assert "backend.py" in passed["enqueue"]
    assert len(passed["enqueue"]) <= _MOST_OF_ENQUEUE, passed["enqueue"]


def test_reserve_passes_at_most_six_files_of_its_driver(passed: dict[str, list[str]]) -> None:
    assert "consumer.py" in passed["reserve"]
    assert len(passed["reserve"]) <= _MOST_OF_RESERVE, passed["reserve"]
