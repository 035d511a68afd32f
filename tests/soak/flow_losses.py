"""Chains and a batch around kills of worker processes: ``python tests/soak/flow_losses.py --help``.

The workers are the command line, ``multiq worker``. What happened is read from a file that the jobs write: nothing that
multiq writes about itself has a part in it. ``chains`` kills a random worker process every 200 ms, if a job has run
since the last kill: a supervisor delays the start of a process if earlier processes died early. ``batch`` has every
tenth member's process die after its work and before its ack. ``growing`` is a batch whose members add further members,
around such kills. With ``--cuts`` the workers of a server reach it through a proxy. Every 200 ms the proxy
loses a request, or the reply to a request that was carried out, and ends the connection. At the end

- every step of every chain has ended at least once;
- no step began before the step before it had ended, and no step began after the step after it had begun: so each was
  released exactly once, after its predecessor's ack;
- no attempt of a step has been begun twice: so no step was enqueued a second time;
- the call after the batch began once for each of its attempts, after the last member's end;
- nothing is left in the store, held and buried jobs included.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

HERE = Path(__file__).parent
APPS = HERE.parent / "integration"
sys.path += [str(HERE.parent), str(APPS)]

from flows_app import QUEUES, after_all, app, grower, left, member, right  # noqa: E402
from stores import STORES  # noqa: E402

import multiq  # noqa: E402
from multiq.fault_proxy import CutReply, CutRequest, Proxy  # noqa: E402
from multiq.flows.record import HOME  # noqa: E402

STEPS = 5
_KILL_EVERY = 0.2  # seconds
_STALLED = 60.0  # seconds without a line of any job


class Line(NamedTuple):
    """A line of the diary."""

    word: str
    flow: str
    number: str
    attempt: int
    at: int
    pid: int


class Workers:
    """Worker commands on one store, which are replaced when they end."""

    def __init__(self, url: str, folder: Path, count: int, dying_every: int) -> None:
        self._environment = {
            **os.environ,
            "MULTIQ_URL": url,
            "PYTHONPATH": str(APPS),
            "FLOWS_FOLDER": str(folder),
            "FLOWS_DYING_EVERY": str(dying_every),
        }
        self._folder = folder
        self._log = (folder / "workers.log").open("a")
        self._commands = [self._start() for _ in range(count)]
        self.kills = 0

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "multiq", "worker", "flows_app:app", "-q", ",".join(QUEUES), "-p", "2"],
            env=self._environment,
            cwd=self._folder,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def replace(self) -> None:
        for at, command in enumerate(self._commands):
            if command.poll() is not None:
                self._commands[at] = self._start()

    def kill_one(self, chance: random.Random) -> None:
        """Kill a random process that runs jobs: a supervisor's child."""
        children = [
            child
            for command in self._commands
            if command.poll() is None
            for child in psutil.Process(command.pid).children(recursive=True)
        ]
        if children:
            with contextlib.suppress(psutil.NoSuchProcess):
                chance.choice(children).send_signal(signal.SIGKILL)
                self.kills += 1

    def end(self) -> None:
        for command in self._commands:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)
            command.wait()
        self._log.close()


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as place, STORES[arguments.backend](Path(place)) as url:
        folder = Path(place)
        app.connect(url)
        try:
            faults = run(url, folder, arguments.what, arguments.number, arguments.seed, is_cut=arguments.cuts)
        finally:
            app.close()
    for fault in faults[:20]:
        print("FAULT", fault)
    return 1 if faults else 0


class Cuts:
    """Ends a connection of the workers at each call, before the server has the request or after it has answered."""

    def __init__(self, proxy: Proxy | None, chance: random.Random) -> None:
        self._proxy = proxy
        self._chance = chance
        self.made = 0

    def make_one(self) -> None:
        if self._proxy is None or self._proxy.is_armed:
            return
        at = self._chance.choice([0, 3, 40])
        self._proxy.arm(self._chance.choice([CutReply(at=at), CutRequest(at=at)]))
        self.made += 1


def run(
    url: str, folder: Path, what: str, number: int, seed: int, *, workers: int = 2, is_cut: bool = False
) -> list[str]:
    """Run *number* chains, or a batch of *number* members. Returns what is wrong with the history."""
    parts = urlsplit(url)
    if not is_cut or parts.hostname is None or parts.port is None:
        return _run(url, folder, what, number, seed, workers=workers)
    with Proxy((parts.hostname, parts.port)) as proxy:
        between = url.replace(f":{parts.port}", f":{proxy.port}")
        return _run(between, folder, what, number, seed, workers=workers, proxy=proxy)


def _run(
    url: str, folder: Path, what: str, number: int, seed: int, *, workers: int, proxy: Proxy | None = None
) -> list[str]:
    """*url*: what the workers connect to."""
    began = time.monotonic()
    chance = random.Random(seed)
    cuts = Cuts(proxy, chance)
    if what == "chains":
        flows = [_chain(at).enqueue() for at in range(number)]
        commands = Workers(url, folder, workers, dying_every=0)
    elif what == "growing":
        members = [grower.s(at) for at in range(number)]
        flows = [multiq.batch(members, then=after_all.s(), name="growing").enqueue()]
        commands = Workers(url, folder, workers, dying_every=0)
    else:
        members = [member.s(at) for at in range(number)]
        flows = [multiq.batch(members, then=after_all.s(), name="losses").enqueue()]
        commands = Workers(url, folder, workers, dying_every=10)
    try:
        _until_done(commands, folder, None if what == "batch" else chance, cuts)
    finally:
        commands.end()
    lines = _diary(folder)
    check = {"chains": _check_chains, "batch": _check_batch, "growing": _check_growing}[what]
    faults = [*check(lines, number), *_check_store(flows)]
    runs = sum(line.word == "begin" for line in lines)
    print(
        f"{app.backend.declared.backend}: {number} {what}, seed {seed}: {runs} runs, {commands.kills} kills, "
        f"{cuts.made} cuts, {time.monotonic() - began:.0f} s, {len(faults)} faults"
    )
    return faults


def _chain(number: int) -> multiq.flows.Chain:
    return multiq.chain(*((left if step % 2 == 0 else right).s(number, step) for step in range(STEPS)))


def _until_done(commands: Workers, folder: Path, chance: random.Random | None, cuts: Cuts) -> None:
    size, grown_at = 0, time.monotonic()
    while True:
        time.sleep(_KILL_EVERY)
        commands.replace()
        cuts.make_one()
        stats = [app.backend.stats(queue) for queue in QUEUES]
        left_over = sum((s.ready or 0) + (s.delayed or 0) + (s.reserved or 0) + (s.held or 0) for s in stats)
        if not left_over:
            return
        diary = folder / "diary"
        if diary.exists() and diary.stat().st_size > size:
            size, grown_at = diary.stat().st_size, time.monotonic()
            if chance is not None:
                commands.kill_one(chance)
        elif time.monotonic() - grown_at > _STALLED:
            print(f"no job has run for {_STALLED:g} s: {stats}")
            return


def _diary(folder: Path) -> list[Line]:
    lines = []
    for text in (folder / "diary").read_text().splitlines():
        word, what, attempt, at, pid = text.split()
        flow, _, number = what.partition(".")
        lines.append(Line(word, flow, number, int(attempt), int(at), int(pid)))
    return lines


def _check_chains(lines: list[Line], number: int) -> list[str]:
    begins, ends = _times(lines)
    faults = _doubled(lines)
    for chain in range(number):
        for step in range(STEPS):
            own = str(chain), str(step)
            if not ends[own]:
                faults.append(f"step {step} of chain {chain} never ended")
                continue
            if step == 0:
                continue
            before = str(chain), str(step - 1)
            if not ends[before] or min(begins[own]) < min(ends[before]):
                faults.append(f"step {step} of chain {chain} began before the step before it had ended")
            if max(begins[before]) > min(begins[own]):
                faults.append(f"step {step - 1} of chain {chain} began after the step after it had begun")
    return faults


def _check_batch(lines: list[Line], number: int) -> list[str]:
    begins, ends = _times(lines)
    faults = _doubled(lines)
    faults += [f"member {at} never ended" for at in range(number) if not ends["0", str(at)]]
    then = [line for line in lines if line.flow == "then" and line.word == "begin"]
    if not then:
        return [*faults, "the call after the batch never began"]
    first = min(line.at for line in then)
    late = [at for at in range(number) if max(begins["0", str(at)], default=0) > first]
    faults += [f"member {at} began after the call after the batch" for at in late]
    runs = sum(line.word == "begin" for line in lines) - len(then)
    if number >= 10 and runs <= number:
        faults.append(f"no member ran twice in {runs} runs: nothing was proven")
    return faults


def _check_growing(lines: list[Line], number: int) -> list[str]:
    _, ends = _times(lines)
    faults = [f"member {at} never ended" for at in range(number) if not ends["0", str(at)]]
    then = [line.at for line in lines if line.flow == "then" and line.word == "begin"]
    added = [line for line in lines if line.word == "added"]
    if not then:
        return [*faults, "the call after the batch never began"]
    late = [line.number for line in added if line.at > min(then)]
    faults += [f"job {job} was added, and began after the call after the batch" for job in late]
    per_member = collections.Counter(line.number.rpartition(".")[2] for line in added)
    faults += [
        f"of member {at}, only {per_member[str(at)]} added jobs ran" for at in range(number) if per_member[str(at)] < 2
    ]
    return faults


def _check_store(flows: list[multiq.flows.FlowHandle]) -> list[str]:
    faults = []
    if left := app.backend.relay([*QUEUES, HOME]):  # the last worker may have been killed before it relayed these steps
        faults.append(f"{left} steps are left")
    for queue in QUEUES:
        stats = app.backend.stats(queue)
        if (stats.ready, stats.delayed, stats.reserved, stats.buried, stats.held) != (0, 0, 0, 0, 0):
            faults.append(f"jobs are left: {stats}")
    faults += [f"flow {flow.id} is {flow.info().state}" for flow in flows if flow.info().state != "finished"]
    return faults


def _doubled(lines: list[Line]) -> list[str]:
    seen: dict[tuple[str, str, int], int] = defaultdict(int)
    for line in lines:
        if line.word == "begin":
            seen[line.flow, line.number, line.attempt] += 1
    return [f"attempt {key[2]} of {key[0]}.{key[1]} began {count} times" for key, count in seen.items() if count > 1]


def _times(
    lines: list[Line],
) -> tuple[defaultdict[tuple[str, str], list[int]], defaultdict[tuple[str, str], list[int]]]:
    begins: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    ends: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for line in lines:
        (begins if line.word == "begin" else ends)[line.flow, line.number].append(line.at)
    return begins, ends


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=[name for name in STORES if name != "beanstalk"])
    parser.add_argument("what", choices=["chains", "batch", "growing"])
    parser.add_argument("--number", type=int, default=1000, help="chains, or members of the batch (1000)")
    parser.add_argument("--cuts", action="store_true", help="cut connections, too: not of sqlite")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
