"""The soak: real workers, producers and consumers on a real server, faults, and a history that is checked.

``python tests/soak/run_soak.py redis --seconds 60 --seed 7``; without names all four backends, one after the other.

Load with faults, then everything is healed, load without faults, the producers stop, the store is drained, its raw
data is read, and the history is judged. A history with violations is kept, and its folder named.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

from proxy import CutReply, CutRequest, Latency, Pass, Proxy  # noqa: E402
from servers.beanstalk import BeanstalkServer  # noqa: E402
from servers.mysql import MysqlServer  # noqa: E402
from servers.redis import RedisServer  # noqa: E402
from soak.raw_stores import held  # noqa: E402
from soak.soak_app import TTR, name_of  # noqa: E402
from soak.soak_clients import LANE, RAW  # noqa: E402

from multiq.registry import open_backend  # noqa: E402
from multiq.soak.checking import check  # noqa: E402
from multiq.soak.history import Recorder, read  # noqa: E402
from multiq.soak.invariants import Setting  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proxy import Fault

    from multiq.soak.checking import Verdict

_TIMEOUT = 2  # seconds that a call may take
_WITHOUT_FAULTS = 5.0  # seconds of load after all is healed
_DRAIN = 60.0  # seconds, at most, until nothing but buried jobs is left
_WORKERS = ("-p 2 -t 4", "-p 1 --concurrency 4", "-p 1 -t 1")
_CLIENTS = (("produce", "1"), ("produce", "2"), ("consume", "3"), ("consume", "4"), ("lane", "5"), ("manage", "6"))


# --- stores ------------------------------------------------------------------------------------------------


@dataclass
class Store:
    """A backend's store under test, and what can be done to it."""

    name: str
    url: str
    """For everybody who is under test: through the proxy, where there is a server."""
    raw_url: str
    """For the audit."""
    proxy: Proxy | None = None
    server: Any = None
    own_faults: dict[str, Callable[[], None]] = field(default_factory=dict)


@contextlib.contextmanager
def _sqlite(folder: Path) -> Iterator[Store]:
    url = f"sqlite:///{folder}/jobs.db"
    yield Store("sqlite", f"{url}?timeout={_TIMEOUT}", url)


@contextlib.contextmanager
def _redis(_folder: Path) -> Iterator[Store]:
    with RedisServer(appendonly="yes", appendfsync="always") as server, Proxy(("127.0.0.1", server.port)) as proxy:
        own = {
            "script flush": lambda: server.ask("SCRIPT", "FLUSH"),
            "client kill": lambda: server.ask("CLIENT", "KILL", "TYPE", "normal"),
        }
        yield Store("redis", f"redis://127.0.0.1:{proxy.port}?timeout={_TIMEOUT}", server.url, proxy, server, own)


@contextlib.contextmanager
def _beanstalk(_folder: Path) -> Iterator[Store]:
    with BeanstalkServer(binlog=True) as server, Proxy(server.address) as proxy:
        yield Store("beanstalk", f"beanstalk://127.0.0.1:{proxy.port}?timeout={_TIMEOUT}", server.url, proxy, server)


@contextlib.contextmanager
def _mysql(_folder: Path) -> Iterator[Store]:
    with MysqlServer() as server, server.database() as place, Proxy(("127.0.0.1", server.port)) as proxy:
        url = server.url(place.name, f"timeout={_TIMEOUT}", port=proxy.port)
        yield Store("mysql", url, place.url, proxy, server)


STORES = {"sqlite": _sqlite, "redis": _redis, "beanstalk": _beanstalk, "mysql": _mysql}


# --- the processes under test ------------------------------------------------------------------------------


class Crew:
    """The workers and clients of one soak: started, hurt, and started again when they have ended."""

    def __init__(self, folder: Path, store: Store, seed: int, mutant: str) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            "MULTIQ_URL": store.url,
            "SOAK_FOLDER": str(folder),
            "SOAK_SEED": str(seed),
            "SOAK_TIMEOUT": str(_TIMEOUT),
            "SOAK_MUTANT": mutant,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.clients: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._rounds = 0

    def keep_up(self, *, with_producers: bool = True) -> None:
        """Start whoever is not running."""
        for options in _WORKERS:
            if options not in self.workers or self.workers[options].poll() is not None:
                command = [
                    sys.executable,
                    "-m",
                    "multiq",
                    "worker",
                    "soak.soak_app:app",
                    "--kill-after",
                    "1",
                    *options.split(),
                ]
                self.workers[options] = self._start(command, f"worker {options}")
        for role, name in _CLIENTS:
            is_producer = role in {"produce", "manage"}
            if (role, name) in self.clients and self.clients[role, name].poll() is None:
                continue
            if with_producers or not is_producer:
                # one that begins again takes other numbers: those of before are used
                number = int(name) + (10 * self._rounds if is_producer and (role, name) in self.clients else 0)
                command = [sys.executable, str(HERE / "soak_clients.py"), role, str(number)]
                self.clients[role, name] = self._start(command, f"{role} {name}")

    def children(self) -> list[psutil.Process]:
        """The processes of jobs."""
        found = []
        for worker in self.workers.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(worker.pid).children(recursive=True)
        return found

    def stop(self, *roles: str) -> None:
        for role in roles:
            (self._folder / f"stop-{role}").touch()
        for (role, _), process in self.clients.items():
            if role in roles:
                process.wait(60)

    def count(self) -> None:
        """Have the library's own counts in the history."""
        self._start([sys.executable, str(HERE / "soak_clients.py"), "count", "0"], "count").wait(60)

    def end_workers(self) -> dict[str, int]:
        """Their exit codes after a SIGTERM."""
        for process in self.workers.values():
            process.terminate()
        return {options: process.wait(60) for options, process in self.workers.items()}

    def kill_all(self) -> None:
        for process in [*self.workers.values(), *self.clients.values()]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        self._rounds += 1
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )


# --- faults ------------------------------------------------------------------------------------------------


class Nemesis:
    """Does harm, and writes down what it did, and to whom, before it does it."""

    def __init__(self, crew: Crew, store: Store, recorder: Recorder, chance: random.Random, *, gentle: bool) -> None:
        self._crew = crew
        self._store = store
        self._recorder = recorder
        self._chance = chance
        self.count = 0
        faults: list[Callable[[], None]] = [self._kill_child, self._stop_child, self._kill_consumer]
        if not gentle:
            faults.append(self._kill_worker)
        if store.proxy is not None:
            faults += [self._cut, self._freeze_links, self._slow_down, self._lose_a_reply, self._lose_a_request]
        if store.server is not None and not gentle:
            faults += [self._pause_server, self._restart_server]
        for kind, do in store.own_faults.items():
            faults.append(lambda kind=kind, do=do: self._own(kind, do))  # type: ignore[misc]
        self._faults = faults

    def strike(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
            self._chance.choice(self._faults)()
            self.count += 1

    def heal(self) -> None:
        if self._store.proxy is not None:
            self._store.proxy.disarm()
            self._store.proxy.mode = Pass()
            self._store.proxy.cut_server()
            self._store.proxy.cut()

    def _note(self, kind: str, target: str, seconds: float = 0.0) -> None:
        self._recorder.note("fault", kind=kind, target=target, value=seconds)

    def _kill_child(self) -> None:
        child = self._a_child()
        self._note("kill", name_of(child.pid), 1.0)
        child.kill()

    def _stop_child(self) -> None:
        """Longer than its leases last."""
        child = self._a_child()
        self._note("stop", name_of(child.pid), TTR + 2)
        child.suspend()
        time.sleep(TTR + 0.5)
        child.resume()

    def _a_child(self) -> psutil.Process:
        children = self._crew.children()
        if not children:
            raise psutil.NoSuchProcess(0)
        return self._chance.choice(children)

    def _kill_worker(self) -> None:
        options, worker = self._chance.choice(sorted(self._crew.workers.items()))
        for child in self._crew.children():
            self._note("kill", name_of(child.pid), 2.0)
        self._note("kill", f"worker {options}")
        worker.kill()
        worker.wait()

    def _kill_consumer(self) -> None:
        mine = [(key, process) for key, process in sorted(self._crew.clients.items()) if key[0] == "consume"]
        (role, name), process = self._chance.choice(mine)
        self._note("kill", f"{role}-{name}.{process.pid}", 1.0)
        process.kill()
        process.wait()

    def _cut(self) -> None:
        self._note("cut", "link", 1.0)
        assert self._store.proxy is not None
        self._store.proxy.cut(rst=self._chance.random() < 0.5)

    def _freeze_links(self) -> None:
        """What is connected now hears nothing any more, for a while not even an end."""
        assert self._store.proxy is not None
        seconds = self._chance.choice([0.5, 1.5, TTR + 1])
        self._note("freeze", "link", seconds + 3)
        self._store.proxy.freeze()
        time.sleep(seconds)
        self._store.proxy.cut_server()

    def _slow_down(self) -> None:
        assert self._store.proxy is not None
        self._note("slow", "link", 3.0)
        self._store.proxy.mode = Latency(self._chance.choice([0.02, 0.1, 0.3]))
        time.sleep(1.5)
        self._store.proxy.mode = Pass()

    def _lose_a_reply(self) -> None:
        """The server does what it is asked, and its replies do not arrive."""
        self._cut_some(CutReply(at=self._chance.choice([0, 3]), times=5))

    def _lose_a_request(self) -> None:
        """The server is never asked, and its clients cannot know that."""
        self._cut_some(CutRequest(at=self._chance.choice([0, 3]), times=5))

    def _cut_some(self, fault: Fault) -> None:
        assert self._store.proxy is not None
        self._note("cut", "link", 3.0)
        self._store.proxy.arm(fault)
        time.sleep(0.5)
        self._store.proxy.disarm()

    def _pause_server(self) -> None:
        seconds = self._chance.choice([0.5, 1.5, TTR])
        self._note("freeze", "store", seconds + 3)
        self._store.server.pause()
        time.sleep(seconds)
        self._store.server.go_on()

    def _restart_server(self) -> None:
        self._note("restart", "store", 5.0)
        self._store.server.kill()
        self._store.server.start()

    def _own(self, kind: str, do: Callable[[], None]) -> None:
        self._note(kind, "store", 2.0)
        with contextlib.suppress(Exception):  # the client that says "kill all clients" is one
            do()


# --- one soak ----------------------------------------------------------------------------------------------


def soak(
    name: str, folder: Path, *, seconds: float, seed: int, gentle: bool = False, mutant: str = "", drain: float = _DRAIN
) -> tuple[Verdict, int]:
    """Load, faults, healing, draining, audit, check. Returns the verdict, and how many faults there were."""
    chance = random.Random(seed)
    with STORES[name](folder) as store:
        recorder = Recorder(folder, "nemesis")
        open_backend(store.raw_url).close()
        crew = Crew(folder, store, seed, mutant)
        nemesis = Nemesis(crew, store, recorder, chance, gentle=gentle)
        try:
            _load(crew, nemesis, seconds)
            nemesis.heal()
            crew.keep_up()
            recorder.note("healed")
            time.sleep(_WITHOUT_FAULTS)
            crew.stop("produce", "manage")
            _drain(name, store, crew, drain)
            recorder.note("drained")
            crew.stop("consume", "lane")
            children = crew.children()
            for options, code in crew.end_workers().items():
                if code:
                    recorder.note("residue", kind="exit code", err=f"worker {options} ended with {code}")
            _audit(store, recorder, crew, children)
        finally:
            crew.kill_all()
        recorder.close()
    setting = Setting(
        ends_leases_with_connection=name == "beanstalk",
        one_consumer=frozenset({LANE}),
        counts_exactly=name != "beanstalk",
        patience=TTR + 4,
    )
    return check(read(folder), setting), nemesis.count


def _load(crew: Crew, nemesis: Nemesis, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        crew.keep_up()
        time.sleep(0.7)
        nemesis.strike()


def _drain(name: str, store: Store, crew: Crew, seconds: float) -> None:
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at and _is_left(name, store):
        crew.keep_up(with_producers=False)
        time.sleep(0.5)


def _is_left(name: str, store: Store) -> bool:
    if name == "beanstalk":  # its audit takes away what it reads
        with open_backend(store.raw_url) as backend:
            stats = [backend.stats(queue) for queue in ("default", RAW, LANE)]
        return any((one.ready or 0) + (one.delayed or 0) + (one.reserved or 0) for one in stats)
    return any(state != "buried" for _, state in held(store.name, store.raw_url))


def _audit(store: Store, recorder: Recorder, crew: Crew, children: list[psutil.Process]) -> None:
    for child in children:
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            recorder.note("residue", kind="process", target=f"{child.pid}")
    crew.count()
    found = held(store.name, store.raw_url)
    recorder.note("audit", jobs=tuple(number for number, _ in found), states=tuple(state for _, state in found))


def main() -> int:
    options = _arguments()
    failed = 0
    for name in options.backends or sorted(STORES):
        seed = random.randrange(10**6) if options.seed is None else options.seed
        folder = Path(tempfile.mkdtemp(prefix=f"multiq-soak-{name}-"))
        verdict, faults = soak(name, folder, seconds=options.seconds, seed=seed, gentle=options.gentle)
        print(f"{name}: seed {seed}, {faults} faults\n{verdict.report()}", flush=True)
        if verdict.is_clean and not options.keep:
            shutil.rmtree(folder)
        else:
            print(f"the history is in {folder}", flush=True)
        failed += not verdict.is_clean
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help=f"of {', '.join(STORES)}; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load with faults (default: 60)")
    parser.add_argument("--seed", type=int, help="default: another one each time, which is printed")
    parser.add_argument("--gentle", action="store_true", help="kill no worker and no server")
    parser.add_argument("--keep", action="store_true", help="keep the history also if nothing is wrong with it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
