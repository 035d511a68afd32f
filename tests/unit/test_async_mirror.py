"""Each public method that calls a backend has a coroutine with the same parameters."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq.failed import FailedJobs, FailedListing
from multiq.flows import Batch, Chain, Flow, FlowHandle, Flows, Group
from multiq.job import Job, JobContext, JobHandle
from multiq.queue import Queue
from multiq.schedules.managing import Schedules
from multiq.task import Task, TaskCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLASSES: list[type] = [
    multiq.App, Batch, Chain, multiq.EnqueueUncertain, FailedJobs, FailedListing, Flow, FlowHandle, Flows, Group, Job,
    JobContext, JobHandle, Queue, Schedules, Task, TaskCall,
]  # fmt: skip

#: why a public method has no coroutine
PLAIN = {
    "App.connect": "names another connection, and is called before the event loop runs",
    "App.exclude": "changes the app's tasks",
    "App.find_task": "looks at the app's tasks",
    "App.include": "changes the app's tasks",
    "App.job": "constructs a handle",
    "App.keep_queue": "remembers an object",
    "App.load_included": "imports modules",
    "App.middleware": "registers a function",
    "App.note_middleware": "looks at a task",
    "App.on": "registers a function",
    "App.queue": "constructs an object",
    "App.schedule": "registers a schedule",
    "App.task": "registers a function",
    "App.using": "is for tests, and calls no backend but to close that of the test",
    "Batch.add_to": "changes the flow before it is enqueued",
    "Chain.add_to": "changes the flow before it is enqueued",
    "EnqueueUncertain.add_note": "Python's own",
    "EnqueueUncertain.repeat_by": "stores a function",
    "EnqueueUncertain.with_traceback": "Python's own",
    "FailedJobs.list": "returns an object with async iteration",
    "FailedListing.queues": "belongs to the iteration",
    "Flow.add": "changes the flow before it is enqueued",
    "Flow.add_part": "changes the flow before it is enqueued",
    "FlowHandle.open": "belongs to the enqueue of a flow",
    "FlowHandle.sweep": "belongs to Flows.sweep",
    "Flows.get": "constructs a handle",
    "Group.add_to": "changes the flow before it is enqueued",
    "JobContext.check": "looks at the clock",
    "JobContext.check_cancelled": "makes no call of the backend",
    "JobContext.progress": "costs no round trip",
    "Task.accept": "checks an envelope",
    "Task.check_arguments": "looks at a signature",
    "Task.copy_for": "constructs an object",
    "Task.decode_arguments": "decodes arguments",
    "Task.encode": "encodes arguments",
    "Task.gates": "formats arguments",
    "Task.for_app": "looks at the app's tasks",
    "Task.is_like": "compares options",
    "Task.options": "constructs an object",
    "Task.policy_of": "looks at an envelope",
    "Task.s": "constructs an object",
    "Task.terms": "formats arguments, and hashes them",
    "Task.timeout_of": "looks at an envelope",
    "TaskCall.s": "constructs an object",
}


def public_methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in inspect.getmembers(kind, callable):
        if not name.startswith("_") and not inspect.isclass(value):
            yield name, value


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


PLAIN_METHODS = [
    (kind, name, method)
    for kind in CLASSES
    for name, method in public_methods(kind)
    if not is_async(method) and f"{kind.__name__}.{name}" not in PLAIN
]


@pytest.mark.parametrize(
    ("kind", "name", "method"), PLAIN_METHODS, ids=[f"{kind.__name__}.{name}" for kind, name, _ in PLAIN_METHODS]
)
def test_each_public_method_has_a_coroutine_with_the_same_signature(
    kind: type, name: str, method: Callable[..., Any]
) -> None:
    # given a plain method, when its coroutine is looked up
    coroutine = getattr(kind, f"a{name}", None)

    # then the coroutine exists, with the same parameters and the same result
    assert coroutine is not None, f"{kind.__name__}.{name} must have a coroutine a{name}, or a reason in PLAIN"
    assert is_async(coroutine)
    plain, other = inspect.signature(method), inspect.signature(coroutine)
    if name != "step":  # its function is a coroutine function
        assert list(other.parameters.values()) == list(plain.parameters.values())
    returned = str(plain.return_annotation)
    expected = f"Async{returned}" if inspect.isasyncgenfunction(coroutine) else returned
    assert str(other.return_annotation) == expected
    assert inspect.getdoc(coroutine)


def test_no_coroutine_lacks_its_plain_method() -> None:
    # given all coroutines of the public classes
    coroutines = [(kind, name) for kind in CLASSES for name, method in public_methods(kind) if is_async(method)]

    # then each belongs to a plain method or attribute
    assert [(kind.__name__, name) for kind, name in coroutines if not hasattr(kind, name[1:])] == []


def test_no_reason_is_left_over() -> None:
    names = {f"{kind.__name__}.{name}" for kind in CLASSES for name in dir(kind)}
    assert set(PLAIN) - names == set()


def test_a_listing_an_app_and_a_reserved_job_have_their_async_protocols() -> None:
    assert hasattr(FailedListing, "__aiter__")
    assert all(hasattr(kind, "__aenter__") and hasattr(kind, "__aexit__") for kind in (multiq.App, Job))
