"""multiq as the backend of Django's tasks: flags, enqueues, results, signals, discovery, settings and checks."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import importlib
import json
import sys
import threading
from typing import TYPE_CHECKING, Any

import django_shop
import djangos
import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.test import override_settings
from django.utils import timezone
from django_shop import tasks as shop
from django_shop.models import Order
from djangos import tasks, work
from servers.redis import RedisServer
from stores import PAIRED, STORES

import multiq
from multiq import errors, testing
from multiq.backend import Ack, After, Release
from multiq.conformance.threads import HANGS
from multiq.contrib.django import framework, get_app, task_options
from multiq.contrib.django.framework import InvalidTask, Status, TaskResultDoesNotExist
from multiq.schedules import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from multiq.contrib.django import TaskBackend

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[TaskBackend]:
    with tasks(f"sqlite:///{tmp_path}/jobs.db") as backend:
        yield backend


# --- the flags ---


@pytest.mark.parametrize(
    ("url", "get_result"),
    [
        ("memory://", True),
        ("sqlite:////nowhere/jobs.db", True),
        ("redis://localhost", True),
        ("mysql://localhost/jobs", True),
        ("beanstalk://localhost", False),
        ("beanstalk://localhost?store=redis://localhost", True),
    ],
)
def test_the_flags_are_derived_from_the_capabilities_without_a_call_of_the_store(url: str, get_result: bool) -> None:
    with tasks(url) as backend:
        assert backend.supports_get_result is get_result
        assert (backend.supports_defer, backend.supports_async_task, backend.supports_priority) == (True, True, True)


def test_a_backend_that_keeps_no_results_supports_none(tmp_path: Path) -> None:
    with tasks(f"sqlite:///{tmp_path}/jobs.db", keep=0) as backend:
        assert not backend.supports_get_result
        result = shop.add.enqueue(1)
        work(backend)
        with pytest.raises(NotImplementedError):
            result.refresh()


# --- results ---


def test_a_result_follows_its_job(backend: TaskBackend) -> None:
    # given an enqueued task
    before = timezone.now() - dt.timedelta(milliseconds=1)
    result = shop.add.enqueue(1, two=2)
    assert (result.status, result.args, result.kwargs, result.backend) == (Status.READY, [1], {"two": 2}, "default")
    assert before <= result.enqueued_at <= timezone.now()
    assert len(result.id) <= 64
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value

    # when it has run
    work(backend)
    result.refresh()

    # then its result has all values that Django asks for
    assert (result.status, result.return_value, result.errors, result.attempts) == (Status.SUCCESSFUL, 3, [], 1)
    assert before <= result.enqueued_at <= result.started_at <= result.finished_at <= timezone.now()
    assert result.last_attempted_at == result.started_at
    again = shop.add.get_result(result.id)
    assert (again, again.task, again.args, again.kwargs) == (result, shop.add, [1], {"two": 2})


def test_a_coroutine_is_a_task(backend: TaskBackend) -> None:
    result = shop.add_later.enqueue(1, 2)
    work(backend)
    result.refresh()
    assert result.return_value == 3


def test_the_asynchronous_calls_do_the_same(backend: TaskBackend) -> None:
    async def enqueue() -> Any:
        result = await shop.add.aenqueue(1, two=2)
        assert (result.status, result.args) == (Status.READY, [1])
        await result.arefresh()
        return result

    result = asyncio.run(enqueue())
    work(backend)

    async def look() -> Any:
        with pytest.raises(TaskResultDoesNotExist):
            await shop.add.aget_result("nothing")
        return await shop.add.aget_result(result.id)

    assert asyncio.run(look()).return_value == 3


def test_a_task_gets_its_context(backend: TaskBackend) -> None:
    result = shop.tell.enqueue("a", "b")
    work(backend)
    result.refresh()
    assert result.return_value == {
        "id": result.id, "attempt": 1, "words": ["a", "b"], "args": ["a", "b"], "path": "tell",
    }  # fmt: skip


def test_a_failed_task_has_the_error_of_each_attempt(backend: TaskBackend) -> None:
    result = shop.fail.enqueue("mail")
    work(backend)
    result.refresh()
    assert (result.status, result.attempts, len(result.worker_ids)) == (Status.FAILED, 3, 3)
    assert [error.exception_class for error in result.errors] == [ValueError] * 3
    assert result.errors[0].traceback == "ValueError: no mail\n"
    assert 'raise ValueError(f"no {word}")\nValueError: no mail\n' in result.errors[-1].traceback
    assert "multiq/worker" not in result.errors[-1].traceback
    assert result.enqueued_at <= result.started_at <= result.last_attempted_at <= result.finished_at
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value


def test_a_task_that_succeeds_later_keeps_its_earlier_errors(backend: TaskBackend, tmp_path: Path) -> None:
    result = shop.fail_once.enqueue(str(tmp_path / "failed"))
    work(backend)
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == (Status.SUCCESSFUL, "done", 2)
    assert [error.exception_class for error in result.errors] == [LookupError]


def test_django_s_tasks_run_once_unless_an_option_says_more(backend: TaskBackend, tmp_path: Path) -> None:
    result = shop.fail_now.enqueue()
    work(backend)
    result.refresh()
    assert (result.status, result.attempts, result.errors[0].exception_class) == (Status.FAILED, 1, KeyError)

    # given an option of the backend, then it is the default of all tasks, and a task's own value takes precedence
    with tasks(f"sqlite:///{tmp_path}/jobs.db", max_attempts=2, backoff=0) as other:
        results = [shop.fail_now.enqueue(), shop.fail.enqueue("x")]
        work(other)
        for result in results:
            result.refresh()
        assert [result.attempts for result in results] == [2, 3]


def test_a_value_that_is_not_json_fails_the_task(backend: TaskBackend) -> None:
    result = shop.give_a_set.enqueue()
    work(backend)
    result.refresh()
    assert (result.status, result.errors[0].exception_class) == (Status.FAILED, TypeError)
    assert "Unsupported type" in result.errors[0].traceback


def test_a_value_that_is_too_large_is_left_out_with_a_note(backend: TaskBackend) -> None:
    most = backend.app.settings.max_result
    results = [shop.give.enqueue(size) for size in (most - 400, most - 20, most)]
    work(backend)
    for result in results:
        result.refresh()
    assert [result.status for result in results] == [Status.SUCCESSFUL] * 3
    assert [len(result.return_value or "") for result in results] == [most - 400, 0, 0]
    assert "max_result allows" in results[-1].errors[0].traceback
    assert results[-1].errors[0].exception_class is errors.ResultOmitted


def test_arguments_that_are_not_json_are_refused(backend: TaskBackend) -> None:
    for arguments in ((object(),), ({1, 2},), (dt.datetime.now(dt.UTC),)):
        with pytest.raises(TypeError, match="Unsupported type"):
            shop.add.enqueue(*arguments)
    with pytest.raises(errors.ArgumentsInvalid, match="too many positional arguments"):
        shop.add.enqueue(1, 2, 3)
    assert backend.app.queue().stats().ready == 0


def test_a_tuple_becomes_a_list_and_a_number_is_no_key(backend: TaskBackend) -> None:
    result = shop.tell.enqueue(("a", 1), {"1": b"text"})
    assert result.args == [["a", 1], {"1": "text"}]
    work(backend)
    result.refresh()
    assert result.return_value["words"] == [["a", 1], {"1": "text"}]
    with pytest.raises(errors.PayloadInvalid, match="has the key 1: JSON's keys are strings"):
        shop.tell.enqueue({1: "b"})


def test_run_after_priority_and_queue_are_the_job_s(backend: TaskBackend) -> None:
    # given tasks with Django's options
    after = timezone.now() + dt.timedelta(hours=1)
    late = shop.add.using(run_after=after, queue_name="late").enqueue(1)
    first, last = shop.add.using(priority=100).enqueue(1), shop.add.using(priority=-100).enqueue(2)

    # then multiq's task has these options as a delay, a priority and a queue
    due = backend.app.queue("late").peek(late.id).due_in
    assert due is not None
    assert 3590 < due <= 3600
    assert [backend.app.queue().peek(result.id).priority for result in (first, last)] == [24, 2024]
    assert [backend.app.queue().reserve(timeout=0).id for _ in range(2)] == [first.id, last.id]

    # and a result has the options again
    found = shop.add.get_result(late.id)
    assert (found.task.run_after, found.task.queue_name, found.status) == (after, "late", Status.READY)
    assert shop.add.get_result(first.id).task.priority == 100


def test_a_running_task_is_running(backend: TaskBackend) -> None:
    result = shop.add.enqueue(1)
    job = backend.app.queue().reserve(timeout=0)
    result.refresh()
    assert (result.status, result.attempts) == (Status.RUNNING, 1)
    job.release()
    result.refresh()
    assert result.status == Status.READY


@pytest.mark.parametrize(
    "wrong", ["nothing", "", "x" * 300, "a b", "é", "\0", "../..", "01a20865-3a39-7000-a824-430bea776a9a"]
)
def test_a_result_that_does_not_exist_is_told(backend: TaskBackend, wrong: str) -> None:
    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result(wrong)


@pytest.mark.parametrize("at", [1e300, 1e12, -1e11])
def test_a_time_that_no_calendar_has_is_no_obstacle_for_a_result(backend: TaskBackend, at: float) -> None:
    # given a job with an attempt whose time another program has stored
    result = shop.add.enqueue(1)
    consumer = backend.app.backend.consumer(["default"])
    (lease,) = consumer.reserve(1, 5)
    error = {"at": at, "attempt": 1, "error": "away", "worker": "shop:1", "seconds": 0.5}
    consumer.settle([Release(lease, after=After(memo=json.dumps({"errors": [error]}).encode()))])
    consumer.close()

    # then the result exists
    assert backend.get_result(result.id).status == Status.READY


def test_an_outcome_of_another_program_is_no_result(backend: TaskBackend, caplog: pytest.LogCaptureFixture) -> None:
    # given a job that is gone, with an outcome that is not multiq's
    result = shop.add.enqueue(1)
    consumer = backend.app.backend.consumer(["default"])
    (lease,) = consumer.reserve(1, 5)
    consumer.settle([Ack(lease, After(keep=60, outcome=b"done"))])
    consumer.close()

    # then there is no result, and the log says why
    with pytest.raises(TaskResultDoesNotExist):
        result.refresh()
    assert f"the outcome of job {result.id} cannot be read" in caplog.text


def test_a_job_that_is_no_task_of_django_s_is_no_result(backend: TaskBackend) -> None:
    queue = backend.app.queue()
    plain = [
        queue.enqueue(body) for body in (b"bytes", {"any": "json"}, {"multiq": 1, "task": "os.system", "args": []})
    ]
    plain.append(shop.shop.tasks["shop.total"].enqueue(1) if hasattr(shop.shop, "tasks") else shop.total.enqueue(1))
    for handle in plain:
        with pytest.raises(TaskResultDoesNotExist):
            backend.get_result(handle.id)


@pytest.mark.parametrize(
    "store",
    ["redis", "beanstalk", *(pytest.param(name, marks=pytest.mark.long) for name in ("mysql", "beanstalk+store"))],
)
def test_tasks_run_on_each_store(store: str, tmp_path: Path) -> None:
    with STORES[store](tmp_path) as url, tasks(url, transaction="now") as backend:
        good, bad = shop.add.enqueue(1, 2), shop.fail.using(priority=5).enqueue("x")
        assert good.id
        assert good.enqueued_at is not None
        work(backend)
        if backend.supports_get_result:
            good.refresh()
            bad.refresh()
            assert (good.return_value, good.attempts) == (3, 1)
            assert bad.status == Status.FAILED
            assert {error.exception_class for error in bad.errors} == {ValueError}
            if store != PAIRED:  # while its store does not answer, each reservation counts as an attempt
                assert (bad.attempts, len(bad.errors)) == (3, 3)
        else:
            with pytest.raises(NotImplementedError):
                good.refresh()
        backend.app.close()


# --- signals ---


@contextlib.contextmanager
def noted() -> Iterator[list[tuple[str, Any, Any]]]:
    """The signals that receivers of Django's signals get."""
    seen: list[tuple[str, Any, Any]] = []
    signals = {
        "enqueued": framework.task_enqueued,
        "started": framework.task_started,
        "finished": framework.task_finished,
    }
    receivers = []
    for name, signal in signals.items():

        def note(sender: Any, task_result: Any, name: str = name, **_: Any) -> None:
            seen.append((name, task_result.status, sender))

        signal.connect(note)
        receivers.append((signal, note))
    try:
        yield seen
    finally:
        for signal, note in receivers:
            signal.disconnect(note)


@pytest.mark.parametrize("task", [shop.add, shop.add_later])
def test_the_signals_are_sent(backend: TaskBackend, task: Any) -> None:
    with noted() as seen:
        task.enqueue(1)
        work(backend)
    assert [(name, status) for name, status, _ in seen] == [
        ("enqueued", Status.READY), ("started", Status.RUNNING), ("finished", Status.SUCCESSFUL),
    ]  # fmt: skip
    assert {sender for _, _, sender in seen} == {type(backend)}


def test_a_task_is_finished_once_though_it_has_been_retried(backend: TaskBackend) -> None:
    with noted() as seen:
        shop.fail.enqueue("x")
        work(backend)
    assert [name for name, _, _ in seen] == ["enqueued", "started", "started", "started", "finished"]
    assert seen[-1][1] == Status.FAILED


def test_a_slow_receiver_does_not_block_the_event_loop(backend: TaskBackend) -> None:
    # given a receiver that waits for another job of the same event loop, and is called when a coroutine has failed
    answers: list[bool] = []

    def wait(task_result: Any, **_: Any) -> None:
        if task_result.status == Status.FAILED:
            shop.receiver_waits.set()
            answers.append(shop.receiver_may_go.wait(HANGS))

    shop.receiver_waits.clear()
    shop.receiver_may_go.clear()
    framework.task_finished.connect(wait)
    try:
        shop.let_the_receiver_go.enqueue()
        for _ in range(3):
            shop.fail_later.enqueue()
        # when both run at the same time
        work(backend, concurrency=5)
    finally:
        framework.task_finished.disconnect(wait)

    # then the other job has run while the receiver waited, and the worker has waited for all receivers at its end
    assert answers == [True] * 3


def test_a_receiver_that_fails_changes_nothing(backend: TaskBackend) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("receiver")

    for signal in (framework.task_enqueued, framework.task_started, framework.task_finished):
        signal.connect(fail)
    try:
        result = shop.add.enqueue(1)
        work(backend)
    finally:
        for signal in (framework.task_enqueued, framework.task_started, framework.task_finished):
            signal.disconnect(fail)
    result.refresh()
    assert result.status == Status.SUCCESSFUL


@pytest.mark.parametrize("concurrency", [0, 5])
def test_a_receiver_may_use_the_database_for_tasks_of_all_kinds(backend: TaskBackend, concurrency: int) -> None:
    # given a signal receiver that writes a row for each end of a task
    used: list[Any] = []

    def note(task_result: Any, **_: Any) -> None:
        used.append(connections["default"])
        Order.objects.create(number=len(task_result.errors), note=f"{task_result.task.name} {task_result.status}")

    framework.task_finished.connect(note)
    try:
        for task in (shop.add_later, shop.add):
            task.enqueue(1)
        shop.fail_later.enqueue()
        shop.fail_now.enqueue()
        work(backend, concurrency=concurrency)
    finally:
        framework.task_finished.disconnect(note)

    # then each connection is closed, wherever the receiver has used it
    assert [connection.connection for connection in used] == [None] * 4

    # and there is a row for each task, also for tasks that are coroutines
    assert sorted((order.note, order.number) for order in Order.objects.all()) == [
        ("add SUCCESSFUL", 0), ("add_later SUCCESSFUL", 0), ("fail_later FAILED", 1), ("fail_now FAILED", 1),
    ]  # fmt: skip


# --- discovery ---


def test_the_modules_tasks_of_installed_apps_are_found(backend: TaskBackend) -> None:
    backend.app.load_included()
    found = set(backend.app.tasks)
    assert {"django_shop.tasks.add", "django_shop.tasks.add_later", "shop.total"} <= found
    assert set(multiq.Worker(backend.app).queues) == {"default", "mail", "shop"}
    with tasks("memory://", queues=["default", "mail", "rare"]) as other:
        assert set(multiq.Worker(other.app).queues) == {"default", "mail", "rare", "shop"}


def test_a_task_elsewhere_needs_its_module_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "from multiq.contrib.django.framework import task\n@task\ndef work():\n    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with tasks("memory://", include=["elsewhere"]) as backend:
        backend.app.load_included()
        assert "elsewhere.work" in backend.app.tasks
    with tasks("memory://", include=["nowhere"]) as backend, pytest.raises(errors.IncludeInvalid, match="nowhere"):
        backend.app.load_included()


def test_a_job_cannot_name_what_is_no_task(backend: TaskBackend, caplog: pytest.LogCaptureFixture) -> None:
    # given jobs that name functions and modules of the system, and of this project
    names = ["os.system", "antigravity.fly", "django_shop.models.Order", "django_shop.tasks.time", "sys.exit"]
    handles = [backend.app.queue().enqueue({"multiq": 1, "task": name, "args": ["x"], "kwargs": {}}) for name in names]

    # when a worker has looked at them, then none was called
    work(backend)
    assert {handle.peek().attempt for handle in handles} == {1}
    assert all("this worker knows no task" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == len(names)
    assert "antigravity" not in sys.modules


def test_a_task_in_another_module_is_refused_before_it_is_enqueued(
    backend: TaskBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a task in a module that no worker imports
    monkeypatch.setattr(django_shop, "__path__", [*django_shop.__path__, str(tmp_path)])
    text = "from multiq.contrib.django import task\n@task\ndef work():\n    return 1\n"
    (tmp_path / "hidden.py").write_text(text)
    hidden = importlib.import_module("django_shop.hidden").work

    # then it is refused, and a job of this task imports nothing
    with pytest.raises(InvalidTask, match=r"hidden.work must be a variable of a module that workers import"):
        hidden.enqueue()
    del sys.modules["django_shop.hidden"]
    backend.app.queue().enqueue({"multiq": 1, "task": "django_shop.hidden.work", "args": [], "kwargs": {}})
    work(backend)
    assert "django_shop.hidden" not in sys.modules

    # and it is accepted if the option names its module
    with tasks(f"sqlite:///{tmp_path}/jobs2.db", include=["django_shop.hidden"]) as other:
        result = importlib.import_module("django_shop.hidden").work.enqueue()
        work(other)
        result.refresh()
        assert result.return_value == 1
    del sys.modules["django_shop.hidden"]


def test_a_local_function_is_no_task(backend: TaskBackend) -> None:
    def local() -> None:
        pass

    with pytest.raises(InvalidTask, match="module level"):
        framework.task(local)
    hidden = framework.Task(func=test_a_local_function_is_no_task)
    with pytest.raises(InvalidTask, match="must be a variable of a module that workers import"):
        hidden.enqueue()
    assert backend.app.queue().stats().ready == 0


def test_a_task_of_multiq_s_runs_beside_django_s(backend: TaskBackend) -> None:
    Order.objects.create(number=1)
    backend.app.load_included()
    handle = shop.total.enqueue(7)
    work(backend)
    assert handle.result(0) == 7


def test_options_below_the_decorator_are_checked() -> None:
    with pytest.raises(errors.OptionInvalid, match=r"unknown task option queue='x': use @task\(queue_name"):
        task_options(queue="x")
    with pytest.raises(errors.OptionInvalid, match="max_attempts"):
        task_options(max_attempts=-1)
    with pytest.raises(errors.ArgumentsInvalid, match="below Django's @task"):
        task_options(max_attempts=2)(shop.add)


# --- settings ---


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"OPTIONS": {"uri": "memory://"}}, r"TASKS\['default'\]: unknown option 'uri': did you mean 'url'\?"),
        ({"OPTIONS": {"url": "nonsense"}}, "nonsense"),
        ({"OPTIONS": {"url": ""}}, "url must be a URL like"),
        ({"OPTIONS": {"url": "oracle://x"}}, "oracle"),
        ({"OPTIONS": {"transaction": "maybe"}}, "transaction must be one of auto, join, on_commit, now, got 'maybe'"),
        ({"OPTIONS": {"database": "other"}}, r"database must be an alias of DATABASES \(default\), got 'other'"),
        ({"OPTIONS": {"include": "shop"}}, "include must be a list of modules"),
        ({"OPTIONS": {"max_attempts": -1}}, "OPTIONS: max_attempts"),
        ({"OPTIONS": {"keep": -1}}, "OPTIONS: keep"),
        ({"OPTIONS": ["url"]}, "OPTIONS must be a dict"),
        ({"QUEUES": None}, "QUEUES must be a list of names, got None"),
        ({"QUEUES": "default"}, "QUEUES must be a list of names, got 'default'"),
        ({"QUEUES": ["a b"]}, "QUEUES: "),
        ({"QUEUE": ["a"]}, "unknown key 'QUEUE': there are BACKEND, QUEUES and OPTIONS"),
    ],
)
def test_a_wrong_setting_is_named(parameters: dict[str, Any], told: str) -> None:
    backend = {"BACKEND": "multiq.contrib.django.TaskBackend", **parameters}
    with override_settings(TASKS={"default": backend}), pytest.raises(ImproperlyConfigured, match=told):
        _ = djangos.task_backends()["default"].supports_priority


def test_the_setting_multiq_has_the_keys_of_the_configuration_file() -> None:
    with (
        override_settings(MULTIQ={"url": "memory://", "max_body": 200, "worker": {"threads": 3}}),
        tasks(None) as backend,
    ):
        assert (backend.app.url, backend.app.settings.worker.threads) == ("memory://", 3)
        with pytest.raises(errors.PayloadTooLarge):
            shop.tell.enqueue("x" * 300)
    for wrong, told in (
        ({"threads": 3}, r"settings\.MULTIQ: threads"),
        ("memory://", "MULTIQ must be a dict"),
        ({5: 1}, r"settings\.MULTIQ: a key must be a text, like 'url', got 5"),
        ({"worker": {None: 1}}, r"settings\.MULTIQ: a key must be a text, like 'worker\.\w+', got None"),
        ({"connections": {("a",): "memory://"}}, r"a key must be a text, like 'connections\.NAME', got \('a',\)"),
    ):
        with override_settings(MULTIQ=wrong), pytest.raises(ImproperlyConfigured, match=told), tasks(None):
            pass


def test_an_environment_variable_comes_before_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIQ_URL", "memory://")
    with override_settings(MULTIQ={"url": "redis://localhost"}), tasks(None) as backend:
        assert backend.app.url == "memory://"


def test_a_queue_that_is_not_listed_is_refused() -> None:
    with tasks("memory://", queues=["default", "mail"]) as backend:
        with pytest.raises(InvalidTask, match="late"):
            shop.add.using(queue_name="late")
        assert backend.app.settings.worker.queues == ("default", "mail")


def test_each_alias_has_an_app(tmp_path: Path) -> None:
    parameters = {"BACKEND": "multiq.contrib.django.TaskBackend", "QUEUES": []}
    both = {
        "default": {**parameters, "OPTIONS": {"url": "memory://"}},
        "slow": {**parameters, "OPTIONS": {"url": f"sqlite:///{tmp_path}/slow.db"}},
        "other": {"BACKEND": f"{framework.PACKAGE}.backends.dummy.DummyBackend"},
    }
    with override_settings(TASKS=both):
        slow = djangos.task_backends()["slow"]
        assert get_app() is djangos.task_backends()["default"].app
        result = shop.add.using(backend="slow").enqueue(1, 2)
        assert [get_app(alias).queue().stats().ready for alias in (result.backend, "default")] == [1, 0]
        work(slow)
        result.refresh()
        assert (result.return_value, result.task.backend) == (3, "slow")
        with pytest.raises(ImproperlyConfigured, match=r"must be multiq\.contrib\.django\.TaskBackend"):
            get_app("other")
        with pytest.raises(ImproperlyConfigured, match="TASKS has no backend 'none': there are default, slow, other"):
            get_app("none")


def test_a_worker_of_an_alias_without_tasks_of_its_own_runs_those_that_are_sent_to_it(tmp_path: Path) -> None:
    # given a second backend with a queue of its own, and a task whose decorator names the first one
    parameters = {"BACKEND": "multiq.contrib.django.TaskBackend"}
    both = {
        "default": {**parameters, "QUEUES": [], "OPTIONS": {"url": "memory://"}},
        "slow": {**parameters, "QUEUES": ["slow"], "OPTIONS": {"url": f"sqlite:///{tmp_path}/slow.db"}},
    }
    with override_settings(TASKS=both):
        result = shop.add.using(backend="slow", queue_name="slow").enqueue(1)
    with override_settings(TASKS=both):  # as in another process, in which nothing was enqueued
        app = get_app("slow")
        app.load_included()

        # then its app has tasks, and its worker serves only its own queue
        assert "django_shop.tasks.add" in app.tasks
        assert multiq.Worker(app).queues == ("slow",)
        work(djangos.task_backends()["slow"])
        result.refresh()
        assert result.return_value == 1


def test_times_are_naive_without_time_zones(tmp_path: Path) -> None:
    with (
        override_settings(USE_TZ=False, TIME_ZONE="America/Chicago"),
        tasks(f"sqlite:///{tmp_path}/jobs.db") as backend,
    ):
        after = dt.datetime.now() + dt.timedelta(hours=1)  # noqa: DTZ005
        late = shop.add.using(run_after=after).enqueue(1)
        due = backend.app.queue().peek(late.id).due_in
        assert due is not None
        assert 3590 < due <= 3600
        result = shop.add.enqueue(1)
        work(backend)
        result.refresh()
        assert result.enqueued_at.tzinfo is None
        assert result.enqueued_at <= result.started_at <= result.finished_at


def test_all_threads_of_a_process_share_the_app(backend: TaskBackend) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(djangos.task_backends()["default"]))
    thread.start()
    thread.join()
    assert found[0] is not backend
    assert found[0].app is backend.app


# --- middleware ---


def test_middleware_is_around_the_enqueue_and_the_run_of_django_s_tasks(backend: TaskBackend) -> None:
    # given middleware that carries a tenant from the enqueue to the run
    seen: list[Any] = []

    class Tenant(multiq.Middleware):
        def enqueue(self, sending: Any) -> Iterator[None]:
            for job in sending.jobs:
                job.headers["tenant"] = "blue"
            yield

        def run(self, job: Any) -> Iterator[None]:
            seen.append((job.task, job.envelope.headers["tenant"]))
            yield

    backend.app.middleware(Tenant())

    # when a task is enqueued in both ways, and runs
    shop.add.enqueue(1)
    asyncio.run(shop.add.aenqueue(2))
    work(backend)

    # then the run has the header
    assert seen == [("django_shop.tasks.add", "blue")] * 2


# --- schedules ---


def test_a_task_of_django_s_has_a_schedule(backend: TaskBackend) -> None:
    # given a schedule for a task of Django's
    app = get_app()
    app.schedule(None, app.find_task("django_shop.tasks.add").s(1, 2), every=3600, name="sums")
    Scheduler(app).look()  # as a worker does

    # when it runs
    handle = app.schedules.run("sums")
    work(backend)

    # then its job runs like any other task of Django's
    assert shop.add.get_result(handle.id).return_value == 3


# --- the testing kit ---


def test_the_testing_kit_works_with_django_s_tasks(backend: TaskBackend) -> None:
    with testing.fake(get_app()) as jobs:
        result = shop.send.enqueue("ann@example.com")
        jobs.assert_enqueued("django_shop.tasks.send", ("ann@example.com",), queue="mail")
        shop.add.using(run_after=timezone.now() + dt.timedelta(hours=1)).enqueue(1)
        jobs.run()
        jobs.advance(3600)
        result.refresh()
        assert result.return_value == "ann@example.com"
    with testing.sync(get_app()):
        result = shop.add.enqueue(1, 2)
        result.refresh()
        assert result.return_value == 3
        with pytest.raises(KeyError):
            shop.fail_now.enqueue()
    assert backend.app.queue().stats().ready == 0


# --- checks ---


def ids(*, only: str = "multiq") -> list[str]:
    return [message.id for message in checks.run_checks() if str(message.id).startswith(only)]


def test_the_checks_find_nothing_wrong(backend: TaskBackend) -> None:
    assert ids() == []


@pytest.mark.parametrize(
    ("url", "options", "wanted"),
    [
        ("memory://", {}, ["multiq.W002"]),
        ("sync://", {}, []),
        ("redis://localhost", {"transaction": "join"}, ["multiq.E003"]),
        ("redis://localhost", {}, []),
        ("sqlite:///jobs.db", {}, ["multiq.W003"]),
    ],
)
def test_the_checks_tell_what_is_wrong(url: str, options: dict[str, Any], wanted: list[str]) -> None:
    with tasks(url, **options):
        assert ids() == wanted


def test_the_checks_tell_of_deferred_transactions_on_the_jobs_own_file(database: Any) -> None:
    with tasks(f"sqlite:///{database.settings_dict['NAME']}"):
        assert ids() == []
        options = database.settings_dict["OPTIONS"]
        database.settings_dict["OPTIONS"] = {}
        assert ids() == ["multiq.W004"]
        database.settings_dict["OPTIONS"] = options


def test_the_checks_tell_that_the_app_is_not_installed(backend: TaskBackend) -> None:
    from django.conf import settings

    without = [name for name in settings.INSTALLED_APPS if name != "multiq.contrib.django"]
    with override_settings(INSTALLED_APPS=without):
        from multiq.contrib.django.checking import check_app

        assert [message.id for message in check_app(backend.app)] == ["multiq.W001"]


def test_no_check_connects() -> None:
    with RedisServer() as server:
        server.pause()
        try:
            with tasks(f"{server.url}?timeout=1"):
                assert ids() == []
        finally:
            server.go_on()


def test_an_enqueue_on_a_store_that_is_gone_raises_multiq_s_error() -> None:
    with tasks("redis://127.0.0.1:1"):
        with pytest.raises(errors.BackendUnavailable):
            shop.add.enqueue(1)
        with pytest.raises(errors.BackendUnavailable):
            asyncio.run(shop.add.aenqueue(1))


def test_a_job_s_envelope_is_plain_json(backend: TaskBackend) -> None:
    result = shop.add.enqueue(1, two=2)
    body = json.loads(backend.app.backend.peek("default", result.id).body)
    assert (body["task"], body["args"], body["kwargs"]) == ("django_shop.tasks.add", [1], {"two": 2})
