"""``multiq soak``: run workers on your store, inject faults, and check the history of each job."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from multiq.formatting import many
from multiq.terminal_escapes import safe

from .exits import BROKEN, OK
from .options import json_option, traceback_option
from .output import Column, note, print_json, show, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.soak.counterexamples import Verdict
    from multiq.soak.report import Outcome
    from multiq.soak.staging import Harm

_OVERHEAD = 25.0  # roughly the seconds that a soak takes in addition to its load


@click.command(short_help="Run jobs under faults, and check what happened to each.")
@click.argument("targets", nargs=-1, required=True, metavar="URL|NAME...")
@click.option(
    "--seconds",
    type=click.FloatRange(1, 86400),
    default=60.0,
    show_default=True,
    metavar="N",
    help="How long to load each store and inject faults.",
)
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Choose the same faults as the run with this seed.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.5, 60),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="The longest that one call may take.",
)
@click.option("--fault", "faults", multiple=True, metavar="NAME", help="Only this fault; may be given again.")
@click.option("--freeze-pid", type=click.IntRange(2), metavar="PID", help="Also freeze this process for some seconds.")
@click.option("--restart-command", default="", metavar="COMMAND", help="Also restart the server, with this command.")
@click.option("--flush-scripts", is_flag=True, help="Redis: also make the server forget all scripts.")
@click.option(
    "--history",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write the history there, and keep it.",
)
@json_option
@traceback_option
def soak(  # noqa: PLR0917 - click passes all parameters by name
    targets: tuple[str, ...],
    seconds: float,
    seed: int | None,
    timeout: float,
    faults: tuple[str, ...],
    freeze_pid: int | None,
    restart_command: str,
    flush_scripts: bool,
    history: Path | None,
    as_json: bool,
) -> int:
    """Run workers, producers and consumers on a store, inject faults, and check the history of each job.

    \b
      multiq soak redis://staging:6379
      multiq soak mysql://multiq@staging/jobs --seconds 300 --seed 7

    The soak kills and stops processes that it has started, and cuts, freezes and slows down its own connections. The
    soak injects faults into the server only with --freeze-pid, --restart-command or --flush-scripts. With faults in the
    server, a soak tests only one store. A soak works in queues of its own, and removes these queues at the end, even
    after Ctrl-C. Exits with 6 if a job was lost or was run again for no reason, or if another promise was broken. The
    command needs an extra: pip install 'multiq[soak]'.
    """
    from multiq.soak import need_extra

    need_extra()
    from multiq.soak.report import outcome
    from multiq.soak.staging import Harm

    from .framework_app import current_settings

    harm = Harm(freeze_pid, restart_command, flush_scripts)
    if any(harm) and len(targets) > 1:
        raise click.UsageError(
            "--freeze-pid, --restart-command and --flush-scripts are about one server: name one store"
        )
    settings = current_settings()
    urls = [settings.resolve(target) for target in targets]
    chosen = random.randrange(10**6) if seed is None else seed  # noqa: S311 - a seed makes the soak repeatable
    about = len(urls) * (seconds + _OVERHEAD)
    note(f"{many(len(urls), 'store')}, seed {chosen}: this takes about {about:.0f} seconds")
    done: list[tuple[Outcome, Verdict]] = []
    with _ended_by_sigterm():
        for number, url in enumerate(urls):
            folder = None if history is None else history / str(number)
            with _progress(seconds) as tell:
                verdict = _run(url, folder, seconds, chosen, timeout, faults, harm, tell)
            done.append((outcome(verdict, seconds), verdict))
    if as_json:
        print_json({"soaks": [_document(one, verdict) for one, verdict in done]})
    else:
        _show(done)
    return OK if all(verdict.is_clean for _, verdict in done) else BROKEN


def _run(  # noqa: PLR0917 - one parameter for each option of a soak
    url: str,
    folder: Path | None,
    seconds: float,
    seed: int,
    timeout: float,
    faults: tuple[str, ...],
    harm: Harm,
    tell: Callable[[str, float, int], object],
) -> Verdict:
    from multiq.soak import campaign
    from multiq.soak.load import Load
    from multiq.soak.nemesis import available
    from multiq.soak.staging import site_at

    with tempfile.TemporaryDirectory(prefix="multiq-soak-", ignore_cleanup_errors=True) as own:
        load = Load(
            folder=str(Path(own) if folder is None else folder.resolve()),
            seed=seed,
            timeout=timeout,
            prefix=f"multiq.soak.{os.urandom(5).hex()}.",
        )
        with site_at(url, load.queues, timeout, harm) as site:
            known = available(site)
            for name in faults:
                if name not in known:
                    raise click.UsageError(f"fault {name!r} cannot be injected here; choose from: {', '.join(known)}")
            if folder is not None:
                _make(folder)
            return campaign.soak(site, load, campaign.Plan(seconds, faults or None), tell)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise click.UsageError(f"{folder} is there already: a history is written into a folder of its own") from None
    except OSError as exc:
        raise click.UsageError(f"{folder} cannot be made: {exc.strerror}") from None


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, with full cleanup. Further signals do not end the cleanup or change the exit code."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    is_ending = False

    def end(_number: int, _frame: object) -> None:
        nonlocal is_ending
        is_ending = True
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        if not is_ending:  # the signals stay ignored, because a SIGTERM would change the exit code 130 to -15
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


@contextmanager
def _progress(seconds: float) -> Iterator[Callable[[str, float, int], object]]:
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    out = Console(stderr=True, markup=False, highlight=False, emoji=False)
    columns = (BarColumn(20), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=out, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("starting", total=seconds)

        def tell(phase: str, done: float, faults: int) -> None:
            bar.update(
                task, completed=done, description=f"{phase}: {done:.0f} of {seconds:.0f} s, {many(faults, 'fault')}"
            )

        yield tell


# --- afterwards ------------------------------------------------------------------------------------------


def _document(one: Outcome, verdict: Verdict) -> dict[str, object]:
    import msgspec

    found = [violation for violations in verdict.violations.values() for violation in violations]
    return {
        "clean": verdict.is_clean,
        **msgspec.to_builtins(one),
        "found": [{"invariant": one.invariant, "job": one.number, "text": one.text} for one in found],
    }


def _show(done: list[tuple[Outcome, Verdict]]) -> None:
    from multiq.soak.report import rows

    cells = rows([one for one, _ in done])
    columns = [Column("", folds=True), *(Column(one.driver, right=True) for one, _ in done)]
    show(table(columns, [[safe(cell) for cell in row] for row in cells]))
    for one, verdict in done:
        click.echo()
        if verdict.is_clean:
            click.secho(f"{one.driver}: all invariants hold", fg="green", bold=True)
        else:
            click.secho(f"{one.driver}: not as promised", fg="red", bold=True)
            click.echo(safe(verdict.report(), keep="\n"))
