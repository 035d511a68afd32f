"""The faults of a soak, on processes, links and stores. Each fault is recorded before it is made.

A fault is counted only if its effect was observed:

- The signal ended or stopped the process.
- The proxy cut or held data.
- The server confirmed the fault, or has a new run id.

A fault without an observed effect is recorded as ``missed``.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

import psutil

from multiq.fault_proxy import CutReply, CutRequest, Hole, Latency, Pass

from .load import TTR, name_of

if TYPE_CHECKING:
    import random
    import subprocess
    from collections.abc import Callable, Collection

    from multiq.fault_proxy import Fault

    from .crew import Crew
    from .history import Recorder
    from .site import Server, Site

_STALLS = (0.5, 1.5, TTR + 1)  # seconds
_LATENCIES = (0.02, 0.1, 0.3)  # seconds
_CUT_FOR = 0.5  # seconds that a fault of the proxy stays armed
_SEEN_WITHIN = 5.0  # seconds within which the effect of a signal must be observed

OF_WORKERS = ("kill job process", "stop job process", "kill consumer", "stop consumer", "kill worker")
OF_LINKS = ("cut", "freeze links", "swallow", "slow down", "lose replies", "lose requests", "lose acks")


def available(site: Site) -> list[str]:
    """The names of the faults that can be made on this store."""
    names = list(OF_WORKERS)
    if site.proxy is not None:
        names += [name for name in OF_LINKS if site.acks or name != "lose acks"]
    if site.server is not None and site.server.can_pause:
        names.append("freeze server")
    if site.server is not None and site.server.can_restart:
        names.append("restart server")
    return [*names, *site.own_faults]


class Missed(Exception):
    """A fault has not happened, or was not observed."""


class Nemesis:
    """Makes faults, and records each with its target.

    *only* holds the names of the faults to make. If *only* is not given, all available faults are made.
    """

    def __init__(
        self, crew: Crew, site: Site, recorder: Recorder, chance: random.Random, only: Collection[str] | None = None
    ) -> None:
        self._crew = crew
        self._site = site
        self._recorder = recorder
        self._chance = chance
        self.count = 0
        """The number of observed faults."""
        mine: dict[str, Callable[[], object]] = {
            "kill job process": self._kill_child,
            "stop job process": self._stop_child,
            "kill consumer": self._kill_consumer,
            "stop consumer": self._stop_consumer,
            "kill worker": self._kill_worker,
            "cut": self._cut,
            "freeze links": self._freeze_links,
            "swallow": self._swallow,
            "slow down": self._slow_down,
            "lose replies": self._lose_replies,
            "lose requests": self._lose_requests,
            "lose acks": self._lose_acks,
            "freeze server": self._freeze_server,
            "restart server": self._restart_server,
        }
        for kind, do in site.own_faults.items():
            mine[kind] = lambda kind=kind, do=do: self._own(kind, do)  # type: ignore[misc]
        self._faults = {name: mine[name] for name in available(site) if only is None or name in only}

    def strike(self) -> None:
        """Make one random fault. Record the beginning and the end of the fault, or the reason why it did not happen."""
        if not self._faults:
            return
        name = self._chance.choice(list(self._faults))
        try:
            self._faults[name]()
        except psutil.NoSuchProcess:
            self._recorder.note("missed", kind=name, err="the process has ended by itself")
        except Missed as exc:
            self._recorder.note("missed", kind=name, err=str(exc)[:300])
        else:
            self._recorder.note("struck", kind=name)
            self.count += 1

    def heal(self) -> None:
        proxy = self._site.proxy
        if proxy is not None:
            proxy.disarm()
            proxy.mode = Pass()
            self._note("cut", "link", 1.0)
            proxy.cut_server()
            proxy.cut()

    def _note(self, kind: str, target: str, seconds: float = 0.0) -> None:
        self._recorder.note("fault", kind=kind, target=target, value=seconds)

    # --- processes ---

    def _kill_child(self) -> None:
        child = self._a_child()
        self._note("kill", name_of(child.pid), 1.0)
        child.kill()
        _wait_for(lambda: has_ended(child), f"process {child.pid} ends")

    def _stop_child(self) -> None:
        child = self._a_child()
        self._stop(child, name_of(child.pid))

    def _stop(self, process: psutil.Process, name: str) -> None:
        """Stop a process for longer than its leases last."""
        self._note("stop", name, TTR + 2)
        try:
            process.suspend()
            _wait_for(lambda: process.status() == psutil.STATUS_STOPPED, f"process {process.pid} stands still")
            time.sleep(TTR + 0.5)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # the process's parent may have killed it
                process.resume()

    def _a_child(self) -> psutil.Process:
        children = [child for child in self._crew.children() if not has_ended(child)]
        if not children:
            raise psutil.NoSuchProcess(0)
        return self._chance.choice(children)

    def _kill_worker(self) -> None:
        options, worker = self._chance.choice(sorted(self._crew.workers.items()))
        for child in self._crew.children(options):  # the job processes end with their worker
            self._note("kill", name_of(child.pid), 2.0)
        self._note("kill", f"worker {options}")
        _kill(worker)

    def _kill_consumer(self) -> None:
        name, process = self._a_consumer()
        self._note("kill", name, 1.0)
        _kill(process)

    def _stop_consumer(self) -> None:
        name, process = self._a_consumer()
        self._stop(psutil.Process(process.pid), name)

    def _a_consumer(self) -> tuple[str, subprocess.Popen[bytes]]:
        """A random plain consumer: its name in the history, and its process."""
        mine = [(key, process) for key, process in sorted(self._crew.clients.items()) if key[0] == "consume"]
        (role, name), process = self._chance.choice(mine)
        return f"{role}-{name}.{process.pid}", process

    # --- links ---

    def _cut(self) -> None:
        self._note("cut", "link", 1.0)
        assert self._site.proxy is not None  # noqa: S101 - without a proxy this fault is not available
        _seen(self._site.proxy.cut(rst=self._chance.random() < 0.5), "there were no connections")

    def _freeze_links(self) -> None:
        """Hold all data of the connections that are open now. The held connections are cut after a while."""
        assert self._site.proxy is not None  # noqa: S101
        seconds = self._chance.choice(_STALLS)
        self._note("freeze", "link", seconds + 3)
        frozen = self._site.proxy.freeze()
        time.sleep(seconds)
        self._site.proxy.cut_server()
        _seen(frozen, "there were no connections")

    def _swallow(self) -> None:
        """Drop the data that is sent, while the connections stay open.

        At the end, cut the connections, because a TCP connection cannot continue without the dropped data.
        """
        assert self._site.proxy is not None  # noqa: S101
        seconds = self._chance.choice(_STALLS)
        self._note("freeze", "link", seconds + 3)
        before = self._site.proxy.sent
        self._site.proxy.mode = Hole()
        time.sleep(seconds)
        swallowed = self._site.proxy.sent - before
        self._site.proxy.cut()
        self._site.proxy.mode = Pass()
        _seen(swallowed, "no client sent anything")

    def _slow_down(self) -> None:
        assert self._site.proxy is not None  # noqa: S101
        self._note("slow", "link", 3.0)
        before = self._site.proxy.replied
        self._site.proxy.mode = Latency(self._chance.choice(_LATENCIES))
        time.sleep(1.5)
        self._site.proxy.mode = Pass()
        _seen(self._site.proxy.replied - before, "the server sent nothing")

    def _lose_replies(self) -> None:
        """Let the server carry out requests, but lose its replies."""
        self._cut_some(CutReply(at=self._chance.choice([0, 3]), times=5))

    def _lose_requests(self) -> None:
        """Lose requests before they reach the server. The clients cannot know whether the server has received the
        requests."""
        self._cut_some(CutRequest(at=self._chance.choice([0, 3]), times=5))

    def _lose_acks(self) -> None:
        """Let the server carry out acks, but lose its replies."""
        self._cut_some(CutReply(after=self._site.acks, times=5))

    def _cut_some(self, fault: Fault) -> None:
        assert self._site.proxy is not None  # noqa: S101
        self._note("cut", "link", 3.0)
        before = self._site.proxy.happened
        self._site.proxy.arm(fault)
        time.sleep(_CUT_FOR)
        self._site.proxy.disarm()
        _seen(self._site.proxy.happened - before, "no request or reply came that the proxy was to cut")

    # --- servers ---

    def _freeze_server(self) -> None:
        assert self._site.server is not None  # noqa: S101
        seconds = self._chance.choice((*_STALLS[:2], TTR))
        self._note("freeze", "store", seconds + 3)
        try:
            self._site.server.pause()
            _wait_for(lambda: _stands_still(self._site.server), "the server stands still")
            time.sleep(seconds)
        finally:
            self._site.server.go_on()
        self._recorder.note("back", kind="freeze server")

    def _restart_server(self) -> None:
        assert self._site.server is not None  # noqa: S101
        server = self._site.server
        self._note("restart", "store", 5.0)
        before = server.run_id()
        server.restart()
        after = server.run_id()
        self._recorder.note("back", kind="restart server")
        _seen(before != after, f"the server was not restarted: its run id is still {after}")

    def _own(self, kind: str, do: Callable[[], object]) -> None:
        self._note(kind, "store", 2.0)
        try:
            happened = do()
        except Exception as exc:  # the store's client may raise any exception
            raise Missed(f"{type(exc).__name__}: {exc}") from exc
        _seen(happened, f"the server did not confirm it: {happened!r}")


def _seen(happened: object, otherwise: str) -> None:
    if not happened:
        raise Missed(otherwise)


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + _SEEN_WITHIN
    while not condition():
        if time.monotonic() > give_up_at:
            raise Missed(f"waited {_SEEN_WITHIN:g} s in vain until {what}")
        time.sleep(0.005)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    code = process.wait()
    _seen(code == -signal.SIGKILL, f"process {process.pid} had ended with {code} before")


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _stands_still(server: Server | None) -> bool:
    try:
        return server is not None and psutil.Process(server.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
