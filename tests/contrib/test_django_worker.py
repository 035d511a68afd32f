"""``manage.py multiq``: workers of a project as real processes, and Django's connections between their jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction
from django_shop import tasks as shop
from django_shop.models import Order
from djangos import tasks, work
from servers.mysql import any_server
from servers.process import until
from servers.redis import RedisServer

import multiq
from multiq.contrib.django.framework import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.mysql import MysqlDatabases, Place

ROOT = Path(__file__).parents[2]
TABLES = ("migrate", "--run-syncdb", "--verbosity", "0")


class Project:
    """``django_shop`` with its databases and backends, in processes of its own."""

    def __init__(self, folder: Path, *, url: str, database: dict[str, Any], **options: Any) -> None:
        self.folder = folder
        self.backend = {
            "BACKEND": "multiq.contrib.django.TaskBackend",
            "QUEUES": [],
            "OPTIONS": {"url": url, **options},
        }
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests"),
            "DJANGO_SHOP_DATABASES": json.dumps({"default": database}),
            "DJANGO_SHOP_TASKS": json.dumps({"default": self.backend}),
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(ROOT / "tests/django_shop/manage.py"), *arguments]

    def manage(self, *arguments: str, code: int = 0) -> str:
        """Run a command, and return what it prints."""
        done = subprocess.run(
            self.command(*arguments), cwd=self.folder, env=self.environment, capture_output=True, text=True,
            check=False, timeout=200,
        )  # fmt: skip
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                self.command(*arguments), cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        self.started.append(process)
        return process

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


@pytest.fixture
def project(database: Any, tmp_path: Path) -> Iterator[Project]:
    """A project whose jobs are in the database; this process uses the same database."""
    settings = {key: database.settings_dict[key] for key in ("ENGINE", "NAME", "OPTIONS")}
    project = Project(tmp_path, url=f"sqlite:///{tmp_path}/jobs.db", database=settings)
    with tasks(project.backend["OPTIONS"]["url"]):  # type: ignore[index]
        yield project
    project.close()


def finished(result: Any) -> bool:
    result.refresh()
    return bool(result.is_finished)


# --- the command ---


def test_manage_py_multiq_runs_the_tasks_of_a_project(project: Project) -> None:
    # given tasks that this process has enqueued
    results = [shop.note.enqueue(1), shop.anote.enqueue(2), shop.fail_now.enqueue(), shop.send.enqueue("ann")]

    # when a worker of the project has run
    printed = project.manage("multiq", "worker", "--stop-when-empty", "-p", "1")

    # then the rows and the results are there, and another process wrote them
    for result in results:
        result.refresh()
    assert [result.status for result in results] == [Status.SUCCESSFUL] * 2 + [Status.FAILED, Status.SUCCESSFUL]
    number, pid, _ = results[0].return_value
    assert (number, pid != os.getpid()) == (1, True)
    assert sorted(order.number for order in Order.objects.all()) == [1, 2]
    assert results[0].worker_ids[0].endswith(f":{pid}")
    assert "KeyError" in printed


@pytest.mark.long
def test_a_worker_of_several_processes_and_threads_runs_until_sigterm(project: Project) -> None:
    worker = project.start("multiq", "worker", "-p", "2", "-t", "2", "-q", "default")
    results = [shop.note.enqueue(number) for number in range(20)]
    until(lambda: all(finished(result) for result in results), "all tasks have run")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0, project.log
    assert {result.status for result in results} == {Status.SUCCESSFUL}, project.log
    assert sorted(order.number for order in Order.objects.all()) == list(range(20))
    assert "Traceback" not in project.log


@pytest.mark.long
def test_the_other_commands_work_with_the_project_s_backend(project: Project) -> None:
    printed = project.manage("multiq", "enqueue", "django_shop.tasks.add", "--args", "[1, 2]")
    (job_id,) = re.findall(r"^[0-9a-f-]{36}$", printed, re.MULTILINE)
    assert json.loads(project.manage("multiq", "stats", "--json"))["queues"][0]["ready"] == 1
    assert job_id in project.manage("multiq", "jobs", "default", "ready")
    assert "jobs.db" in project.manage("multiq", "doctor", code=0)
    project.manage("multiq", "tick")
    project.manage("multiq", "worker", "--stop-when-empty", "-p", "0")
    assert shop.add.get_result(job_id).return_value == 3
    assert "settings: those of django_shop.settings:TASKS['default']" in project.manage("multiq", "-v", "stats")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["worker", "--check"], 0, ""),
        pytest.param(["--help"], 0, "Usage: manage.py multiq", marks=pytest.mark.long),
        pytest.param(["worker", "--help"], 0, "Usage: manage.py multiq worker", marks=pytest.mark.long),
        pytest.param(["nonsense"], 2, "there is no command 'nonsense'", marks=pytest.mark.long),
        pytest.param(["peek", "1"], 3, "no queue has job 1", marks=pytest.mark.long),
        pytest.param(["-c", "memory://", "stats"], 0, "", marks=pytest.mark.long),
        (["--backend", "none", "stats"], 2, "error: TASKS has no backend 'none': there are default"),
        pytest.param(["--backend=default", "stats"], 0, "", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_manage_py_multiq_has_the_options_and_exit_codes_of_multiq(
    project: Project, arguments: list[str], code: int, told: str
) -> None:
    with multiq.App(f"sqlite:///{project.folder}/jobs.db") as app:
        app.queue().stats()
    printed = project.manage("multiq", *arguments, code=code)
    assert told in printed
    assert "Traceback" not in printed


@pytest.mark.long
def test_django_admin_takes_its_own_options(project: Project) -> None:
    del project.environment["PYTHONPATH"]
    command = [sys.executable, "-m", "django", "multiq", "enqueue", "django_shop.tasks.tell", "--args", '["--", "-x"]']
    command += ["--settings", "django_shop.settings", f"--pythonpath={ROOT / 'tests'}"]
    subprocess.run(command, cwd=project.folder, env=project.environment, check=True, timeout=100)
    with multiq.App(f"sqlite:///{project.folder}/jobs.db") as app:
        assert [job.value["args"] for job in app.queue().jobs("ready")] == [["--", "-x"]]


def test_call_command_runs_a_command(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    shop.add.enqueue(1)
    call_command("multiq", "stats", "--json")
    assert json.loads(capsys.readouterr().out)["queues"][0]["ready"] == 1
    with pytest.raises(CommandError, match="ended with code 3"):
        call_command("multiq", "peek", "1")


def test_the_model_of_failed_jobs_has_no_table_and_needs_no_migration(database: Any) -> None:
    assert not [name for name in database.introspection.table_names() if "failedjob" in name]
    call_command("makemigrations", "multiq", check_changes=True, dry_run=True, verbosity=0)
    call_command("check", verbosity=0)


@pytest.mark.parametrize("option", [[], ["--all"]])
def test_dumpdata_leaves_failed_jobs_out(database: Any, capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    Order.objects.create(number=1)
    call_command("dumpdata", "multiq", "django_shop", *option)
    assert [row["model"] for row in json.loads(capsys.readouterr().out)] == ["django_shop.order"]


@pytest.mark.long
def test_a_worker_reloads_the_code_of_a_project(project: Project) -> None:
    worker = project.start("multiq", "worker", "-p", "1")
    result = shop.note.enqueue(1)
    until(lambda: finished(result), "a task has run")
    worker.send_signal(signal.SIGHUP)
    until(lambda: "reloading" in project.log, "the worker reloads")
    again = shop.note.enqueue(2)
    until(lambda: finished(again), "a task has run in the new generation")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0, project.log
    assert "Traceback" not in project.log


@pytest.mark.long
def test_a_killed_worker_s_task_runs_again(project: Project) -> None:
    worker = project.start("multiq", "worker", "-p", "1")
    result = shop.sleep.enqueue(600)
    until(lambda: (result.refresh() or result.status) == Status.RUNNING and result.worker_ids, "the task runs")
    (child,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()[:1]
    os.kill(int(child), signal.SIGKILL)
    until(lambda: "killed" in project.log or "SIGKILL" in project.log, "the supervisor has noticed")
    worker.send_signal(signal.SIGTERM)
    worker.wait(60)
    result.refresh()
    assert result.status == Status.READY, project.log


# --- connections between jobs ---


def test_a_transaction_that_a_task_leaves_open_is_rolled_back(
    database: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tasks(f"sqlite:///{tmp_path}/jobs.db") as backend:
        shop.leave_open.enqueue(1)
        after = shop.note.enqueue(2)
        work(backend, threads=2)  # tasks run on other threads than the test's
        after.refresh()
        assert after.status == Status.SUCCESSFUL
        assert [order.number for order in Order.objects.all()] == [2]
        assert "a job has left a transaction open on the database 'default'" in caplog.text


def test_rows_of_a_failed_task_stay_unless_it_has_a_transaction(database: Any, tmp_path: Path) -> None:
    with tasks(f"sqlite:///{tmp_path}/jobs.db") as backend:
        shop.fail_after_a_row.enqueue(1)
        shop.place_and_fail.enqueue(2)
        work(backend)
        assert [order.number for order in Order.objects.all()] == [1]
        assert backend.app.queue().stats().ready == 0


def test_a_job_of_a_sync_connection_runs_in_the_transaction_of_its_enqueue(database: Any) -> None:
    # given jobs that run within their enqueue, as in tests
    with tasks("sync://", transaction="now"), transaction.atomic():
        shop.note.enqueue(1)
        assert Order.objects.count() == 1
        transaction.set_rollback(True)
    assert Order.objects.count() == 0

    # then on_commit, which "auto" selects here, runs no job before the commit
    with tasks("sync://"), transaction.atomic():
        shop.note.enqueue(2)
        assert Order.objects.count() == 0
    assert Order.objects.count() == 1


def test_each_coroutine_has_its_own_connection(database: Any, tmp_path: Path) -> None:
    with tasks(f"sqlite:///{tmp_path}/jobs.db") as backend:
        results = [shop.anote.enqueue(number) for number in range(20)]
        work(backend, concurrency=5)
        for result in results:
            result.refresh()
        assert {result.status for result in results} == {Status.SUCCESSFUL}
        assert sorted(order.number for order in Order.objects.all()) == list(range(20))


@pytest.fixture
def server() -> Iterator[tuple[MysqlDatabases, Place]]:
    with any_server() as server, server.database() as place:
        yield server, place


def on_mysql(folder: Path, server: MysqlDatabases, place: Place, *, age: float | None, health: bool = False) -> Project:
    at = {"HOST": server.host, "PORT": server.port, "USER": server.user, "PASSWORD": server.password}
    database = {
        "ENGINE": "django.db.backends.mysql", "NAME": place.name, **at,
        "CONN_MAX_AGE": age, "CONN_HEALTH_CHECKS": health,
    }  # fmt: skip
    return Project(folder, url=f"sqlite:///{folder}/jobs.db", database=database)


def sessions(project: Project, count: int) -> list[Any]:
    results = [shop.session_id.enqueue() for _ in range(count)]
    until(lambda: all(finished(result) for result in results), "all tasks have run")
    return results


@pytest.mark.long
def test_connections_live_as_long_as_conn_max_age_says(
    server: tuple[MysqlDatabases, Place], tmp_path: Path, database: Any
) -> None:
    # given workers with one thread, whose connections live for a job, and for ever
    for age, wanted in ((0, 5), (None, 1)):
        folder = tmp_path / str(age)
        folder.mkdir()
        project = on_mysql(folder, *server, age=age)
        with tasks(f"sqlite:///{folder}/jobs.db"):
            results = [shop.session_id.enqueue() for _ in range(5)]
            project.manage("multiq", "worker", "--stop-when-empty", "-p", "1")
            for result in results:
                result.refresh()
            assert len({result.return_value for result in results}) == wanted, [result.errors for result in results]


@pytest.mark.long
def test_a_connection_that_the_server_has_ended_is_replaced(
    server: tuple[MysqlDatabases, Place], tmp_path: Path, database: Any
) -> None:
    # given a worker with a connection that is kept and checked
    databases, _ = server
    project = on_mysql(tmp_path, *server, age=None, health=True)
    with tasks(f"sqlite:///{tmp_path}/jobs.db"):
        worker = project.start("multiq", "worker", "-p", "1")
        (first,) = sessions(project, 1)

        # when the server ends its session, then the next task has a new one
        databases.ask(f"KILL {first.return_value}")
        (second,) = sessions(project, 1)
        assert second.status == Status.SUCCESSFUL, project.log
        assert second.return_value != first.return_value

        # and a task whose time limit interrupts a query leaves no part of a reply for the next task
        late = shop.wait_in_a_query.enqueue()
        until(lambda: finished(late), "the time limit has ended the task")
        assert late.status == Status.FAILED
        (third,) = sessions(project, 1)
        assert third.status == Status.SUCCESSFUL, project.log
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    project.close()


def test_a_forked_child_leaves_the_pools_of_its_parent(database: Any) -> None:
    # given an engine with a pool of connections, as Django's for PostgreSQL has one
    class PoolingDatabase(type(database)):  # type: ignore[misc]
        _connection_pools: ClassVar[dict[str, object]] = {}

    pool = object()
    pooling = PoolingDatabase(database.settings_dict, "pooling")
    PoolingDatabase._connection_pools["pooling"] = pool
    pooling.connect()
    # when this process forks
    child = os.fork()
    if child == 0:
        os._exit(len(PoolingDatabase._connection_pools))
    # then the child has no pool, and the parent has its own
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert PoolingDatabase._connection_pools == {"pooling": pool}
    pooling.close()


@pytest.mark.long
def test_a_forked_child_uses_no_connection_of_its_parent(
    server: tuple[MysqlDatabases, Place], tmp_path: Path, database: Any
) -> None:
    # given a project whose modules query the database while they are imported, before the worker forks
    project = on_mysql(tmp_path, *server, age=None)
    (tmp_path / "early.py").write_text(
        "from django.db import connection\n"
        "with connection.cursor() as cursor:\n"
        "    cursor.execute('SELECT CONNECTION_ID()')\n"
        "    SESSION = cursor.fetchone()[0]\n"
        "from multiq.contrib.django.framework import task\n"
        "@task\n"
        "def sessions():\n"
        "    with connection.cursor() as cursor:\n"
        "        cursor.execute('SELECT CONNECTION_ID()')\n"
        "        return [SESSION, cursor.fetchone()[0]]\n"
    )
    project.backend["OPTIONS"]["include"] = ["early"]  # type: ignore[index]
    project.environment["DJANGO_SHOP_TASKS"] = json.dumps({"default": project.backend})
    project.environment["PYTHONPATH"] += f":{tmp_path}"
    with tasks(f"sqlite:///{tmp_path}/jobs.db") as backend:
        body = {"multiq": 1, "task": "early.sessions", "args": [], "kwargs": {}, "keep": 60}
        handles = [backend.app.queue().enqueue(body) for _ in range(6)]
        project.manage("multiq", "worker", "--stop-when-empty", "-p", "2")
        values = [handle.result(0)["value"] for handle in handles]
    assert len({parent for parent, _ in values}) == 1
    assert all(child != parent for parent, child in values)


@pytest.mark.long
def test_a_worker_s_django_log_has_only_failures(project: Project) -> None:
    shop.add.enqueue(1)
    shop.fail_now.enqueue()
    printed = project.manage("multiq", "worker", "--stop-when-empty", "-p", "1")
    assert "state=SUCCESSFUL" not in printed
    assert printed.count("Traceback") <= 2


@pytest.mark.long
def test_a_worker_survives_a_restart_of_redis(database: Any, tmp_path: Path) -> None:
    settings = {key: database.settings_dict[key] for key in ("ENGINE", "NAME", "OPTIONS")}
    with RedisServer() as server:
        project = Project(tmp_path, url=server.url, database=settings)
        with tasks(server.url):
            result = shop.note.enqueue(1)
            worker = project.start("multiq", "worker", "-p", "1")
            until(lambda: finished(result), "a task has run")
            server.kill()
            server.start()
            again = shop.note.enqueue(2)
            until(lambda: finished(again), "a task has run after the restart")
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0, project.log
        project.close()


@pytest.mark.parametrize(
    ("missing", "told"),
    [("django", "pip install 'multiq[django]'"), ("django_tasks", "install Django 6, or the package django-tasks")],
)
def test_a_missing_library_is_named(missing: str, told: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; sys.modules['django.tasks'] = None\n"
    code += "from multiq.contrib.django import task"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told in done.stderr
