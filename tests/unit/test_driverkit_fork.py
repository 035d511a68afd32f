"""Forks: objects notice that they are in a child, and hooks run in the parent or the child as registered."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING

import pytest

from multiq.conformance.forks import ended_well, fork
from multiq.driverkit.fork import PerProcess, forks

if TYPE_CHECKING:
    from collections.abc import Callable


def succeeds_in_a_grandchild(work: Callable[[], object]) -> bool:
    """Do *work* in a fork of a forked child, where the fork of the conformance suite would wait for its watchdog."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Thing:
    """Counts its starts in children, and the generation that it saw there."""

    def __init__(self) -> None:
        self.starts: list[int] = []

    def start_over_in_child(self) -> None:
        self.starts.append(forks.generation)


def test_child_has_the_next_generation_and_its_parent_keeps_its_own() -> None:
    before = forks.generation

    def in_child() -> None:
        assert forks.generation == before + 1

        def in_grandchild() -> None:
            assert forks.generation == before + 2

        assert succeeds_in_a_grandchild(in_grandchild)
        assert forks.generation == before + 1

    assert ended_well(fork(in_child))
    assert forks.generation == before


def test_watched_object_starts_over_once_in_each_child_and_sees_the_new_generation() -> None:
    thing = Thing()
    forks.watch(thing)
    before = forks.generation

    def in_child() -> None:
        assert thing.starts == [before + 1]

        def in_grandchild() -> None:
            assert thing.starts == [before + 1, before + 2]

        assert succeeds_in_a_grandchild(in_grandchild)

    assert ended_well(fork(in_child))
    assert thing.starts == []


def test_watched_object_is_not_kept_alive() -> None:
    starts: list[str] = []

    class Noisy:
        def start_over_in_child(self) -> None:
            starts.append("started")

    kept, dropped = Noisy(), Noisy()
    forks.watch(kept)
    forks.watch(dropped)
    del dropped
    gc.collect()

    def in_child() -> None:
        assert starts == ["started"]

    assert ended_well(fork(in_child))


@pytest.mark.long
def test_held_lock_is_free_in_a_child_that_was_forked_while_another_thread_took_it_all_the_time() -> None:
    lock = threading.Lock()
    forks.hold(lock)
    is_over = threading.Event()

    def take_and_release() -> None:
        while not is_over.is_set():
            with lock:
                sum(range(1000))

    thread = threading.Thread(target=take_and_release)
    thread.start()
    try:

        def in_child() -> None:
            assert lock.acquire(timeout=10)

        for _ in range(20):
            assert ended_well(fork(in_child))
    finally:
        is_over.set()
        thread.join()
    assert lock.acquire(timeout=10)
    lock.release()


def test_hooks_run_on_the_right_side_of_the_fork() -> None:
    calls: list[str] = []
    forks.register(
        before=lambda: calls.append("before"),
        in_parent=lambda: calls.append("in parent"),
        in_child=lambda: calls.append(f"in child {forks.generation}"),
    )
    before = forks.generation

    def in_child() -> None:
        assert calls == ["before", f"in child {before + 1}"]

    assert ended_well(fork(in_child))
    assert calls == ["before", "in parent"]


def test_a_fork_waits_for_an_import_and_runs_the_hooks_that_it_registers() -> None:
    calls: list[str] = []
    is_held, fork_has_begun = threading.Event(), threading.Event()

    # given a thread that imports a driver
    def import_driver() -> None:
        with forks.opening:
            is_held.set()
            fork_has_begun.wait()
            forks.register(
                before=lambda: calls.append("before"),
                in_parent=lambda: calls.append("in parent"),
                in_child=lambda: calls.append("in child"),
            )

    thread = threading.Thread(target=import_driver)
    thread.start()
    is_held.wait()
    os.register_at_fork(before=fork_has_begun.set)  # noqa: TID251 - runs as the first hook, before the wait

    # when the process forks
    def in_child() -> None:
        assert calls == ["before", "in child"]
        with forks.opening:
            pass

    assert ended_well(fork(in_child))

    # then each hook has run once
    thread.join()
    assert calls == ["before", "in parent"]
    assert ended_well(fork(lambda: None))
    assert calls == ["before", "in parent"] * 2


# --- PerProcess ---


class Shared:
    """An object that all users of one store share in a process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_users_of_the_same_key_share_one_object() -> None:
    shared = PerProcess(Shared)
    one, other = shared.of("place", "database"), shared.of("place", "another")
    assert shared.of("place", "database") is one
    assert other is not one


def test_shared_object_is_gone_when_it_is_not_in_use() -> None:
    shared = PerProcess(Shared)
    held = shared.of("place")
    held.lock.acquire()
    del held
    gc.collect()
    assert not shared.of("place").lock.locked()


def test_child_has_a_shared_object_of_its_own() -> None:
    shared = PerProcess(Shared)
    ours = shared.of("place")

    def look() -> None:
        assert shared.of("place") is not ours
        assert not shared.of("place").lock.locked()

    with ours.lock:  # as if another thread had the lock at the fork
        assert ended_well(fork(look))
