"""A process forks while another thread makes its first call: the child can make calls, too."""

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
    from multiq_redis.redis_py_import import redis_py

    redis_py()  # a fork waits for the end of this import; tests/drivers/redis/test_opening.py tests that
before = set(sys.modules)
backend.enqueue("q", [NewJob(b"x", new_id())])
consumer = backend.consumer(["q"])
(lease,) = consumer.reserve(1, 1)
consumer.exchange([Ack(lease)], 1, 0.01)
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.one_row
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_imported_at_the_first_call(name: str, tmp_path: Path) -> None:
    # In a forked child, Python does not free the import locks of the parent's other threads. If such a thread imported
    # a module at the fork, the child would wait for ever when it imports the same module.
    with STORES[name](tmp_path) as url:
        done = subprocess.run(
            [sys.executable, "-c", _FIRST_CONTACT, url], capture_output=True, text=True, check=True, timeout=60
        )
    assert done.stdout.split() == []


def test_a_fork_while_another_thread_imports_the_driver_leaves_the_child_working(tmp_path: Path) -> None:
    # given a thread that opens a connection, and an import of the driver that takes long
    program = f"""
import importlib.abc, sys, threading, time, multiq
from multiq.conformance import forks

forks.HANGS = 40
begun = threading.Event()

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "multiq_sqlite.backend":
            begun.set()
            time.sleep(0.3)

sys.meta_path.insert(0, Slow())
queue = multiq.App("sqlite:///{tmp_path}/jobs.db").queue()
thread = threading.Thread(target=queue.enqueue, args=[1])
thread.start()
begun.wait()

# when the process forks
assert forks.ended_well(forks.fork(lambda: queue.enqueue(2)))
thread.join()
assert queue.stats().ready == 2
"""
    # then the child's use of the driver does not wait for that import for ever
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
