"""Registries of tasks without an app: their names, the apps that include them, and the setting ``include``."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import multiq
from multiq import ArgumentsInvalid, NameInvalid, OptionInvalid, Settings, SettingsInvalid
from multiq.errors import IncludeInvalid, TaskExists, TaskNotFound, TaskNotIncluded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def app() -> Iterator[multiq.App]:
    with multiq.App("memory://") as app:
        yield app


def work(number: int = 0) -> int:
    return number


def other(number: int = 0) -> int:
    return -number


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which Python finds modules. Python forgets these modules after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def ran(app: multiq.App) -> list[str | None]:
    """Run the due jobs, and return the tasks of those that are done."""
    done: list[str | None] = []
    app.on(multiq.events.JobDone)(lambda event: done.append(event.job.task))
    multiq.Worker(app, stop_when_empty=True).run()
    return done


# --- names ---


@pytest.mark.parametrize(
    ("prefix", "options", "name"),
    [
        ("", {}, "work"),
        ("mail", {}, "mail.work"),
        ("shop.mail", {}, "shop.mail.work"),
        ("mail", {"name": "reset"}, "mail.reset"),
    ],
)
def test_a_registry_puts_its_prefix_in_front_of_names(prefix: str, options: Any, name: str) -> None:
    tasks = multiq.Tasks(prefix=prefix)
    assert tasks.task(**options)(work).name == name
    assert list(tasks.tasks) == [name]


@pytest.mark.parametrize("prefix", ["a b", "-a", "a" * 129, "mail.", None, 0, False])
def test_a_prefix_must_be_a_name(prefix: Any) -> None:
    with pytest.raises(NameInvalid, match=r"task name|prefix"):
        multiq.Tasks(prefix=prefix)


def test_a_name_too_long_with_its_prefix_is_refused() -> None:
    with pytest.raises(NameInvalid):
        multiq.Tasks(prefix="a" * 100).task(name="b" * 100)(work)


def test_options_of_a_registry_s_task_are_checked_at_once() -> None:
    with pytest.raises(OptionInvalid, match="did you mean max_attempts"):
        multiq.Tasks().task(retries=3)(work)  # type: ignore[call-overload]


def test_two_functions_of_one_name_are_both_named_with_the_way_out(app: multiq.App) -> None:
    # given
    mail, orders = multiq.Tasks(prefix="shop"), multiq.Tasks(prefix="shop")
    mail.task(name="work")(work)
    orders.task(name="first")(work)
    orders.task(name="work")(other)
    app.include(mail)

    # when
    with pytest.raises(TaskExists) as caught:
        app.include(orders)

    # then
    place = __name__
    assert str(caught.value) == (
        f"task 'shop.work' is already registered for {place}.work, and the new task, for {place}.other, has another "
        "function or other options: give one of the two tasks another name=, or register it in a registry with a "
        "prefix of its own, Tasks(prefix=__name__)"
    )
    assert list(app.tasks) == ["shop.work"], "no task of the refused registry is included"
    assert orders.apps == []


def test_a_late_clash_is_refused_and_leaves_no_trace(app: multiq.App) -> None:
    tasks = multiq.Tasks()
    app.include(tasks)
    app.task(name="work")(other)
    with pytest.raises(TaskExists):
        tasks.task(work)
    assert tasks.tasks == {}


# --- including ---


def test_an_included_task_is_enqueued_and_runs(app: multiq.App) -> None:
    tasks = multiq.Tasks(prefix="mail")
    send = tasks.task(queue="mail")(work)
    app.include(tasks)
    send.enqueue(1)
    send.options(priority=3).enqueue(2)
    send.enqueue_many([(3,)])
    assert ran(app) == ["mail.work"] * 3
    assert send(7) == 7


def test_a_task_that_no_app_includes_cannot_be_enqueued() -> None:
    send = multiq.Tasks(prefix="mail").task(work)
    advice = (
        r"'mail.work' is in a registry that no app includes: call app.include\(tasks\), or add the module '.*registry'"
    )
    with pytest.raises(TaskNotIncluded, match=advice):
        send.enqueue(1)
    with pytest.raises(TaskNotIncluded):
        multiq.chain(send.s(1), send.s(2)).enqueue()
    assert send(3) == 3, "a plain call needs no app"


def test_a_task_without_an_app_can_be_mocked_and_inspected() -> None:
    send = multiq.Tasks(prefix="mail").task(work)
    assert "app" not in dict(inspect.getmembers(send))
    for mocked in (mock.Mock(spec=send), mock.create_autospec(send)):
        mocked.enqueue(1)
        mocked.enqueue.assert_called_once_with(1)
        with pytest.raises(AttributeError):
            mocked.enqueue_all(1)


def test_a_task_with_an_app_lists_the_app(app: multiq.App) -> None:
    tasks = multiq.Tasks()
    send = tasks.task(work)
    app.include(tasks)
    assert "app" in dir(send)
    assert dict(inspect.getmembers(app.find_task("work")))["app"] is app


def test_a_task_registered_after_the_include_is_included(app: multiq.App) -> None:
    tasks = multiq.Tasks()
    app.include(tasks)
    send = tasks.task(work)
    send.enqueue(1)
    assert ran(app) == ["work"]


def test_including_twice_changes_nothing(app: multiq.App) -> None:
    tasks = multiq.Tasks()
    send = tasks.task(work)
    app.include(tasks)
    app.include(tasks)
    send.enqueue()
    assert (list(app.tasks), tasks.apps) == (["work"], [app])


def test_a_task_of_several_apps_needs_for_app(app: multiq.App) -> None:
    # given
    tasks = multiq.Tasks()
    send = tasks.task(work)
    with multiq.App("memory://") as second:
        app.include(tasks)
        second.include(tasks)

        # when
        with pytest.raises(
            TaskNotIncluded, match=r"'work' is included in 2 apps \(App\('memory://', 1 tasks\), .*for_app"
        ):
            send.enqueue(1)
        send.for_app(second).enqueue(1)
        send.for_app(second).options(delay=60).enqueue(1)

        # then
        assert (app.queue().stats().ready, second.queue().stats().ready) == (0, 1)
        assert second.find_task("work").for_app(second) is second.find_task("work")

        # when
        app.exclude(tasks)
        app.exclude(tasks)
        send.enqueue(2)

        # then
        assert second.queue().stats().ready == 2
        with pytest.raises(TaskNotFound):
            app.find_task("work")
        with pytest.raises(TaskNotIncluded, match=r"'work' is not in App\(.*app.include\(tasks\)"):
            send.for_app(app)


def test_a_registry_s_task_can_be_a_part_of_a_flow(app: multiq.App) -> None:
    tasks = multiq.Tasks()
    send = tasks.task(work)
    app.include(tasks)
    multiq.chain(send.s(1), send.s()).enqueue()
    assert ran(app) == ["work", "work"]


def test_only_a_registry_can_be_included(app: multiq.App) -> None:
    with pytest.raises(ArgumentsInvalid, match=r"include must have a multiq.Tasks, got 'shop.mail'"):
        app.include("shop.mail")  # type: ignore[arg-type]


def test_a_task_has_no_other_attributes(app: multiq.App) -> None:
    for task in (app.task(work), multiq.Tasks().task(work)):
        with pytest.raises(AttributeError, match="no attribute 'enqueu'"):
            task.enqueu  # type: ignore[attr-defined]  # noqa: B018


# --- schedules ---


def scheduled(prefix: str = "") -> multiq.Tasks:
    """A registry with one task and two schedules of it."""
    tasks = multiq.Tasks(prefix=prefix)
    task = tasks.schedule(every=60)(work)
    tasks.schedule("0 7 * * *", task.s(7), name="report")
    return tasks


@pytest.mark.parametrize("is_included_first", [False, True])
def test_an_app_has_the_schedules_of_its_registries(app: multiq.App, is_included_first: bool) -> None:
    tasks = multiq.Tasks(prefix="mail")
    if is_included_first:
        app.include(tasks)
    task = tasks.schedule(every=60)(work)
    tasks.schedule("0 7 * * *", task.s(7), name="report")
    app.include(tasks)
    found = app.code_schedules
    assert {name: schedule.task for name, schedule in found.items()} == {
        "mail.work": "mail.work",
        "mail.report": "mail.work",
    }
    assert found["mail.report"].cron == "0 7 * * *"
    assert b"[7]" in bytes(found["mail.report"].body)


def test_a_worker_runs_the_schedule_of_a_registry(app: multiq.App) -> None:
    # given a registry with a schedule of every second
    tasks = multiq.Tasks(prefix="mail")
    done: list[float] = []

    @tasks.schedule("* * * * * *")
    def tick() -> None:
        done.append(app.backend.now("default"))
        if len(done) == 2:
            worker.stop()

    # when a worker of an app that includes the registry runs
    app.include(tasks)
    worker = multiq.Worker(app)
    worker.run()

    # then the task runs each second, and the stored schedule is known to come from code
    assert len(done) == 2
    assert [(one.name, one.origin) for one in app.schedules.list()] == [("mail.tick", "code")]


def test_a_schedule_leaves_the_app_with_its_registry(app: multiq.App) -> None:
    tasks = scheduled()
    app.include(tasks)
    app.schedule(every=5, name="own")(tasks.tasks["work"])
    app.exclude(tasks)
    assert set(app.code_schedules) == {"own"}


def test_a_registry_without_an_app_checks_the_times_of_a_schedule() -> None:
    tasks = multiq.Tasks()
    with pytest.raises(multiq.errors.ScheduleInvalid, match="cron"):
        tasks.schedule("61 * * * *")(work)
    assert tasks.tasks == {}


def test_a_registry_schedules_only_its_own_tasks(app: multiq.App) -> None:
    task = app.task(work)
    with pytest.raises(ArgumentsInvalid, match="its own tasks, got task 'work'"):
        multiq.Tasks().schedule(every=5)(task)


def test_two_schedules_of_one_name_are_refused_in_a_registry() -> None:
    tasks = scheduled()
    tasks.schedule("0 7 * * *", tasks.tasks["work"].s(7), name="report")  # the same again changes nothing
    with pytest.raises(multiq.errors.ScheduleExists, match="'report' already, of task work"):
        tasks.schedule("0 8 * * *", tasks.tasks["work"].s(7), name="report")


def test_a_registry_whose_schedule_an_app_has_already_is_not_included(app: multiq.App) -> None:
    # given an app that has a schedule of the same name
    app.schedule("0 9 * * *", app.task(other).s(), name="report")
    tasks = scheduled()

    # when the app includes the registry
    with pytest.raises(multiq.errors.ScheduleExists):
        app.include(tasks)

    # then nothing of the registry is included
    assert set(app.tasks) == {"other"}
    assert set(app.code_schedules) == {"report"}
    assert tasks.apps == []


def test_a_late_schedule_that_an_app_has_already_leaves_no_trace(app: multiq.App) -> None:
    app.schedule("0 9 * * *", app.task(other).s(), name="report")
    tasks = multiq.Tasks()
    task = tasks.task(work)
    app.include(tasks)
    with pytest.raises(multiq.errors.ScheduleExists):
        tasks.schedule("0 7 * * *", task.s(7), name="report")
    app.include(tasks)
    assert app.code_schedules["report"].task == "other"


def test_a_call_that_an_app_refuses_is_refused_when_the_registry_is_included(app: multiq.App) -> None:
    tasks = multiq.Tasks()
    tasks.schedule("0 7 * * *", tasks.task(work).s(1, 2), name="report")
    with pytest.raises(ArgumentsInvalid):
        app.include(tasks)
    assert app.tasks == {}


# --- the setting ---

MAIL = """\
import multiq

tasks = multiq.Tasks(prefix=__name__)

@tasks.task
def send(address):
    pass
"""


def test_included_modules_are_imported_when_tasks_are_needed(shop: Path) -> None:
    # given
    (shop / "shop_mail.py").write_text(MAIL)
    with multiq.App("memory://", include=["shop_mail"]) as app:
        app.queue().enqueue({"any": "json"})
        assert "shop_mail" not in sys.modules

        # when / then
        assert list(app.tasks) == ["shop_mail.send"]
        app.find_task("shop_mail.send").enqueue("ann")


def test_a_bare_enqueue_finds_the_app_that_names_the_module(shop: Path) -> None:
    (shop / "shop_mail.py").write_text(MAIL)
    with multiq.App("memory://", include=["shop_mail"]) as app:
        import shop_mail  # type: ignore[import-not-found]

        shop_mail.send.enqueue("ann")
        assert ran(app) == ["shop_mail.send"]


def test_the_include_of_the_code_replaces_that_of_the_settings(shop: Path) -> None:
    (shop / "shop_mail.py").write_text(MAIL)
    settings = Settings(url="memory://", include=("missing_module",))
    with multiq.App(settings=settings, include=["shop_mail"]) as app:
        assert list(app.tasks) == ["shop_mail.send"]


def test_an_included_module_may_import_the_app(shop: Path) -> None:
    (shop / "shop_app.py").write_text("import multiq\napp = multiq.App('memory://', include=['shop_jobs'])\n")
    (shop / "shop_jobs.py").write_text("from shop_app import app\n\n@app.task\ndef work(): pass\n")
    from shop_app import app  # type: ignore[import-not-found]

    assert list(app.tasks) == ["work"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "include: module 'shop_mail' cannot be imported: ModuleNotFoundError: No module named 'shop_mail'"),
        ("1 / 0", "include: module 'shop_mail' cannot be imported: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "include: module 'shop_mail' cannot be imported: SystemExit: 3"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(shop: Path, content: str | None, message: str) -> None:
    if content is not None:
        (shop / "shop_mail.py").write_text(content)
    app = multiq.App("memory://", include=["shop_mail"])
    for _ in range(2):  # the same happens the second time
        with pytest.raises(IncludeInvalid) as caught:
            multiq.Worker(app)
        assert str(caught.value) == message
    multiq.registry.not_loaded.discard(app)


@pytest.mark.parametrize("include", ["shop.mail", ["shop/mail.py"], [3], ["shop:tasks"]])
def test_the_setting_is_a_list_of_modules(include: Any) -> None:
    with pytest.raises(SettingsInvalid, match=r"include: .*must be a (list of modules|module)"):
        Settings(include=include)
    with pytest.raises(OptionInvalid, match=r"include .*must be a (list of modules|module)"):
        multiq.App("memory://", include=include)
