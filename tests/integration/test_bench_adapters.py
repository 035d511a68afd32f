"""``multiq bench``'s targets on real servers: which servers are started, their counters, and that nothing is left."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import psutil
import pytest
import redis
from servers.beanstalk import BeanstalkServer
from servers.mysql import MysqlServer
from servers.process import HOST, require, until
from servers.redis import RedisCluster, RedisServer

from multiq.backend import Ack, NewJob, State
from multiq.backend.registry import open_backend
from multiq.bench import servers, targets
from multiq.bench.adapter import Counters, Profile, Survives
from multiq.bench.servers import ServerMissing, temporary_folder
from multiq.bench.targets import QueueInUse, QueueLeftBehind, load_bench, open_targets
from multiq.ids import new_ids
from multiq.settings.url import parse_url
from multiq_mysql.backend import MysqlBackend
from multiq_mysql.dsn import Dsn
from multiq_mysql.opening import open_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.bench.targets import Target

ALL = ("beanstalk", "mysql", "redis", "sqlite")
BODY = b"x" * 100
COUNT = 300

#: (backend, profile) -> what survives on the throwaway server, and the server's setting from which this follows
LEVELS: dict[tuple[str, Profile], tuple[Survives, str, str]] = {
    ("beanstalk", "fast"): ("client crash", "-b", "no"),
    ("beanstalk", "durable"): ("power loss", "-f", "0"),
    ("mysql", "fast"): ("client crash", "innodb_flush_log_at_trx_commit", "0"),
    ("mysql", "durable"): ("power loss", "innodb_flush_log_at_trx_commit", "1"),
    ("redis", "fast"): ("client crash", "appendonly", "no"),
    ("redis", "durable"): ("power loss", "appendfsync", "always"),
    ("sqlite", "fast"): ("server crash", "synchronous", "normal"),
    ("sqlite", "durable"): ("power loss", "synchronous", "full"),
}

START_AND_DIE = """
import os
from multiq.bench.targets import open_targets
from multiq.bench.servers import temporary_folder
with temporary_folder() as folder, open_targets(["redis"], "fast", folder) as (entrant,):
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True, scope="module")
def _all_programs() -> None:
    """Skips where a server is missing, and fails under CI."""
    for server in (BeanstalkServer, MysqlServer, RedisServer):
        require(server.program, server.package)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name, because the path of a socket may have only 107 bytes."""
    return tmp_path_factory.mktemp("b")


def work(target: Target, queue: str) -> None:
    """Enqueue, take and finish ``COUNT`` jobs."""
    with open_backend(target.url) as backend:
        backend.enqueue(queue, [NewJob(BODY, job_id) for job_id in new_ids(COUNT)])
        with backend.consumer([queue]) as consumer:
            assert consumer.settle([Ack(lease) for lease in consumer.reserve(COUNT, 0)]) == [None] * COUNT


def running(folder: Path) -> list[int]:
    """Return the processes that were started in this folder."""
    processes = psutil.process_iter(["cwd"])
    return [process.pid for process in processes if str(process.info["cwd"] or "").startswith(str(folder))]


@pytest.mark.long
@pytest.mark.one_row
@pytest.mark.parametrize("profile", get_args(Profile))
def test_each_name_gets_a_server_of_its_own_as_durable_as_the_profile_says(profile: Profile, folder: Path) -> None:
    with open_targets(ALL, profile, folder) as targets:
        assert [(one.name, one.backend, one.is_ours) for one in targets] == [(name, name, True) for name in ALL]
        for target in targets:
            durability = target.adapter.durability()
            survives, setting, value = LEVELS[target.backend, profile]
            assert (durability.survives, durability.settings[setting]) == (survives, value)
            assert any(character.isdigit() for character in target.adapter.version())
            work(target, target.queue("q"))
        assert len(running(folder)) == 3
    assert running(folder) == []


@pytest.mark.long
def test_a_server_counts_what_a_batch_of_jobs_costs_it(folder: Path) -> None:
    with open_targets(ALL, "fast", folder) as targets:
        costs = {}
        for target in targets:
            queue = target.queue("q")
            work(target, queue)  # opens connections, and creates scripts and tables
            before = target.adapter.counters()
            work(target, queue)
            costs[target.name] = target.adapter.counters().since(before)
        assert 3 * COUNT <= (costs["beanstalk"].commands or 0) < 6 * COUNT, "put, reserve, stats-job and delete"
        for name in ("redis", "mysql"):
            assert 3 <= (costs[name].commands or 0) < 60, "a batch is a few commands"
            assert COUNT * len(BODY) < (costs[name].received or 0)
            assert COUNT * len(BODY) < (costs[name].sent or 0)
        for name in ("beanstalk", "redis", "mysql"):
            assert costs[name].cpu is not None
            assert (costs[name].memory or 0) > 500_000
        assert costs["sqlite"] == Counters(), "there is no server that could count"


@pytest.mark.long
def test_looking_at_the_counters_is_not_counted(folder: Path) -> None:
    with open_targets(["redis", "beanstalk", "mysql"], "fast", folder) as targets:
        for target in targets:
            before = target.adapter.counters()
            assert target.adapter.counters().since(before).commands == 0, target.name


@pytest.mark.parametrize("name", ALL)
def test_a_baseline_takes_what_it_put_and_leaves_nothing(name: str, folder: Path) -> None:
    bench = load_bench(name)
    assert bench is not None
    with open_targets([name], "fast", folder) as (target,), bench.at(target.url) as adapter:
        baseline = adapter.baseline(BODY)
        assert baseline is not None
        assert baseline.put_one_by_one(10) > 0
        assert baseline.put_in_batches(COUNT) > 0
        assert baseline.take_in_batches() > 0
        assert baseline.put_in_batches(7) > 0  # jobs that an interrupted run would leave behind
        assert TRACES[name](target.url), "the look for traces sees some"
        baseline.close()
        assert TRACES[name](target.url) == []


def test_a_users_own_server_is_left_unchanged(folder: Path) -> None:
    with RedisServer() as server, open_backend(server.url) as theirs:
        theirs.enqueue("mail", [NewJob(b"theirs", job_id) for job_id in new_ids(3)])
        with open_targets([server.url, server.url], "durable", folder) as (target, other):
            assert (target.name, target.is_ours, other.name) == (server.url, False, f"{server.url} 2")
            assert target.adapter.durability().survives == "client crash", "as it is set, whatever the profile"
            queues = [target.queue("one"), target.queue("two"), other.queue("one")]
            assert len(set(queues)) == 3
            with open_backend(target.url) as backend:
                for queue in queues:
                    backend.enqueue(queue, [NewJob(BODY, job_id) for job_id in new_ids(10)])
                    backend.pause(queue, 60)
        assert theirs.queues() == ["mail"]
        assert theirs.stats("mail").ready == 3
        assert [key for key in server.ask("KEYS", "*multiq.bench*") if server.ask("TTL", key) < 0] == []


@pytest.mark.one_row
@pytest.mark.parametrize("name", ["beanstalk", "mysql", "sqlite"])
def test_jobs_of_an_interrupted_run_are_removed_from_a_users_server(name: str, folder: Path) -> None:
    """The jobs of a killed worker are removed when their leases have ended."""
    bench = load_bench(name)
    assert bench is not None
    theirs = folder / "theirs"
    theirs.mkdir()
    with bench.throwaway(theirs, "fast") as place, open_backend(place.url) as backend:
        with open_targets([place.url], "fast", folder) as (target,):
            queue = target.queue("q")
            backend.enqueue(queue, [NewJob(BODY, job_id, ttr=1) for job_id in new_ids(3)])
            consumer = backend.consumer([queue])
            assert len(consumer.reserve(1, 0)) == 1
            assert backend.queues() == [queue]
        assert backend.queues() == []
        consumer.close()


def test_a_queue_that_holds_jobs_is_refused_and_not_touched(folder: Path) -> None:
    url = f"sqlite:///{folder}/theirs.db"
    with open_backend(url) as theirs:
        theirs.enqueue("multiq.bench.abc.q", [NewJob(b"theirs", "an id")])
        with (
            open_targets([url], "fast", folder, run_id="abc") as (target,),
            pytest.raises(QueueInUse, match=r"'multiq\.bench\.abc\.q' of sqlite:.* holds 1 jobs already"),
        ):
            target.queue("q")
        assert theirs.peek("multiq.bench.abc.q", "an id").state is State.READY


def test_a_queue_that_cannot_be_removed_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_PATIENCE", 0.1)
    url = f"sqlite:///{folder}/theirs.db"
    with open_backend(url) as backend, backend.consumer(["multiq.bench.abc.q"]) as consumer:
        run = open_targets([url], "fast", folder, run_id="abc")
        (target,) = run.__enter__()
        backend.enqueue(target.queue("q"), [NewJob(BODY, "an id", ttr=600)])
        assert len(consumer.reserve(1, 0)) == 1
        with pytest.raises(QueueLeftBehind, match=r"1 of them reserved.*multiq purge multiq\.bench\.abc\.q"):
            run.__exit__(None, None, None)


def test_a_missing_program_is_reported_with_what_to_install_and_nothing_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_ELSEWHERE", "")
    monkeypatch.setenv("PATH", str(_with_only("redis-server", folder)))
    told = r"beanstalkd is not installed.*apt-get install beanstalkd.*URL"
    with pytest.raises(ServerMissing, match=told), open_targets(["redis", "beanstalk"], "fast", folder):
        pytest.fail("it began")
    assert running(folder) == []


@pytest.mark.long
def test_a_cluster_is_counted_and_swept_as_one(folder: Path) -> None:
    with RedisCluster() as cluster, open_targets([cluster.url], "fast", folder) as (target,):
        queues = [target.queue(str(number)) for number in range(6)]
        before = target.adapter.counters()
        for queue in queues:
            work(target, queue)
        assert (target.adapter.counters().since(before).commands or 0) >= 3 * len(queues)
        target.remove_queues()
        for node in cluster.nodes:
            assert [key for key in node.ask("KEYS", "*multiq.bench*") if node.ask("TTL", key) < 0] == []


def test_a_user_that_may_only_work_can_be_measured_without_a_baseline(folder: Path) -> None:
    """The user has the rights that docs/redis.md and docs/mysql.md name for workers."""
    with RedisServer() as server:
        words = re.search(r"ACL (SETUSER multiq .*?)```", Path("docs/redis.md").read_text(), re.DOTALL)
        assert words is not None
        server.ask("ACL", *words[1].split())
        with open_targets([f"redis://multiq:password@{HOST}:{server.port}"], "fast", folder) as (target,):
            before = target.adapter.counters()
            work(target, target.queue("q"))
            assert (target.adapter.counters().since(before).commands or 0) >= 3
            assert target.adapter.baseline(BODY) is None
            assert target.adapter.durability().survives == "unknown"
        server.ask("ACL", "SETUSER", "multiq", "-info")
        with open_targets([f"redis://multiq:password@{HOST}:{server.port}"], "fast", folder / "x") as (target,):
            assert target.adapter.counters() == Counters()
            assert target.adapter.version() == "redis"


def test_a_user_that_may_make_no_tables_gets_no_baseline(folder: Path) -> None:
    with MysqlServer() as server, server.database() as place:
        with open_backend(place.url) as backend:
            backend.queues()  # makes the tables
        with (
            server.account("SELECT, INSERT, UPDATE, DELETE", f"{place.name}.*") as account,
            open_targets([account.url(place.name)], "fast", folder) as (target,),
        ):
            before = target.adapter.counters()
            work(target, target.queue("q"))
            assert (target.adapter.counters().since(before).commands or 0) >= 3
            assert target.adapter.baseline(BODY) is None
            assert target.adapter.durability().survives == "power loss"
            assert before.memory, "it runs on this machine"


@pytest.mark.long
def test_neither_server_nor_folder_outlives_a_bench_that_was_killed(folder: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", START_AND_DIE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == -9
    assert Path(done.stdout.strip()).parent == folder
    until(lambda: not running(folder), "the server has ended")
    until(lambda: not list(folder.iterdir()), "its folder is gone")


def test_the_folder_of_a_run_is_deleted_at_its_end() -> None:
    with temporary_folder() as folder:
        (folder / "log").write_text("x")
    assert not folder.exists()


def _with_only(program: str, folder: Path) -> Path:
    found = shutil.which(program)
    assert found is not None
    path = folder / "bin"
    path.mkdir()
    (path / program).symlink_to(found)
    return path


def _keys(url: str) -> list[Any]:
    with closing(redis.Redis.from_url(url)) as client:
        return list(client.scan_iter("*limit*"))


def _tables(url: str) -> list[Any]:
    with (
        open_connection(Dsn.from_url(parse_url(url, MysqlBackend.options)), 5) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("SHOW TABLES LIKE 'multiq\\_bench\\_%'")
        return list(cursor.fetchall())


def _tubes(url: str) -> list[str]:
    with open_backend(url) as backend:
        return backend.queues()


def _files(url: str) -> list[Path]:
    return list(Path(url.removeprefix("sqlite:///").partition("?")[0]).parent.glob("multiq-bench-*"))


TRACES: dict[str, Callable[[str], Sequence[object]]] = {
    "beanstalk": _tubes,
    "mysql": _tables,
    "redis": _keys,
    "sqlite": _files,
}
