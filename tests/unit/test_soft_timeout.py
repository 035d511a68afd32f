"""Where a job in the main thread may be interrupted: in its task's own code, and nowhere else."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from multiq.worker.execution.soft_timeout import MainThreadInterrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType


def called_by_the_runner(function: Callable[[], object]) -> None:
    """Call the function from a frame that looks like the runner's."""
    exec("function()", {"__name__": "multiq.worker.execution.runner", "function": function})  # noqa: S102


def allowed(function: Callable[[], object]) -> set[tuple[str, str]]:
    """Return the module and the function of each called frame in which an exception may be raised."""
    interrupt, found = MainThreadInterrupt((), ()), set()

    def look(frame: FrameType, _event: str, _what: object) -> None:
        if interrupt.may_raise(frame):
            code: CodeType = frame.f_code
            found.add((str(frame.f_globals["__name__"]), code.co_name))

    before = sys.gettrace()
    sys.settrace(look)
    try:
        called_by_the_runner(function)
    finally:
        sys.settrace(before)
    return found


def helper() -> None:
    pass


class Guard:
    def __enter__(self) -> None:
        helper()

    def __exit__(self, *_: object) -> None:
        helper()

    def __del__(self) -> None:
        helper()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    helper()
    yield
    helper()


def use_guard() -> None:
    with Guard():
        pass


def use_guarded() -> None:
    with guarded():
        pass


def use_queue() -> None:
    inbox: queue.Queue[int] = queue.Queue()
    inbox.put(1)
    inbox.get()


def use_condition() -> None:
    condition = threading.Condition()
    with condition:
        condition.notify_all()


def use_log() -> None:
    logging.getLogger("test_soft_timeout").warning("a line")


def use_helper() -> None:
    helper()


@pytest.mark.parametrize("function", [use_guard, use_guarded, use_queue, use_condition, use_log])
def test_libraries_with_locks_and_context_managers_are_left_alone(function: Callable[[], None]) -> None:
    assert allowed(function) == {(__name__, function.__name__)}


def test_functions_that_a_task_calls_count_as_its_own_code() -> None:
    assert allowed(use_helper) == {(__name__, "use_helper"), (__name__, "helper")}


def test_the_runner_itself_is_left_alone() -> None:
    assert allowed(int) == set()


def test_code_that_no_task_has_called_is_left_alone() -> None:
    assert not MainThreadInterrupt((), ()).may_raise(sys._getframe())
    assert not MainThreadInterrupt((), ()).may_raise(None)
