"""``multiq failed`` lists, shows, retries and deletes failed jobs, which are the buried jobs of all queues."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from multiq.errors import Unsupported
from multiq.formatting import UNKNOWN, duration, many, shorten, summary
from multiq.terminal_escapes import safe

from .argument_types import JobId, QueueName
from .durations import Duration
from .jobs import job_document
from .options import common_options, connection_option, followers_option, queue_option, traceback_option, verbose_option
from .output import Column, need_stdin, note, print_json, say, show, table, width
from .peek import show_job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table
    from rich.text import Text

    from multiq.app import App
    from multiq.failed import FailedChange
    from multiq.flows.followers import Followers
    from multiq.job import JobInfo

    from .options import F

_NARROW = 130  # columns: a narrower terminal has no room for a job's id, queue, reason and body in one line


def _filter_options(function: F) -> F:
    """The options that choose failed jobs. The options have the names of the parameters of ``FailedJobs.list``."""
    for option in (
        click.option(
            "--older", "older_than", type=Duration(), metavar="TIME", help="Only jobs that failed longer ago than this."
        ),
        click.option("--reason", metavar="TEXT", help="Only jobs whose reason has this text."),
        click.option("--task", metavar="NAME", help="Only jobs of this task."),
        click.option(
            "-q",
            "--queue",
            type=QueueName(),
            multiple=True,
            callback=lambda _ctx, _param, queues: queues or None,
            metavar="QUEUE",
            help="Only this queue; repeatable.",
        ),
    ):
        function = option(function)
    return function


def _bulk_options(function: F) -> F:
    for option in (
        click.option("-y", "--yes", is_flag=True, help="Do not ask."),
        click.option("--dry-run", is_flag=True, help="Only count the jobs."),
        click.option("-n", "--limit", type=click.IntRange(min=1), metavar="N", help="The largest number of jobs."),
    ):
        function = option(function)
    return _filter_options(function)


@click.group(short_help="List, retry and delete failed jobs.")
@connection_option
@verbose_option
@traceback_option
def failed() -> None:
    """List, show, retry and delete failed jobs: the buried jobs of all queues.

    \b
      multiq failed list --task mail.reset --older 2h
      multiq failed show 019b7c2e-...
      multiq failed retry --reason "Connection refused"
      multiq failed prune --older 30d --yes
    """


@failed.command("list", short_help="List failed jobs.")
@_filter_options
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many jobs.")
@common_options
def list_failed(limit: int, as_json: bool, **filters: Any) -> None:
    """List failed jobs, queue by queue. In each queue, the job that was buried first comes first."""
    from .apps import open_app

    unlisted: str | None = None
    found: list[JobInfo] = []
    with open_app() as app:
        listing = app.failed.list(**filters, limit=limit + 1)
        try:
            for job in listing:
                found.append(job)  # noqa: PERF402 - the jobs that were read before an error are kept
        except Unsupported as exc:
            if exc.capability != "lists_jobs":
                raise
            unlisted = str(exc)
    has_more, found = len(found) > limit, found[:limit]
    if as_json:
        document = {"jobs": [job_document(job) for job in found], "more": has_more, "undated": listing.undated}
        print_json(document | ({"unlisted": unlisted} if unlisted else {}))
        return
    if found:
        room = width()
        show(_table(found) if room is None or room >= _NARROW else _lines(found, room))
    elif not unlisted:
        click.echo("there are no such failed jobs")
    if has_more:
        note("there are more: --limit shows them, multiq stats counts them")
    if unlisted:
        note(f"there are more failed jobs, which cannot be listed: {unlisted}")
    _note_undated(listing.undated)


@failed.command("show", short_help="Show one failed job, with its traceback.")
@click.argument("job_id", type=JobId(), metavar="ID")
@queue_option
@common_options
def show_failed(job_id: str, queue: str | None, as_json: bool) -> None:
    """Show one failed job: why, when and where it failed, its traceback and its body."""
    from .apps import open_app

    with open_app() as app:
        job = app.failed.show(job_id, queue)
    if as_json:
        print_json(job_document(job))
    else:
        show_job(job)


@failed.command("retry", short_help="Make failed jobs ready again.")
@click.argument("ids", nargs=-1, type=JobId(), metavar="[ID...]")
@_bulk_options
@common_options
def retry_failed(ids: tuple[str, ...], **options: Any) -> None:
    """Make failed jobs ready again, each with one more attempt. Choose the jobs by IDs, or by filters.

    Without IDs, the command first shows the number of jobs, and asks. A job that changes after the question is left
    unchanged.
    """
    _change(_RETRY, ids, choice={}, **options)


@failed.command("forget", short_help="Delete failed jobs.")
@click.argument("ids", nargs=-1, type=JobId(), metavar="[ID...]")
@followers_option
@_bulk_options
@common_options
def forget_failed(ids: tuple[str, ...], followers: Followers | None, **options: Any) -> None:
    """Delete failed jobs. Choose the jobs by IDs, or by filters.

    Without IDs, the command first shows the number of jobs, and asks. A job that changes after the question is left
    unchanged. Without --followers, a job for which other jobs of a flow wait is not deleted.
    """
    _change(_FORGET, ids, choice={"followers": followers or "refuse"}, **options)


@failed.command("prune", short_help="Delete jobs that failed long ago.")
@followers_option
@_bulk_options
@common_options
def prune_failed(followers: Followers | None, **options: Any) -> None:
    """Delete the jobs that failed longer ago than --older. Without a command, multiq never deletes failed jobs.

    The command first shows the number of jobs, and asks. A job whose time of failure is not stored is not deleted.
    Without --followers, a job for which other jobs of a flow wait is not deleted.
    """
    if options["older_than"] is None:
        raise click.UsageError("give the age of the jobs to delete: --older 30d")
    _change(_FORGET, (), choice={"followers": followers or "refuse"}, **options)


class _Verb(NamedTuple):
    """A change of failed jobs, and the words that describe the change."""

    name: str
    """The name of the method of ``FailedJobs`` that makes the change."""
    question: str
    participle: str


_RETRY = _Verb("retry", "Retry", "retried")
_FORGET = _Verb("forget", "Delete", "deleted")


def _change(
    verb: _Verb,
    ids: Sequence[str],
    *,
    choice: dict[str, Any],
    yes: bool,
    dry_run: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Retry or delete failed jobs, and print their number.

    *choice*: the arguments of the verb's method that are not filters. *filters*: the arguments of ``FailedJobs.list``.
    """
    from .apps import open_app

    with open_app() as app:
        if not app.backend.capabilities.management:
            raise app.backend.unsupported("management")  # raised before the user is asked to confirm
        found = _find_by_id(app, verb, ids, choice, filters) if ids else _find(app, verb, choice, filters)
        change = _carry_out(app, verb, found, is_asked=not yes and not ids, dry_run=dry_run)
    text = f"{verb.participle} {many(change.changed, 'failed job')}"
    if dry_run:
        text = f"{many(change.matched, 'failed job')} would be {verb.participle}"
    elif not change.matched:
        text = "there are no such failed jobs"
    if change.left:
        text += f"; left {many(change.left, 'job')} that changed meanwhile"
    if change.taken:
        text += f"; left {many(change.taken, 'job')} whose unique key another job has taken"
    if change.awaited:
        text += f"; left {many(change.awaited, 'job')} for which other jobs wait (--followers says what they do)"
    fields = {name: getattr(change, name) for name in change.__struct_fields__}
    say(as_json, text, **fields, dry_run=dry_run)
    if not as_json:
        _note_undated(change.undated)


def _carry_out(app: App, verb: _Verb, found: _Found, *, is_asked: bool, dry_run: bool) -> FailedChange:
    """Count the jobs, ask the user if *is_asked*, and change the jobs. *dry_run*: only count the jobs."""
    if not is_asked and not dry_run:
        return found.act()  # without a count, which a backend without ``lists_jobs`` may refuse
    dry = found.dry()
    if dry_run or not dry.matched:
        return dry
    _ask(app, verb, found, dry)
    return found.act()


class _Found(NamedTuple):
    """Failed jobs to change."""

    dry: Callable[[], FailedChange]
    """Counts the jobs, and changes no job."""
    queues: dict[str, int]
    """The number of jobs by queue, for the question. The dict is empty if the numbers are not known, or if the user is
    not asked."""
    act: Callable[[], FailedChange]
    """Changes these jobs."""


def _find_by_id(app: App, verb: _Verb, ids: Sequence[str], choice: dict[str, Any], filters: dict[str, Any]) -> _Found:
    """Find jobs by their ids. Raises ``JobNotFound`` or ``JobNotFailed`` before any job is changed."""
    from multiq.failed import FailedChange, ShownJob

    queues = filters.pop("queue") or [None]
    if len(queues) > 1 or any(value is not None for value in filters.values()):
        raise click.UsageError("an ID names one job: with IDs, give no filter except one --queue")
    jobs = [ShownJob.of(app.failed.show(job_id, queues[0])) for job_id in dict.fromkeys(ids)]
    act = getattr(app.failed, f"{verb.name}_ids")
    dry = FailedChange(matched=len(jobs), changed=0, left=0)
    return _Found(lambda: dry, {}, lambda: act(jobs, **choice))


def _find(app: App, verb: _Verb, choice: dict[str, Any], filters: dict[str, Any]) -> _Found:
    """Find jobs by filters. Only the jobs that were found are changed later, even if more jobs fail while the user
    reads the question.

    If the backend has no ``lists_jobs``, the jobs are read again for the change.
    """
    import msgspec

    from multiq.failed import FailedChange, ShownJob

    if not app.backend.declared.lists_jobs:  # the backend shows only the first job of each queue
        change = getattr(app.failed, verb.name)
        return _Found(lambda: change(**filters, dry_run=True), {}, lambda: change(**filters, **choice))
    listing = app.failed.list(**filters)
    jobs = [ShownJob.of(job) for job in listing]
    dry = FailedChange(matched=len(jobs), changed=0, left=0, undated=listing.undated)
    act = getattr(app.failed, f"{verb.name}_ids")
    return _Found(
        lambda: dry,
        Counter(job.queue for job in jobs),
        lambda: msgspec.structs.replace(act(jobs, **choice), undated=dry.undated),
    )


def _ask(app: App, verb: _Verb, found: _Found, dry: FailedChange) -> None:
    from multiq.settings.url import redact

    need_stdin("there is no terminal to ask; --yes goes on without a question")
    numbers = ", ".join(f"{queue} {number:,}" for queue, number in found.queues.items())
    which = f" ({numbers})" if numbers else ""
    click.confirm(
        f"{verb.question} {many(dry.matched, 'failed job')}{which} on {safe(redact(app.url))}?",
        abort=True,
        err=True,
    )


def _note_undated(number: int) -> None:
    if number:
        note(f"it is unknown when {many(number, 'further job')} failed, so --older leaves them out")


def _table(found: Sequence[JobInfo]) -> Table:
    columns = [
        Column("ID"),
        Column("QUEUE"),
        Column("TRY", right=True),
        Column("FAILED", right=True),
        Column("REASON", gives_way=True),
        Column("JOB", gives_way=True),
    ]
    rows = [[*_head(job), safe(job.reason or "-"), summary(job)] for job in found]
    return table(columns, rows)


def _lines(found: Sequence[JobInfo], room: int) -> Text:
    """Format the jobs for a narrow terminal, with the reason and the body on separate lines."""
    from rich.text import Text

    lines = Text()
    for job in found:
        lines.append(shorten("  ".join(_head(job)), room) + "\n", style="bold")
        lines.append(f"  {shorten(safe(job.reason or '-'), room - 2)}\n")
        lines.append(f"  {summary(job, room - 2)}\n", style="dim")
    lines.rstrip()
    return lines


def _head(job: JobInfo) -> list[str]:
    attempt = UNKNOWN if job.attempt is None else str(job.attempt)
    return [safe(job.id), safe(job.queue), attempt, failed_ago(job)]


def failed_ago(job: JobInfo) -> str:
    """Return the time since a job failed: the current time of this host's clock, minus the time of the worker's clock
    at the failure."""
    failure = job.failure
    return UNKNOWN if failure is None else f"{duration(max(0.0, time.time() - failure.at))} ago"
