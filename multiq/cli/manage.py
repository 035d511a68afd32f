"""``multiq kick``, ``delete``, ``reschedule``, ``pause``, ``resume`` and ``purge``: changing what is queued."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multiq.backend import State
from multiq.formatting import count, duration, many, safe

from .options import Duration, JobCount, JobId, QueueName, common_options, due_options, queue_option
from .output import need_stdin, say

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator

    from multiq.app import App

_SLICE = 1000  # jobs kicked by one call
_PURGEABLE = (State.READY, State.DELAYED, State.BURIED)


@click.command(short_help="Make buried jobs ready again.")
@click.argument("queue", type=QueueName(), required=False)
@click.argument("number", type=JobCount(), required=False, metavar="[N|all]")
@click.option("--id", "job_id", type=JobId(), metavar="ID", help="Kick this one job; it may be delayed, too.")
@click.option("-q", "--queue", "job_queue", type=QueueName(), metavar="QUEUE", help="With --id: the job's queue.")
@common_options
def kick(queue: str | None, number: float | None, job_id: str | None, job_queue: str | None, as_json: bool) -> None:
    """Make buried jobs ready again: N (1 unless given) or all of a queue, the longest buried first, or one by its id.

    A kicked job gets one more attempt.

    \b
      multiq kick mail 10
      multiq kick mail all
      multiq kick --id 019b7c2e-...
    """
    from .apps import find_queue, open_app

    if job_id is not None:
        if number is not None or (queue and job_queue):
            raise click.UsageError("--id kicks one job: give no number, and its queue at most once")
        with open_app() as app:
            place = find_queue(app, job_id, queue or job_queue)
            app.queue(place).kick_job(job_id)
        say(as_json, f"job {job_id} of queue {place} is ready", queue=place, id=job_id, kicked=1)
        return
    if queue is None or job_queue is not None:
        raise click.UsageError("say what to kick: QUEUE [N|all], or --id ID")
    with open_app() as app:
        kicked = _kick(app, queue, number or 1)
        left = app.backend.stats(queue).buried
    text = f"kicked {many(kicked, 'job')} of queue {queue}"
    say(as_json, f"{text}; {count(left)} still buried" if left else text, queue=queue, kicked=kicked, buried=left)


def _kick(app: App, queue: str, number: float) -> int:
    """Kick *number* jobs, but no more than are buried now: jobs that fail at once could be kicked for ever."""
    buried = app.backend.stats(queue).buried
    left = number if buried is None else min(number, buried)
    kicked = 0
    while left > 0:
        more = app.queue(queue).kick(int(min(left, _SLICE)))
        kicked, left = kicked + more, left - more
        if not more:
            break
    return kicked


@click.command(short_help="Delete a job that is not running.")
@click.argument("job_id", type=JobId(), metavar="ID")
@queue_option
@common_options
def delete(job_id: str, queue: str | None, as_json: bool) -> None:
    """Delete one job that is not running: it never starts."""
    from .apps import find_queue, open_app

    with open_app() as app:
        place = find_queue(app, job_id, queue)
        app.queue(place).delete(job_id)
    say(as_json, f"deleted job {job_id} of queue {place}", queue=place, id=job_id, deleted=1)


@click.command(short_help="Change when a job is due.")
@click.argument("job_id", type=JobId(), metavar="ID")
@due_options
@queue_option
@common_options
def reschedule(job_id: str, delay: float | None, at: dt.datetime | None, queue: str | None, as_json: bool) -> None:
    """Make a job that is not running due at another time, earlier or later, as if it were enqueued now.

    \b
      multiq reschedule 019b7c2e-... --delay 10m
      multiq reschedule 019b7c2e-... --at 2027-01-31T09:00+02:00
    """
    from multiq.validation import check_delay

    from .apps import find_queue, open_app

    if delay is None and at is None:
        raise click.UsageError("say when it is due: --delay 10m (0: now), or --at 2027-01-31T09:00Z")
    due_in = check_delay(delay, at)
    with open_app() as app:
        place = find_queue(app, job_id, queue)
        new_id = app.queue(place).reschedule(job_id, due_in).id
    when = f"due in {duration(due_in)}" if due_in else "due now"
    renamed = "" if new_id == job_id else f"; its id is {safe(new_id)} from now on"
    say(as_json, f"job {job_id} of queue {place} is {when}{renamed}", queue=place, id=new_id, due_in=due_in)


@click.command(short_help="Stop workers from taking a queue's jobs for a while.")
@click.argument("queue", type=QueueName())
@click.argument("length", type=Duration(), metavar="TIME")
@common_options
def pause(queue: str, length: float, as_json: bool) -> None:
    """Stop workers from taking a queue's jobs for TIME (90, 10m, 2h); then the queue resumes by itself.

    Jobs that run go on, and delays run on.
    """
    from .apps import open_app

    with open_app(create=True) as app:
        app.queue(queue).pause(length)
    say(as_json, f"queue {queue} is paused for {duration(length)}", queue=queue, paused_for=length)


@click.command(short_help="End a pause.")
@click.argument("queue", type=QueueName())
@common_options
def resume(queue: str, as_json: bool) -> None:
    """End a queue's pause now."""
    from .apps import open_app

    with open_app() as app:
        app.queue(queue).resume()
    say(as_json, f"queue {queue} is not paused", queue=queue, paused_for=None)


@click.command(short_help="Delete all jobs of a queue, or some states of it.")
@click.argument("queue", type=QueueName())
@click.argument("states", nargs=-1, metavar="[STATES]")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@common_options
def purge(queue: str, states: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete all jobs of a queue that are ready, delayed or buried, or in the STATES named.

    Jobs that run are never touched. Asks first, with the numbers.

    \b
      multiq purge mail buried
      multiq purge mail ready,delayed --yes
    """
    from .apps import open_app

    chosen = list(_chosen_states(states))
    with open_app() as app:
        if not app.backend.capabilities.purging:
            raise app.backend.unsupported("purging")  # before the question
        if not yes:
            _ask(app, queue, chosen)
        purged = app.queue(queue).purge(chosen)
    text = f"deleted {many(purged, 'job')} of queue {queue} ({', '.join(chosen)})"
    say(as_json, text, queue=queue, states=chosen, purged=purged)


def _chosen_states(words: tuple[str, ...]) -> Iterator[State]:
    """States, separated by commas or spaces."""
    names = [name.strip() for word in words for name in word.split(",")]
    for name in dict.fromkeys(names or _PURGEABLE):
        if name not in _PURGEABLE:
            known = ", ".join(_PURGEABLE)
            why = "jobs that run cannot be purged" if name == State.RESERVED else f"a job has no state {name!r}"
            raise click.BadParameter(f"{why}: choose from {known}", param_hint="STATES")
        yield State(name)


def _ask(app: App, queue: str, states: list[State]) -> None:
    from multiq.settings.url import redact

    stats = app.backend.stats(queue)
    numbers = ", ".join(f"{count(getattr(stats, state))} {state}" for state in states)
    need_stdin("there is no terminal to ask; --yes deletes without a question")
    click.confirm(f"Delete the jobs of queue {queue} on {safe(redact(app.url))}: {numbers}?", abort=True, err=True)
