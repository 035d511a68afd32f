"""The soak on servers of its own: real workers, producers and consumers, faults, and a history that is checked.

``python tests/soak/run_soak.py redis --seconds 60 --seed 7``; without names it runs all four backends, one by one.
``make soak MINUTES=60`` divides the minutes among them, writes a report, and renews the tables of docs/reliability.md.

A soak is load with faults, the end of all faults, load without faults, and the end of the producers. Then the store is
drained, its raw data is read, and the history is checked. A history with violations is kept in tests/soak/histories,
cut down to the jobs that the violations are about, and its folder is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

HERE = Path(__file__).parent
if str(HERE.parent) not in sys.path:
    sys.path[:0] = [str(HERE.parent)]

from proxy import Proxy  # noqa: E402
from servers.beanstalk import BeanstalkServer  # noqa: E402
from servers.mysql import MysqlServer  # noqa: E402
from servers.redis import RedisServer  # noqa: E402
from soak.page import conditions, renew  # noqa: E402
from soak.raw_stores import held  # noqa: E402

from multiq.backend.registry import open_backend  # noqa: E402
from multiq.soak.campaign import Plan, setting_for  # noqa: E402
from multiq.soak.campaign import soak as run  # noqa: E402
from multiq.soak.counterexamples import check  # noqa: E402
from multiq.soak.history import write  # noqa: E402
from multiq.soak.load import Load  # noqa: E402
from multiq.soak.nemesis import OF_LINKS, OF_WORKERS  # noqa: E402
from multiq.soak.report import markdown, outcome  # noqa: E402
from multiq.soak.site import Site  # noqa: E402
from multiq_redis.scripts import script  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from multiq.soak.counterexamples import Verdict

HISTORIES = HERE / "histories"
_WHOLE = 3600.0  # seconds of a full run
TIMEOUT = 2.0  # seconds that a call may take
GENTLE = (*(name for name in OF_WORKERS if name != "kill worker"), *OF_LINKS)


class _Process:
    """A server of the tests, with the interface that a soak needs."""

    can_pause = can_restart = True

    def __init__(self, server: Any) -> None:
        self._server = server
        self.pause = server.pause
        self.go_on = server.go_on

    @property
    def pid(self) -> int:
        return int(self._server.pid)

    def run_id(self) -> int:
        return self.pid

    def restart(self) -> None:
        self._server.kill()
        self._server.start()


@contextlib.contextmanager
def _sqlite(folder: Path) -> Iterator[Site]:
    url = f"sqlite:///{folder}/jobs.db"
    yield _site("sqlite", f"{url}?timeout={TIMEOUT:g}", url)


@contextlib.contextmanager
def _redis(_folder: Path) -> Iterator[Site]:
    with RedisServer(appendonly="yes", appendfsync="always") as server, Proxy(("127.0.0.1", server.port)) as proxy:
        site = _site("redis", f"redis://127.0.0.1:{proxy.port}?timeout={TIMEOUT:g}", server.url, proxy, server)
        site.own_faults = {
            "script flush": lambda: server.ask("SCRIPT", "FLUSH"),
            "client kill": lambda: server.ask("CLIENT", "KILL", "TYPE", "normal"),
            "fill memory": lambda: _full_for_a_while(server),
        }
        site.acks = script("exchange").sha.encode()
        yield site


def _full_for_a_while(server: RedisServer) -> bool:
    """Limit the server's memory to less than it uses, so that it refuses new jobs and still hands out old ones.

    Returns whether the server has refused a job.
    """
    try:
        server.set("maxmemory", "100kb")
        is_full = _is_full(server)
        time.sleep(1.5)
        return is_full
    finally:
        server.set("maxmemory", "0")


def _is_full(server: RedisServer) -> bool:
    try:
        server.ask("SET", "soak:full", "1", "PX", 1)
    except Exception as exc:
        return "maxmemory" in str(exc)
    return False


def _kill_connections(server: MysqlServer) -> int:
    """Kill all connections but our own. Returns how many there were."""
    killed = 0
    for (number,) in server.ask("SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID()"):
        with contextlib.suppress(Exception):  # the connection has ended by itself
            server.ask(f"KILL {int(number)}")
            killed += 1
    return killed


@contextlib.contextmanager
def _beanstalk(_folder: Path) -> Iterator[Site]:
    with BeanstalkServer(binlog=True) as server, Proxy(server.address) as proxy:
        url = f"beanstalk://127.0.0.1:{proxy.port}?timeout={TIMEOUT:g}"
        site = _site("beanstalk", url, server.url, proxy, server)
        site.acks = b"delete "

        def is_left() -> bool:  # not by ``held``, which removes the jobs that it reads
            with open_backend(server.url) as backend:
                stats = [backend.stats(queue) for queue in backend.queues()]
            return any((one.ready or 0) + (one.delayed or 0) + (one.reserved or 0) for one in stats)

        site.is_left = is_left
        yield site


@contextlib.contextmanager
def _mysql(_folder: Path) -> Iterator[Site]:
    with MysqlServer() as server, server.database() as place, Proxy(("127.0.0.1", server.port)) as proxy:
        url = server.url(place.name, f"timeout={TIMEOUT:g}", port=proxy.port)
        site = _site("mysql", url, place.url, proxy, server)
        site.own_faults["kill connections"] = lambda: _kill_connections(server)
        site.acks = b"AND writer = "  # as in sql/ack_with_ticket.sql
        yield site


SITES = {"sqlite": _sqlite, "redis": _redis, "beanstalk": _beanstalk, "mysql": _mysql}


def _site(driver: str, url: str, raw_url: str, proxy: Proxy | None = None, server: Any = None) -> Site:
    return Site(
        driver,
        url,
        lambda: held(driver, raw_url),
        lambda: any(state != "buried" for _, state in held(driver, raw_url)),
        proxy,
        None if server is None else _Process(server),
    )


def soak(
    name: str,
    folder: Path,
    *,
    seconds: float,
    seed: int,
    faults: Collection[str] | None = None,
    plant: str = "",
    drain: float = 60.0,
    until: str = "",
    **load: float,
) -> Verdict:
    """Run one soak on a server of its own."""
    with SITES[name](folder) as site:
        with open_backend(site.url) as backend:
            backend.queues()  # creates MySQL's tables, which may take longer than a call under test may take
        plan = Plan(seconds, faults, drain, until, plant)
        settings: dict[str, Any] = {"folder": str(folder), "seed": seed, "timeout": TIMEOUT, **load}
        return run(site, Load(**settings), plan)


def keep(verdict: Verdict, driver: str, why: str, folder: Path = HISTORIES) -> list[Path]:
    """Write the smallest history of each violated invariant to a file, which the tests replay from then on."""
    folder.mkdir(exist_ok=True)
    kept = []
    setting = setting_for(driver, Load(folder="", seed=0, timeout=TIMEOUT))
    for name in verdict.violations:
        events = verdict.smallest(name)
        if name not in check(events, setting).violations:
            events = list(verdict.events)  # a violation of the order of jobs is not visible in these jobs alone
        path = folder / f"{name}-{driver}-{why.replace(' ', '-')}.jsonl.gz"
        write(path, events)
        kept.append(path)
    return kept


def main() -> int:
    options = _arguments()
    names = options.backends or sorted(SITES)
    seconds = options.seconds if options.minutes is None else 60 * options.minutes / len(names)
    outcomes = []
    for name in names:
        seed = random.randrange(10**6) if options.seed is None else options.seed
        print(f"{name}: seed {seed}, {seconds:g} s", flush=True)
        folder = Path(tempfile.mkdtemp(prefix=f"multiq-soak-{name}-"))
        faults = GENTLE if options.gentle else None
        verdict = soak(name, folder, seconds=seconds, seed=seed, faults=faults, drain=max(60.0, seconds / 3))
        print(verdict.report(), flush=True)
        if not verdict.is_clean:
            for path in keep(verdict, name, f"seed {seed}"):
                print(f"kept {path}", flush=True)
        if verdict.is_clean and not options.keep:
            shutil.rmtree(folder)
        else:
            print(f"the history is in {folder}", flush=True)
        outcomes.append(outcome(verdict, seconds))
    if options.report is not None:
        options.report.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes), indent=2))
        options.report.with_suffix(".md").write_text(markdown(outcomes))
    if options.page:
        is_whole = seconds * len(names) >= _WHOLE and set(names) == set(SITES)
        short_of = "" if is_whole else "an hour over all backends, `make soak MINUTES=60`"
        renew("soak", f"{conditions(short_of)}\n\n{markdown(outcomes)}")
    return 0 if all(one.is_clean for one in outcomes) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help=f"of {', '.join(SITES)}; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load with faults, for each (default: 60)")
    parser.add_argument("--minutes", type=float, help="of load with faults, divided among the backends")
    parser.add_argument("--seed", type=int, help="default: another one each time, which is printed")
    parser.add_argument("--gentle", action="store_true", help="kill no worker and no server")
    parser.add_argument("--keep", action="store_true", help="keep the folder also if nothing is wrong with its history")
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="write the figures there, and as Markdown")
    parser.add_argument("--page", action="store_true", help="renew the tables of docs/reliability.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
