"""The cost of inspection and management through greenstalk: ``python benchmarks/beanstalk_greenstalk.py --help``.

The script measures the round trips and the CPU time of each call, in turns, and the cost of a parser. The script also
measures when a call ends on a server that is stopped, or that sends its reply byte by byte. docs/decisions/0010 uses
the figures. The server is private. The script needs beanstalkd and the extra ``dev``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import greenstalk

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from servers.beanstalk import BeanstalkServer
from servers.process import HOST

from multiq.backend import NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import MultiqError
from multiq.ids import new_id
from multiq_beanstalk.connection import Connection
from multiq_beanstalk.stats import parse_job_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TUBES = 100
_JOBS = 100  # jobs that one call kicks or purges
_DEADLINE = 0.5  # seconds
_DRIP = 0.2  # seconds between two bytes
_MOST_BYTES = 20

_JOB_STATS = (
    b"---\nid: 17\ntube: mail\nstate: reserved\npri: 1024\nage: 12\ndelay: 0\nttr: 60\ntime-left: 58\nfile: 0\n"
    b"reserves: 1\ntimeouts: 0\nreleases: 0\nburies: 0\nkicks: 0\n"
)


class Trips:
    """Counts round trips: each round trip ends with a call of one of these methods."""

    def __init__(self) -> None:
        self.count = 0
        for owner, name in ((Connection, "ask"), (greenstalk.Client, "_send_cmd")):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.count += 1
            return send(*arguments)

        return counted

    def of(self, call: Callable[[], object]) -> int:
        before = self.count
        call()
        return self.count - before


class Kind(NamedTuple):
    """A call that both multiq and greenstalk can make."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    every: int = 1
    """How many peeks are made for each call of the given kind."""
    prepare: Callable[[], object] = int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300, help="calls of each kind in one turn")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    with BeanstalkServer() as server:
        compare_calls(server, options.calls, options.turns)
        compare_parsers(options.turns)
        compare_deadlines(server)


def compare_calls(server: BeanstalkServer, calls: int, turns: int) -> None:
    backend = open_backend(server.url)
    client: Any = greenstalk.Client((HOST, server.port), encoding=None, use="q")
    for tube in range(_TUBES):
        backend.enqueue(f"q{tube}", [_job()])
    (job_id,) = backend.enqueue("q", [_job()])

    def bury() -> None:
        for _ in range(_JOBS):
            client.put(b"x" * 100)
        watcher: Any = greenstalk.Client((HOST, server.port), encoding=None, watch="q")
        for _ in range(_JOBS):
            watcher.bury(watcher.reserve(0))
        watcher.close()

    def fill() -> None:
        backend.enqueue("p", [_job() for _ in range(_JOBS)])

    kinds = [
        Kind("peek", lambda: backend.peek("q", job_id), lambda: _peek(client, int(job_id))),
        Kind("stats", lambda: backend.stats("q"), lambda: client.stats_tube("q")),
        Kind(f"queues ({_TUBES})", backend.queues, lambda: _queues(client), 50),
        Kind(f"kick ({_JOBS})", lambda: backend.kick("q", _JOBS), lambda: _kick(client), 50, bury),
        Kind(f"purge ({_JOBS})", lambda: backend.purge("p", [State.READY]), lambda: _purge(client), 50, fill),
    ]
    trips = Trips()
    print(f"{'':14} {'round trips':>24} {'CPU per call, ms':>24} {'greenstalk / multiq':>20}")
    for kind in kinds:
        counts = []
        for call in (kind.ours, kind.theirs):
            kind.prepare()
            counts.append(trips.of(call))
        cost = cpu_time(kind, max(1, calls // kind.every), turns)
        ratio = cost[1] / cost[0]
        print(f"{kind.name:14} {counts[0]:>11} {counts[1]:>12} {cost[0]:>11.3f} {cost[1]:>12.3f} {ratio:>20.2f}")
    client.close()
    backend.close()


def cpu_time(kind: Kind, count: int, turns: int) -> tuple[float, float]:
    """Milliseconds of CPU time per call, through multiq and through greenstalk: the medians of several turns."""
    spent: tuple[list[float], list[float]] = [], []
    for _ in range(turns):
        for call, figures in zip((kind.ours, kind.theirs), spent, strict=True):
            total = 0.0
            for _ in range(count):
                kind.prepare()
                began = time.process_time()
                call()
                total += time.process_time() - began
            figures.append(total / count * 1000)
    return statistics.median(spent[0]), statistics.median(spent[1])


def compare_parsers(turns: int, count: int = 20_000) -> None:
    bodies = [_JOB_STATS.replace(b"age: 12", b"age: %d" % number) for number in range(count)]
    spent: dict[str, list[float]] = {"multiq": [], "greenstalk": []}
    for _ in range(turns):
        for name, parse in (("multiq", parse_job_stats), ("greenstalk", greenstalk._parse_stats)):  # noqa: SLF001
            began = time.process_time()
            for body in bodies:
                parse(body)
            spent[name].append((time.process_time() - began) / count * 1e6)
    ours, theirs = (statistics.median(spent[name]) for name in ("multiq", "greenstalk"))
    print(f"\nparsing stats-job: multiq {ours:.2f} us, greenstalk {theirs:.2f} us, {theirs / ours:.2f} times")


def compare_deadlines(server: BeanstalkServer) -> None:
    print(f"\nseconds until a call with {_DEADLINE} s ends, and the result of the next call")
    with _both((HOST, server.port)) as calls:
        for call in calls.values():
            call()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            _report("stopped", calls)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        _report("running again", calls)
    with _both(_dripping()) as calls:
        _report("byte by byte", calls)


@contextlib.contextmanager
def _both(address: tuple[str, int]) -> Iterator[dict[str, Callable[[], object]]]:
    backend = open_backend(f"beanstalk://{address[0]}:{address[1]}?timeout={_DEADLINE}")
    sock = socket.create_connection(address)
    sock.settimeout(_DEADLINE)
    client: Any = greenstalk.Client(sock, encoding=None)
    yield {"multiq": lambda: backend.stats("q0"), "greenstalk": lambda: client.stats_tube("q0")}
    client.close()
    backend.close()


def _report(what: str, calls: dict[str, Callable[[], object]]) -> None:
    for name, call in calls.items():
        began = time.monotonic()
        ended = _outcome(call)
        print(f"{what:14} {name:12} {time.monotonic() - began:6.2f} s: {ended}")


def _outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (MultiqError, OSError, AssertionError, greenstalk.Error, ValueError) as exc:
        return f"{type(exc).__name__}: {str(exc)[:80]}"
    return "an answer"


def _dripping() -> tuple[str, int]:
    """A server that sends one byte of its reply at a time, for ``_MOST_BYTES`` bytes."""
    listener = socket.create_server((HOST, 0))

    def serve(peer: socket.socket) -> None:
        with peer:
            peer.recv(1000)
            for _ in range(_MOST_BYTES):
                try:
                    peer.send(b"O")
                except OSError:
                    return
                time.sleep(_DRIP)

    def accept() -> None:
        for _ in range(2):
            peer, _ = listener.accept()
            threading.Thread(target=serve, args=(peer,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    name: tuple[str, int] = listener.getsockname()
    return name


def _job() -> NewJob:
    return NewJob(b"x" * 100, new_id(), 1024, 0.0, 60.0)


def _peek(client: Any, number: int) -> object:
    return client.peek(number).body, client.stats_job(number)


def _queues(client: Any) -> list[str]:
    return [name for name in client.tubes() if client.stats_tube(name)["current-jobs-ready"]]


def _kick(client: Any) -> int:
    """Kick by id, because the server's ``kick`` command kicks delayed jobs if no job is buried."""
    for _ in range(_JOBS):
        client.kick_job(client.peek_buried().id)
    return _JOBS


def _purge(client: Any) -> int:
    client.use("p")
    for _ in range(_JOBS):
        client.delete(client.peek_ready().id)
    client.use("q")
    return _JOBS


if __name__ == "__main__":
    main()
