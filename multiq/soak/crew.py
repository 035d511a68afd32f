"""The worker and client processes of one soak."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from .load import VARIABLE

if TYPE_CHECKING:
    from .load import Load
    from .site import Site

WORKERS = ("-p 2 -t 4", "-p 1 --concurrency 4", "-p 1 -t 1")
CLIENTS = (("produce", "1"), ("produce", "2"), ("consume", "3"), ("consume", "4"), ("lane", "5"), ("manage", "6"))
_PRODUCERS = {"produce", "manage"}
_OF_AN_OUTAGE = ("error: ", "multiq.errors.Backend")
_NEVER = "this should not happen"
_PATIENCE = 60.0  # seconds after which a process counts as hung
_LAST = 300.0  # seconds that a worker may run after the load's end; the limit ends the workers of a killed soak


class Crew:
    """All processes of one soak.

    *plant* names a module that each process imports first. A test uses *plant* to put bugs into the tested code.
    """

    def __init__(self, load: Load, site: Site, seconds: float, *, plant: str = "") -> None:
        self._folder = Path(load.folder)
        self._max_time = seconds + _LAST
        self._plant = plant
        settings = self._folder / "multiq.toml"
        settings.touch()  # an empty settings file, so that the settings of the machine do not change the load
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)  # noqa: PTH109 - a str, as in sys.path
        own = {"MULTIQ_URL": site.url, "MULTIQ_CONFIG": str(settings), "PYTHONPATH": path}
        self._environment = {**os.environ, **load.environment(), **own}
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.clients: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._rounds = 0
        self._logs: dict[int, Path] = {}

    def keep_up(self, *, with_producers: bool = True) -> dict[str, str]:
        """Start each process that is not running.

        Returns a description of each process that ended by itself. The keys are the processes' names. Processes that
        were ended by SIGKILL or by an error of an outage are left out.
        """
        badly: dict[str, str] = {}
        for options in WORKERS:
            if options not in self.workers or self.workers[options].poll() is not None:
                badly |= self._end_of(f"worker {options}", self.workers.get(options))
                asked = ["worker", "multiq.soak.tasks:app", "--force", "--kill-after", "1"]
                asked += ["--max-time", f"{self._max_time:.0f}", *options.split()]
                self.workers[options] = self._start("multiq", asked, f"worker {options}")
        for role, name in CLIENTS:
            if (role, name) in self.clients and self.clients[role, name].poll() is None:
                continue
            if with_producers or role not in _PRODUCERS:
                badly |= self._end_of(f"{role} {name}", self.clients.get((role, name)))
                # a producer that is started again takes new job numbers, because the old numbers are used up
                begins_again = role in _PRODUCERS and (role, name) in self.clients
                number = int(name) + (10 * self._rounds if begins_again else 0)
                self.clients[role, name] = self._client(role, str(number))
        return badly

    def _end_of(self, name: str, process: subprocess.Popen[bytes] | None) -> dict[str, str]:
        if process is None or process.returncode == -signal.SIGKILL:
            return {}
        lines = self._logs[process.pid].read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line), "")
        # a process that starts during an outage may end with the outage's error
        if process.returncode == 1 and last.startswith(_OF_AN_OUTAGE) and _NEVER not in last:
            return {}
        return {name: f"{name} ended with {process.returncode} without having been killed: {last[:200]}"}

    def children(self, options: str | None = None) -> list[psutil.Process]:
        """The job processes of all workers, or of the worker with the given options."""
        found = []
        for worker in self.workers.values() if options is None else [self.workers[options]]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(worker.pid).children(recursive=True)
        return found

    def stop(self, *roles: str) -> dict[str, str]:
        """End the clients that have one of the given roles. Returns a description of each client that did not end well.
        The keys are the clients' names."""
        for role in roles:
            (self._folder / f"stop-{role}").touch()
        ended = {f"{role} {name}": process for (role, name), process in self.clients.items() if role in roles}
        return self._ends(ended)

    def count(self) -> dict[str, str]:
        """Record, in the history, the job counts that multiq reports. Returns descriptions of processes that did not
        end well, like ``stop``."""
        return self._ends({"count": self._client("count", "0")})

    def end_workers(self) -> dict[str, str]:
        """End the workers by SIGTERM. Returns descriptions of processes that did not end well, like ``stop``."""
        for process in self.workers.values():
            process.terminate()
        return self._ends({f"worker {options}": process for options, process in self.workers.items()})

    def _ends(self, processes: dict[str, subprocess.Popen[bytes]]) -> dict[str, str]:
        badly = {}
        give_up_at = time.monotonic() + _PATIENCE
        for name, process in processes.items():
            try:
                code = process.wait(max(0.1, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                badly[name] = f"did not end within {_PATIENCE:g} s"
            else:
                if code:
                    badly[name] = f"ended with {code}"
        return badly

    def kill_all(self) -> bool:
        """Kill all processes. Returns whether any process was still running.

        If a signal comes while a process is being started, that process is missing in all lists. This method finds a
        process that is missing in the lists by its environment variables.
        """
        ran = [process for process in [*self.workers.values(), *self.clients.values()] if process.poll() is None]
        for process in [*self.workers.values(), *self.clients.values()]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if _environment_of(child).get(VARIABLE) == self._environment[VARIABLE]:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait(_PATIENCE)
        return bool(ran)

    def _client(self, role: str, name: str) -> subprocess.Popen[bytes]:
        return self._start("multiq.soak.clients", [role, name], f"{role} {name}")

    def _start(self, module: str, arguments: list[str], name: str) -> subprocess.Popen[bytes]:
        self._rounds += 1
        plant = [f"import {self._plant}"] if self._plant else []
        code = ["import runpy, sys", *plant, f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"]
        path = self._folder / f"{name}.log"
        with path.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, "-P", "-c", "\n".join(code), *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._logs[process.pid] = path
        return process


def _environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment of *process*. The environment is empty during the call of ``exec``, so the function waits
    up to a second for a value."""
    give_up_at = time.monotonic() + 1.0
    while not (found := process.environ()) and time.monotonic() < give_up_at:
        time.sleep(0.005)
    return dict(found)
