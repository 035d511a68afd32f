"""What is done to the processes, links and stores of a soak: each fault by its name, written down before it is done."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import psutil

from multiq.conformance.proxy import CutReply, CutRequest, Hole, Latency, Pass

from .load import TTR, name_of

if TYPE_CHECKING:
    import random
    import subprocess
    from collections.abc import Callable, Collection

    from multiq.conformance.proxy import Fault

    from .crew import Crew
    from .history import Recorder
    from .site import Site

_STALLS = (0.5, 1.5, TTR + 1)  # seconds
_LATENCIES = (0.02, 0.1, 0.3)  # seconds
_CUT_FOR = 0.5  # seconds that a fault of the proxy stays armed

OF_WORKERS = ("kill job process", "stop job process", "kill consumer", "stop consumer", "kill worker")
OF_LINKS = ("cut", "freeze links", "swallow", "slow down", "lose replies", "lose requests", "lose acks")


def available(site: Site) -> list[str]:
    """The names of the faults that can be made there."""
    names = list(OF_WORKERS)
    if site.proxy is not None:
        names += [name for name in OF_LINKS if site.acks or name != "lose acks"]
    if site.server is not None and site.server.can_pause:
        names.append("freeze server")
    if site.server is not None and site.server.can_restart:
        names.append("restart server")
    return [*names, *site.own_faults]


class Nemesis:
    """Does harm, and writes down what it did, and to whom. *only*: faults by their names; None: all there are."""

    def __init__(
        self, crew: Crew, site: Site, recorder: Recorder, chance: random.Random, only: Collection[str] | None = None
    ) -> None:
        self._crew = crew
        self._site = site
        self._recorder = recorder
        self._chance = chance
        self.count = 0
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
        """One fault, and the history has when it began and when it was over."""
        if not self._faults:
            return
        name = self._chance.choice(list(self._faults))
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
            self._faults[name]()
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

    def _stop_child(self) -> None:
        child = self._a_child()
        self._stop(child, name_of(child.pid))

    def _stop(self, process: psutil.Process, name: str) -> None:
        """Longer than its leases last."""
        self._note("stop", name, TTR + 2)
        process.suspend()
        try:
            time.sleep(TTR + 0.5)
        finally:
            process.resume()

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
        name, process = self._a_consumer()
        self._note("kill", name, 1.0)
        process.kill()
        process.wait()

    def _stop_consumer(self) -> None:
        name, process = self._a_consumer()
        self._stop(psutil.Process(process.pid), name)

    def _a_consumer(self) -> tuple[str, subprocess.Popen[bytes]]:
        """A plain one, and how it is called in the history."""
        mine = [(key, process) for key, process in sorted(self._crew.clients.items()) if key[0] == "consume"]
        (role, name), process = self._chance.choice(mine)
        return f"{role}-{name}.{process.pid}", process

    # --- links ---

    def _cut(self) -> None:
        self._note("cut", "link", 1.0)
        assert self._site.proxy is not None  # noqa: S101 - as for all below: else it is not among the faults
        self._site.proxy.cut(rst=self._chance.random() < 0.5)

    def _freeze_links(self) -> None:
        """What is connected now hears nothing any more, for a while not even an end."""
        assert self._site.proxy is not None  # noqa: S101
        seconds = self._chance.choice(_STALLS)
        self._note("freeze", "link", seconds + 3)
        self._site.proxy.freeze()
        time.sleep(seconds)
        self._site.proxy.cut_server()

    def _swallow(self) -> None:
        """Connections stay open, and what is sent into them is never delivered. Then they end: TCP leaves no gaps."""
        assert self._site.proxy is not None  # noqa: S101
        seconds = self._chance.choice(_STALLS)
        self._note("freeze", "link", seconds + 3)
        self._site.proxy.mode = Hole()
        time.sleep(seconds)
        self._site.proxy.cut()
        self._site.proxy.mode = Pass()

    def _slow_down(self) -> None:
        assert self._site.proxy is not None  # noqa: S101
        self._note("slow", "link", 3.0)
        self._site.proxy.mode = Latency(self._chance.choice(_LATENCIES))
        time.sleep(1.5)
        self._site.proxy.mode = Pass()

    def _lose_replies(self) -> None:
        """The server does what it is asked, and its replies do not arrive."""
        self._cut_some(CutReply(at=self._chance.choice([0, 3]), times=5))

    def _lose_requests(self) -> None:
        """The server is never asked, and its clients cannot know that."""
        self._cut_some(CutRequest(at=self._chance.choice([0, 3]), times=5))

    def _lose_acks(self) -> None:
        """The server carries out acks, and its replies do not arrive."""
        self._cut_some(CutReply(after=self._site.acks, times=5))

    def _cut_some(self, fault: Fault) -> None:
        assert self._site.proxy is not None  # noqa: S101
        self._note("cut", "link", 3.0)
        self._site.proxy.arm(fault)
        time.sleep(_CUT_FOR)
        self._site.proxy.disarm()

    # --- servers ---

    def _freeze_server(self) -> None:
        assert self._site.server is not None  # noqa: S101
        seconds = self._chance.choice((*_STALLS[:2], TTR))
        self._note("freeze", "store", seconds + 3)
        self._site.server.pause()
        try:
            time.sleep(seconds)
        finally:
            self._site.server.go_on()
        self._recorder.note("back", kind="freeze server")

    def _restart_server(self) -> None:
        assert self._site.server is not None  # noqa: S101
        self._note("restart", "store", 5.0)
        self._site.server.restart()
        self._recorder.note("back", kind="restart server")

    def _own(self, kind: str, do: Callable[[], object]) -> None:
        self._note(kind, "store", 2.0)
        with contextlib.suppress(Exception):  # the client that says "kill all clients" is one
            do()
