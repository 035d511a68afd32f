"""How soon work continues after a server was killed and restarted, and whether calls keep their deadlines while a
server is stopped.

``python tests/soak/recovery.py redis --restarts 50 --freezes 20``; without names it runs on all three backends that
have a server. The load is that of the soak, without jobs that make faults on their own processes. A restart is over
when plain consumers, the single consumer of a queue, and workers have each begun a job after the server served again.
Afterwards the history is checked by all invariants.
"""

from __future__ import annotations

import argparse
import bisect
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
if str(HERE.parent) not in sys.path:
    sys.path[:0] = [str(HERE.parent)]

from soak.page import conditions, renew  # noqa: E402
from soak.run_soak import SITES, TIMEOUT, keep  # noqa: E402

from multiq.backend.registry import open_backend  # noqa: E402
from multiq.soak.campaign import setting_for  # noqa: E402
from multiq.soak.counterexamples import check  # noqa: E402
from multiq.soak.crew import Crew  # noqa: E402
from multiq.soak.history import Recorder, read  # noqa: E402
from multiq.soak.load import Load  # noqa: E402
from multiq.soak.report import Spread, table  # noqa: E402
from multiq.soak.stories import SECOND, Stories  # noqa: E402

if TYPE_CHECKING:
    from multiq.soak.counterexamples import Verdict
    from multiq.soak.site import Site

NAMES = ("redis", "beanstalk", "mysql")
GROUPS = ("consume", "lane", "job")
_CALM = {"kill": 0, "leave": 0, "hang": 0, "ahang": 0, "long": 0, "along": 0}
_RESTARTS, _FREEZES = 50, 20
_WATCHED = 2.0  # seconds from a restart until the next fault, at least
_SLACK = 1.0  # seconds that a call may take beyond its deadline


@dataclass(frozen=True)
class Recovery:
    """The result on one backend."""

    name: str
    first: Spread | None
    """Seconds from when the server serves again until any consumer begins a job."""
    all: Spread | None
    """The same, until each kind of consumer has begun a job."""
    never: int
    """Restarts after which some kind of consumer began no job before the next restart."""
    freezes: int
    calls: int
    """Calls that were under way, or were made, while the server was frozen."""
    beyond: int
    """How many of these calls took more than a second longer than their deadline."""
    overrun: float
    """Seconds: the most that one of these calls took beyond its deadline."""
    verdict: Verdict


def measure(name: str, folder: Path, *, restarts: int, freezes: int, seed: int) -> Recovery:
    with SITES[name](folder) as site:
        with open_backend(site.url) as backend:
            backend.queues()  # creates MySQL's tables, which may take longer than a call under test may take
        # consumers that keep a job for seconds would look like consumers that do not continue
        load = Load(folder=str(folder), seed=seed, timeout=TIMEOUT, weights=_CALM, pace=0.05, late=0.0)
        crew = Crew(load, site, 5.0 * (restarts + freezes))
        recorder = Recorder(folder, "nemesis")
        recorder.note("begun", kind=name, value=float(seed))
        try:
            crew.keep_up()
            _until_all_work(folder)
            _hurt(site, recorder, crew, restarts, freezes, random.Random(seed))
            recorder.note("healed")
            crew.stop("produce", "manage")
            give_up_at = time.monotonic() + 120
            while site.is_left() and time.monotonic() < give_up_at:
                time.sleep(0.5)
            recorder.note("drained")
            crew.stop("consume", "lane")
            crew.end_workers()
            found = site.held()
            recorder.note("audit", jobs=tuple(number for number, _ in found), states=tuple(state for _, state in found))
        finally:
            crew.kill_all()
            recorder.close()
        return _judged(name, check(read(folder), setting_for(name, load)))


def _until_all_work(folder: Path) -> None:
    give_up_at = time.monotonic() + 60
    while time.monotonic() < give_up_at and not all(any(folder.glob(f"{group}*.jsonl")) for group in GROUPS):
        time.sleep(0.2)
    time.sleep(1.0)


def _hurt(  # noqa: PLR0917 - of a script
    site: Site, recorder: Recorder, crew: Crew, restarts: int, freezes: int, chance: random.Random
) -> None:
    assert site.server is not None
    for _ in range(restarts):
        recorder.note("fault", kind="restart", target="store", value=5.0)
        site.server.restart()
        recorder.note("back", kind="restart server")
        recorder.note("struck", kind="restart server")
        time.sleep(_WATCHED + chance.random())
        crew.keep_up()  # normally no process has ended
    for _ in range(freezes):
        seconds = chance.choice([0.5, 1.5, 3.0])
        recorder.note("fault", kind="freeze", target="store", value=seconds + 3)
        site.server.pause()
        try:
            time.sleep(seconds)
        finally:
            site.server.go_on()
        recorder.note("back", kind="freeze server")
        recorder.note("struck", kind="freeze server")
        time.sleep(_WATCHED)
        crew.keep_up()


def _judged(name: str, verdict: Verdict) -> Recovery:
    stories = Stories(verdict.events)
    begun: dict[str, list[int]] = defaultdict(list)
    for story in stories:
        for run in story.runs:
            begun[run.proc.partition("-")[0].partition(".")[0]].append(run.at)
    for times in begun.values():
        times.sort()
    faults = sorted(fault.at for fault in stories.faults if fault.target == "store")
    first, every, never = [], [], 0
    for back in stories.notes["back"]:
        if back.kind != "restart server":
            continue
        at = bisect.bisect(faults, back.t)
        until = faults[at] if at < len(faults) else stories.notes["healed"][-1].t
        took = [_next(begun[group], back.t) for group in GROUPS]
        never += max(took) > until - back.t
        first.append(min(took) / SECOND)
        every.append(max(took) / SECOND)
    frozen = [fault for fault in stories.faults if fault.kind == "freeze"]
    overruns = [
        (answer.t - asked.t) / SECOND - asked.deadline
        for asked, answer in stories.calls
        if answer is not None and asked.deadline and any(f.at <= answer.t and asked.t <= f.until for f in frozen)
    ]
    return Recovery(
        name, Spread.of(first), Spread.of(every), never, len(frozen), len(overruns),
        sum(over > _SLACK for over in overruns), max([0.0, *overruns]), verdict,
    )  # fmt: skip


def _next(times: list[int], after: int) -> float:
    at = bisect.bisect(times, after)
    return times[at] - after if at < len(times) else float("inf")


def text(recoveries: list[Recovery]) -> str:
    """The tables of the page."""
    head = ["", *(one.name for one in recoveries)]
    rows = [
        ["restarts", *(f"{one.first.count if one.first else 0}" for one in recoveries)],
        ["first job (median / 99 of 100 / longest)", *(_shown(one.first) for one in recoveries)],
        ["all kinds of consumers at work", *(_shown(one.all) for one in recoveries)],
        ["restarts after which some kind did not go on", *(f"{one.never}" for one in recoveries)],
        ["freezes of 0.5 to 3 s", *(f"{one.freezes}" for one in recoveries)],
        ["calls meanwhile", *(f"{one.calls:,}" for one in recoveries)],
        ["calls over a second beyond their deadline", *(f"{one.beyond}" for one in recoveries)],
        ["most that one took beyond its deadline", *(f"{one.overrun:.2f} s" for one in recoveries)],
        ["violated invariants", *(", ".join(one.verdict.violations) or "none" for one in recoveries)],
    ]
    told = (
        "A server is killed (SIGKILL) and started again while workers, plain consumers and producers use it, "
        f"without any intervention. Then it is frozen (SIGSTOP). A call may take {TIMEOUT:g} s. The times are in "
        "seconds, and begin when the server serves again:\n\n"
    )
    return f"{told}{table(head, rows)}"


def _shown(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p50:.3f} / {spread.p99:.3f} / {spread.longest:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("backends", nargs="*", choices=[*NAMES, []], metavar="BACKEND", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--restarts", type=int, default=_RESTARTS)
    parser.add_argument("--freezes", type=int, default=_FREEZES)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--page", action="store_true", help="renew the table of docs/reliability.md")
    options = parser.parse_args()
    recoveries = []
    for name in options.backends or NAMES:
        folder = Path(tempfile.mkdtemp(prefix=f"multiq-recovery-{name}-"))
        one = measure(name, folder, restarts=options.restarts, freezes=options.freezes, seed=options.seed)
        print(f"{name}: seed {options.seed}\n{one.verdict.report()}", flush=True)
        if one.verdict.is_clean:
            shutil.rmtree(folder)
        else:
            kept = keep(one.verdict, name, f"recovery seed {options.seed}")
            print(f"kept {', '.join(map(str, kept))}; the history is in {folder}", flush=True)
        recoveries.append(one)
    print(text(recoveries), flush=True)
    if options.page:
        is_whole = options.restarts >= _RESTARTS and options.freezes >= _FREEZES and len(recoveries) == len(NAMES)
        short_of = "" if is_whole else f"{_RESTARTS} restarts and {_FREEZES} freezes of each, `tests/soak/recovery.py`"
        renew("recovery", f"{conditions(short_of)}\n\n{text(recoveries)}")
    return 0 if all(one.verdict.is_clean and not one.never and not one.beyond for one in recoveries) else 1


if __name__ == "__main__":
    sys.exit(main())
