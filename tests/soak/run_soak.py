"""The soak on servers of its own: real workers, producers and consumers, faults, and a history that is checked.

``python tests/soak/run_soak.py redis --seconds 60 --seed 7``; without names all four backends, one after the other.

Load with faults, then everything is healed, load without faults, the producers stop, the store is drained, its raw
data is read, and the history is judged. A history with violations is kept, and its folder named.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
if str(HERE.parent) not in sys.path:
    sys.path[:0] = [str(HERE.parent)]

from proxy import Proxy  # noqa: E402
from servers.beanstalk import BeanstalkServer  # noqa: E402
from servers.mysql import MysqlServer  # noqa: E402
from servers.redis import RedisServer  # noqa: E402
from soak.raw_stores import held  # noqa: E402

from multiq.registry import open_backend  # noqa: E402
from multiq.soak.campaign import Plan  # noqa: E402
from multiq.soak.campaign import soak as run  # noqa: E402
from multiq.soak.load import Load  # noqa: E402
from multiq.soak.nemesis import OF_LINKS, OF_WORKERS  # noqa: E402
from multiq.soak.site import Site  # noqa: E402
from multiq_redis.scripts import script  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from multiq.soak.checking import Verdict

TIMEOUT = 2.0  # seconds that a call may take
GENTLE = (*(name for name in OF_WORKERS if name != "kill worker"), *OF_LINKS)


class _Process:
    """A server of the tests, as a soak treats it."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.pause = server.pause
        self.go_on = server.go_on

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
        }
        site.acks = script("exchange").sha.encode()
        yield site


@contextlib.contextmanager
def _beanstalk(_folder: Path) -> Iterator[Site]:
    with BeanstalkServer(binlog=True) as server, Proxy(server.address) as proxy:
        url = f"beanstalk://127.0.0.1:{proxy.port}?timeout={TIMEOUT:g}"
        site = _site("beanstalk", url, server.url, proxy, server)
        site.acks = b"delete "

        def is_left() -> bool:  # the audit takes away what it reads
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
    """One soak on a server of its own."""
    with SITES[name](folder) as site:
        open_backend(site.url).close()
        plan = Plan(seconds, faults, drain, until, plant)
        settings: dict[str, Any] = {"folder": str(folder), "seed": seed, "timeout": TIMEOUT, **load}
        return run(site, Load(**settings), plan)


def main() -> int:
    options = _arguments()
    failed = 0
    for name in options.backends or sorted(SITES):
        seed = random.randrange(10**6) if options.seed is None else options.seed
        folder = Path(tempfile.mkdtemp(prefix=f"multiq-soak-{name}-"))
        verdict = soak(name, folder, seconds=options.seconds, seed=seed, faults=GENTLE if options.gentle else None)
        print(f"{name}: seed {seed}\n{verdict.report()}", flush=True)
        if verdict.is_clean and not options.keep:
            shutil.rmtree(folder)
        else:
            print(f"the history is in {folder}", flush=True)
        failed += not verdict.is_clean
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help=f"of {', '.join(SITES)}; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load with faults (default: 60)")
    parser.add_argument("--seed", type=int, help="default: another one each time, which is printed")
    parser.add_argument("--gentle", action="store_true", help="kill no worker and no server")
    parser.add_argument("--keep", action="store_true", help="keep the history also if nothing is wrong with it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
