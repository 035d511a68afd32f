"""Apps: registration of tasks, errors, connections, and the repr."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq import ArgumentsInvalid, NameInvalid, OptionInvalid, SettingsInvalid, UrlInvalid, events
from multiq.backend.memory import MemoryBackend
from multiq.backend.registry import open_backend
from multiq.errors import BackendNotInstalled, TaskExists, TaskNotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


@pytest.fixture
def app() -> Iterator[multiq.App]:
    with multiq.App("memory://") as app:
        yield app


def work(number: int = 0) -> int:
    return number


# --- registering ---


def test_both_spellings_register_under_the_function_s_name(app: multiq.App) -> None:
    @app.task
    def one() -> None: ...

    @app.task()
    def two() -> None: ...

    @app.task(name="three.more")
    def three() -> None: ...

    assert sorted(app.tasks) == ["one", "three.more", "two"]
    assert app.find_task("three.more") is three


def test_options_are_kept(app: multiq.App) -> None:
    task = app.task(
        queue="q", priority=3, ttr=9, timeout=7, max_attempts=2, max_crashes=0, retry_for=60, backoff=[1, 2]
    )(work)
    assert (task.default.queue, task.default.priority, task.default.ttr, task.timeout) == ("q", 3, 9.0, 7.0)
    policy = task.policy
    assert (policy.max_attempts, policy.max_crashes, policy.retry_for, policy.backoff(2)) == (2, 0, 60.0, 2)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"name": "a b"}, NameInvalid),
        ({"name": ""}, NameInvalid),
        ({"queue": "a b"}, NameInvalid),
        ({"priority": -1}, OptionInvalid),
        ({"ttr": 0}, OptionInvalid),
        ({"timeout": -1}, OptionInvalid),
        ({"max_attempts": -1}, OptionInvalid),
        ({"max_crashes": None}, OptionInvalid),
        ({"retry_for": "1h"}, OptionInvalid),
        ({"backoff": "exponential"}, OptionInvalid),
        ({"backoff": []}, OptionInvalid),
        ({"backoff": None}, OptionInvalid),
        ({"middleware": "log"}, OptionInvalid),
        ({"middleware": [3]}, ArgumentsInvalid),
        ({"unknown": 1}, multiq.OptionInvalid),
    ],
)
def test_a_wrong_option_is_refused_and_nothing_is_registered(
    app: multiq.App, wrong: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        app.task(**wrong)(work)
    assert app.tasks == {}


def test_the_same_function_again_is_the_same_task(app: multiq.App) -> None:
    assert app.task(work) is app.task(work)


def test_two_functions_of_one_name_are_refused_with_both_their_places(app: multiq.App) -> None:
    first = app.task(name="work")(work)
    places = r".*test_app\.work, and the new task, for .*test_app\.pytest_raises, has another"
    with pytest.raises(TaskExists, match=rf"task 'work' is already registered for {places}"):
        app.task(name="work")(pytest_raises)
    assert app.tasks == {"work": first}


def pytest_raises() -> None: ...


def test_one_function_with_two_sets_of_options_needs_two_names(app: multiq.App) -> None:
    app.task(queue="a")(work)
    with pytest.raises(TaskExists, match="other options: give one of the two tasks another name="):
        app.task(queue="b")(work)
    app.task(queue="b", name="work.b")(work)
    assert sorted(app.tasks) == ["work", "work.b"]


class Callable:
    def __call__(self, number: int) -> int:
        return number


class AsyncCallable:
    async def __call__(self, number: int) -> int:
        return number


def test_a_task_of_a_registry_is_not_registered_again() -> None:
    tasks = multiq.Tasks()

    @tasks.task()
    def work() -> None: ...

    with pytest.raises(ArgumentsInvalid, match=r"is a task already: app\.include\(tasks\) adds"):
        multiq.App("memory://").task(work)


def test_anything_that_can_be_called_can_be_a_task_if_it_has_a_name(app: multiq.App) -> None:
    partial = functools.partial(work, 3)
    for function in (partial, Callable(), AsyncCallable()):
        with pytest.raises(NameInvalid, match=r"a task must have a name, and .* has none: @app\.task\(name=\.\.\.\)"):
            app.task(function)
    assert app.task(name="partial")(partial)() == 3
    assert app.task(name="object")(Callable())(4) == 4
    assert app.task(name="async")(AsyncCallable()).is_coroutine


def test_a_lambda_has_no_name_of_its_own(app: multiq.App) -> None:
    with pytest.raises(NameInvalid, match=r"<lambda>.* has none"):
        app.task(lambda: None)
    app.task(name="short")(lambda: None)


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (generator, "a task must return a list, not yield its items, got the generator function"),
        (async_generator, "not yield its items"),
        (3, "a task must be a function, got 3"),
        ("mail.reset", "a task must be a function"),
        (type, "the signature of .* cannot be read"),
    ],
)
def test_a_function_that_would_only_seem_to_run_is_refused(app: multiq.App, function: Any, complaint: str) -> None:
    with pytest.raises(ArgumentsInvalid, match=complaint):
        app.task(function)
    assert app.tasks == {}


@pytest.mark.parametrize("name", ["on_success", "on_retry", "on_failure"])
def test_a_hook_of_other_libraries_is_refused_with_what_replaces_it(app: multiq.App, name: str) -> None:
    options: Any = {name: print}
    with pytest.raises(OptionInvalid, match=rf"unknown task option {name}=.*: did you mean middleware=\[...\]"):
        app.task(**options)(work)


def test_an_unknown_task_is_refused_with_a_list_of_the_known_ones(app: multiq.App) -> None:
    with pytest.raises(TaskNotFound, match="there is no task 'wrok' in this app; registered: none"):
        app.find_task("wrok")
    app.task(work)
    with pytest.raises(TaskNotFound, match="registered: work"):
        app.find_task("wrok")
    with pytest.raises(NameInvalid):
        app.find_task("a b")


# --- connections ---


def test_the_connection_is_a_url_a_name_or_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = multiq.Settings(url="memory://default", connections={"mails": "memory://mails"})
    assert multiq.App(settings=settings).url == "memory://default"
    assert multiq.App("mails", settings=settings).url == "memory://mails"
    assert multiq.App("memory://other", settings=settings).url == "memory://other"
    with pytest.raises(SettingsInvalid, match=r"'mail' is neither a URL .* nor a configured connection"):
        multiq.App("mail", settings=settings)
    monkeypatch.setenv("MULTIQ_URL", "memory://from-the-environment")
    assert multiq.App().url == "memory://from-the-environment"


def test_nothing_is_opened_before_it_is_needed(tmp_path: Path) -> None:
    with multiq.App(f"sqlite:///{tmp_path}/jobs.db") as app:
        app.task(work)
        app.queue("q")
        assert list(tmp_path.iterdir()) == []
        app.queue("q").enqueue(1)
        assert (tmp_path / "jobs.db").exists()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("memory://?nonsense=1", UrlInvalid),
        ("nonsense://localhost", BackendNotInstalled),
        ("sqlite://", UrlInvalid),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_at_the_first_use(url: str, error: type[Exception]) -> None:
    app = multiq.App(url)
    for _ in range(2):
        with pytest.raises(error):
            app.queue().stats()


def test_an_app_shows_no_password() -> None:
    assert repr(multiq.App("redis://ann:S3CR3T@localhost/0")) == "App('redis://ann:***@localhost/0', 0 tasks)"


def test_queues_are_made_once(app: multiq.App) -> None:
    assert app.queue("a") is app.queue("a")
    assert app.queue("a") is not app.queue("b")
    assert app.queue() is app.queue("default")
    assert repr(app.queue("a")) == "Queue('a')"


def test_an_app_with_very_many_queue_names_keeps_only_the_queues_that_reserve(app: multiq.App) -> None:
    reserving = app.queue("reserving")
    reserving.enqueue(1)
    (job,) = reserving.reserve_many(1, timeout=0)
    late = app.queue("late")
    one_of_many = weakref.ref(app.queue("customer"))
    for number in range(3000):
        app.queue(f"customer-{number}").enqueue(number)
    gc.collect()
    assert one_of_many() is None
    assert app.queue("reserving") is reserving
    job.ack()
    assert late.reserve_many(1, timeout=0) == []
    assert app.queue("late") is late  # its connection is closed with the app


def reserved(queue: multiq.Queue, *, is_async: bool) -> list[Any]:
    if is_async:
        return [job.body for job in asyncio.run(queue.areserve_many(9))]
    return [job.body for job in queue.reserve_many(9)]


@pytest.mark.parametrize("is_async", [False, True], ids=["a thread", "a coroutine"])
def test_a_queue_reserves_where_it_enqueues_although_the_app_was_connected_elsewhere(
    tmp_path: Path, *, is_async: bool
) -> None:
    with multiq.App(f"sqlite:///{tmp_path}/one.db") as app:
        # Given a queue on which jobs were reserved
        queue = app.queue()
        queue.enqueue("first")
        assert reserved(queue, is_async=is_async) == ["first"]
        queue.enqueue("kept")
        # When the app uses another backend for a while, or another connection from then on
        with app.using(MemoryBackend()):
            queue.enqueue("in a test")
            # Then the queue uses the same one
            assert reserved(queue, is_async=is_async) == ["in a test"]
        assert reserved(queue, is_async=is_async) == ["kept"]
        app.connect(f"sqlite:///{tmp_path}/two.db")
        queue.enqueue("second")
        assert reserved(queue, is_async=is_async) == ["second"]


def test_threads_that_use_an_app_first_at_once_share_one_backend() -> None:
    app = multiq.App("memory://")
    start, seen = threading.Barrier(8), []

    def look() -> None:
        start.wait(30)
        seen.append((app.backend, app.queue("q")))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({id(backend) for backend, _ in seen}) == len({id(queue) for _, queue in seen}) == 1


def test_parent_and_forked_child_share_an_app(tmp_path: Path) -> None:
    with multiq.App(f"sqlite:///{tmp_path}/jobs.db") as app:
        task = app.task(work)
        task.enqueue(1)
        pid = os.fork()
        if pid == 0:
            task.enqueue(2)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        task.enqueue(3)
        assert app.queue().stats().ready == 3


# --- events ---


def test_subscribing_leaves_the_function_as_it_is(app: multiq.App) -> None:
    @app.on(events.JobLost)
    def watch(event: events.JobLost) -> str:
        return event.job_id

    assert watch(events.JobLost(queue="q", job_id="1")) == "1"
    assert app.events.listeners[events.JobLost]


# --- a backend instead of a connection ---


def test_an_app_takes_a_backend_instead_of_a_connection() -> None:
    backend = open_backend("memory://")
    with multiq.App(backend=backend) as app:
        assert app.backend is backend
        assert app.url == "memory://"
        app.task(work).enqueue(1)
        assert backend.stats("default").ready == 1
        app.connect("memory://other")
        assert app.backend is not backend


def test_a_value_that_is_not_a_backend_is_refused_without_showing_it() -> None:
    wrong: Any = "redis://:S3CR3T@host"
    with pytest.raises(OptionInvalid, match=r"backend must be a Backend.*got a str") as caught:
        multiq.App(backend=wrong)
    assert "S3CR3T" not in str(caught.value)
    with pytest.raises(OptionInvalid, match="got both"):
        multiq.App("memory://", backend=open_backend("memory://"))
