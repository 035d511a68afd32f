"""``multiq enqueue``: adds a job for a task, or a job with a given body and no task."""

from __future__ import annotations

import contextlib
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from multiq.errors import EnqueueUncertain
from multiq.formatting import duration

from .argument_types import Json, QueueName
from .options import common_options, due_options
from .output import need_stdin, print_json, show_enqueued

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator

    from multiq.app import App
    from multiq.job import JobHandle


@click.command(short_help="Add a job, and print its id.")
@click.argument("app_path", metavar="[APP", required=False)
@click.argument("task_name", metavar="TASK]", required=False)
@click.option(
    "--args", type=Json(list, """'["ann@example.com", 3]'"""), metavar="JSON", help="The task's positional arguments."
)
@click.option(
    "--kwargs", type=Json(dict, """'{"name": "Ann"}'"""), metavar="JSON", help="The task's keyword arguments."
)
@click.option("--body", metavar="JSON|-", help="For a job without a task: its JSON; - reads it from stdin.")
@click.option("--bytes", "raw", metavar="TEXT|-", help="For a job without a task: its bytes; - reads them from stdin.")
@click.option("-q", "--queue", type=QueueName(), metavar="QUEUE", help="Default: the task's queue, or 'default'.")
@due_options
@click.option("--priority", type=int, metavar="N", help="0 goes first, 4294967295 last.")
@click.option("--id", metavar="ID", help="Use this id; adds nothing if the queue has a job with this id.")
@click.option("--ttr", type=float, metavar="SECONDS", help="How long a reservation lasts unless the worker renews it.")
@common_options
def enqueue(
    *,
    app_path: str | None,
    task_name: str | None,
    args: list[Any] | None,
    kwargs: dict[str, Any] | None,
    body: str | None,
    raw: str | None,
    queue: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Add a job, and print its id.

    \b
      multiq enqueue shop.tasks:app mail.reset --args '["ann@example.com"]'
      multiq enqueue -q raw --body '{"any": "json"}' --delay 5m
      pg_dump shop | multiq enqueue -q dumps --bytes -

    Without APP, the task is looked for in the app or in the modules that the settings name. A task's arguments are
    checked against its function before anything is sent.
    """
    from .apps import find_default_app

    bodies = [text for text in (body, raw) if text is not None]
    given = {name: value for name, value in options.items() if value is not None}
    if app_path is not None and ":" not in app_path and task_name is None:
        default = find_default_app()
        app_path, task_name = (app_path, None) if default is None else (default, app_path)
    if app_path is not None and task_name is not None:
        if bodies:
            raise click.UsageError("a task's job has --args and --kwargs; --body and --bytes are for jobs without one")
        if queue is not None:
            given["queue"] = queue
        with _saying_how_to_repeat():
            app, handle = _task_job(app_path, task_name, args or [], kwargs or {}, given)
    else:
        if app_path is not None or len(bodies) != 1 or args is not None or kwargs is not None:
            raise click.UsageError(
                "say what to enqueue: APP TASK (like shop.tasks:app mail.reset --args '[1]'), "
                "or one of --body and --bytes"
            )
        with _saying_how_to_repeat():
            app, handle = _plain_job(queue or "default", body, raw, given)
    with app:
        due_in = _due_in(options["delay"], options["at"]) if handle.was_new else None
        if as_json:
            new = handle.was_new
            print_json({"queue": handle.queue, "id": handle.id, "task": task_name, "due_in": due_in, "new": new})
            return
        show_enqueued(handle, f"in {duration(due_in)}" if due_in else "now")


@contextlib.contextmanager
def _saying_how_to_repeat() -> Iterator[None]:
    """Add a note to an ``EnqueueUncertain`` error, with the command that safely repeats the enqueue."""
    try:
        yield
    except EnqueueUncertain as error:
        if error.ids:
            (job_id,) = error.ids
            error.add_note(f"the same command with --id {shlex.quote(job_id)} adds nothing if the job is there")
        else:
            error.add_note("run the command again only if running the job twice does no harm")
        raise


def _task_job(
    path: str, name: str, args: list[Any], kwargs: dict[str, Any], options: dict[str, Any]
) -> tuple[App, JobHandle]:
    from .apps import load_app

    app = load_app(path)
    task = app.find_task(name)
    return app, task.options(**options).enqueue(*args, **kwargs)


def _plain_job(queue: str, body: str | None, raw: str | None, options: dict[str, Any]) -> tuple[App, JobHandle]:
    from .apps import open_app

    content = _bytes_of(raw) if raw is not None else _json_of(body or "")
    app = open_app(create=True)
    if raw is None:
        _check_size(content, app.settings.max_body)
    return app, app.queue(queue).enqueue(content, **options)


def _bytes_of(text: str) -> bytes:
    if text == "-":
        need_stdin("give the body itself, or pipe it in")
    # surrogateescape: bytes of the command line that are not UTF-8 are passed on unchanged
    return sys.stdin.buffer.read() if text == "-" else text.encode("utf-8", "surrogateescape")


def _json_of(text: str) -> bytes:
    """Check that the text is JSON, and return the text unchanged. The spelling of numbers does not change."""
    content = _bytes_of(text).strip()
    try:
        readable = content.decode()
    except UnicodeDecodeError as exc:
        raise click.BadParameter("the body is not UTF-8, so it is not JSON: use --bytes", param_hint="--body") from exc
    Json().convert(readable, None, None)
    return content


def _check_size(body: bytes, limit: int) -> None:
    from multiq.errors import PayloadTooLarge

    if len(body) > limit:
        raise PayloadTooLarge(
            len(body), limit, "store the data elsewhere and enqueue its key, or raise max_body in the settings"
        )


def _due_in(delay: float | None, at: dt.datetime | None) -> float:
    from multiq.validation import check_delay

    return check_delay(delay, at)
