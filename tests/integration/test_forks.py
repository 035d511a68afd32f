"""A process that forks while another of its threads is at its first call: the child can make its own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from stores import NAMES, STORES

if TYPE_CHECKING:
    from pathlib import Path

_FIRST_CONTACT = """
import sys
from multiq.backend import Ack, NewJob
from multiq.ids import new_id
from multiq.backend.registry import open_backend

backend = open_backend(sys.argv[1])
if sys.argv[1].startswith("redis"):
    from multiq_redis.opening import redis_py

    redis_py()  # a fork waits for the end of this import; tests/drivers/redis/test_opening.py tests that
before = set(sys.modules)
backend.enqueue("q", [NewJob(b"x", new_id())])
consumer = backend.consumer(["q"])
(lease,) = consumer.reserve(1, 1)
consumer.exchange([Ack(lease)], 1, 0.01)
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_imported_at_the_first_call(name: str, tmp_path: Path) -> None:
    # Python does not free a module's import lock in a forked child: whose parent's other thread was in the middle of
    # an import waits for it for ever when it wants the same module
    with STORES[name](tmp_path) as url:
        done = subprocess.run(
            [sys.executable, "-c", _FIRST_CONTACT, url], capture_output=True, text=True, check=True, timeout=60
        )
    assert done.stdout.split() == []
