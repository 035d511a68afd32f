"""What consumers and producers of one store share in a process, and a forked child does not inherit."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from multiq.driverkit.fork import PerProcess


class _Shared:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_one_object_for_each_key() -> None:
    shared = PerProcess(_Shared)
    one, other = shared.of("place", "database"), shared.of("place", "another")
    assert shared.of("place", "database") is one
    assert other is not one


def test_object_is_gone_when_it_is_not_in_use() -> None:
    shared = PerProcess(_Shared)
    marked = shared.of("place")
    marked.lock.acquire()
    del marked
    gc.collect()
    assert not shared.of("place").lock.locked()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_child_has_an_object_of_its_own() -> None:
    shared = PerProcess(_Shared)
    ours = shared.of("place")
    with ours.lock:  # as if another thread had it at the fork
        pid = os.fork()
        if pid == 0:
            os._exit(0 if shared.of("place") is not ours and not shared.of("place").lock.locked() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
