"""multiq in applications of Flask: an extension with tasks, a command line, the status of jobs. ``docs/flask.md``."""

from __future__ import annotations

import contextvars
import difflib
import logging
import os
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from multiq.app import App
from multiq.errors import ArgumentsInvalid, ExtraNotInstalled, MultiqError, OptionInvalid, SettingsInvalid
from multiq.formatting import shown
from multiq.registry import Tasks
from multiq.settings.loader import load_settings
from multiq.settings.model import KEYS

from .job_view import HEADERS, NOT_FOUND, PASSING, check_queues, find_handle, may_repeat, text_of, view_job

try:
    from flask import Blueprint, Flask, current_app, has_app_context, jsonify
    from flask.cli import ScriptInfo
    from werkzeug.exceptions import ServiceUnavailable
except ImportError as exc:
    raise ExtraNotInstalled("multiq.contrib.flask needs Flask: pip install 'multiq[flask]'") from exc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from flask.typing import ResponseReturnValue

    from multiq.job import JobContext, JobHandle
    from multiq.settings.model import Settings
    from multiq.task import Task

    May: TypeAlias = Callable[[JobHandle], bool]

__all__ = ["Multiq"]

_KEY = "multiq"  # of app.extensions

_log = logging.getLogger("multiq.web")


class Multiq(Tasks):
    """The extension: ``queue = Multiq()``, ``@queue.task``, and ``queue.init_app(web)`` in the application's factory.

    ``Multiq(web)`` also calls ``init_app(web)``. *prefix*: as for ``multiq.Tasks``.

    A task enqueues on the multiq app of the current Flask application. Without an application context, a task can
    enqueue only if exactly one application was made.
    """

    def __init__(self, web: Flask | None = None, *, prefix: str = "") -> None:
        super().__init__(prefix)
        if web is not None:
            self.init_app(web)

    def init_app(self, web: Flask) -> None:
        """Give an application its multiq app: ``web.extensions["multiq"]``.

        The keys ``MULTIQ_...`` of its configuration are the settings, with the names of the environment variables. Keys
        that are not in the configuration come from the environment and from ``multiq.toml``.

        Each job runs in its own application context. If the store does not answer during a request, the request is
        answered with 503. The command ``flask multiq`` is added.

        Raises ``SettingsInvalid``, ``TaskExists``. Raises ``OptionInvalid`` if ``init_app`` was already called for this
        application.
        """
        if not isinstance(web, Flask):
            raise ArgumentsInvalid(f"init_app must have a Flask application, got {shown(web)}")
        if _KEY in web.extensions:
            raise OptionInvalid(f"application {web.name!r} must have at most one extension of multiq, got a second one")
        app = App(settings=_settings(web))

        @app.middleware
        def in_context(_job: JobContext) -> Iterator[None]:
            with web.app_context():
                yield

        app.include(self)
        web.extensions[_KEY] = app
        for kind in PASSING:
            web.register_error_handler(kind, _answer_503)
        web.cli.add_command(_command)

    @property
    def app(self) -> App:
        """The multiq app of the current application, or of the only application. Raises ``MultiqError``."""
        found = self._current()
        if found is not None:
            return found
        if len(self.apps) == 1:
            return self.apps[0]
        if not self.apps:
            raise MultiqError("this extension has no application: call init_app(web) first")
        raise MultiqError(f"this extension has {len(self.apps)} applications: use it within `with web.app_context():`")

    def app_of(self, task: Task[..., Any]) -> App:
        """Return the app on which a task is enqueued: the app of the current application, or the only app."""
        return self._current() or super().app_of(task)

    def _current(self) -> App | None:
        found = current_app.extensions.get(_KEY) if has_app_context() else None
        return found if found in self.apps else None

    def status_blueprint(
        self,
        *,
        may: May | None,
        queues: Sequence[str] | None = None,
        reasons: bool = False,
        name: str = "multiq",
    ) -> Blueprint:
        """Return a blueprint that answers ``GET /<ref>`` with the status, the progress and the result of a job.

        - *may*: a function that is called in the request with the job's handle, and returns whether the request may see
          the job. If it returns False, the answer is the same as for a job that does not exist. None: every client that
          knows the reference may see the job.
        - *queues*: the queues whose jobs are shown. Default: all.
        - *reasons*: whether the answer says why a job has failed or was cancelled. Default: False.
        - *name*: the name of the blueprint.

        ``ref`` is a ``handle.ref``. Answers 404 if there is neither the job nor its outcome.
        """
        if may is not None and not callable(may):
            raise ArgumentsInvalid(f"may must be a function of the job's handle, or None, got {shown(may)}")
        if not isinstance(name, str) or not name or "." in name:
            raise ArgumentsInvalid(f"name must be a text without dots, got {shown(name)}")
        shown_queues = check_queues(queues)
        blueprint = Blueprint(name, __name__)

        @blueprint.get("/<ref>")
        def job(ref: str) -> ResponseReturnValue:
            app = self.app
            handle = find_handle(app, ref, shown_queues)
            if handle is None or not (may is None or may(handle)):
                return jsonify(detail=NOT_FOUND), 404, HEADERS
            try:
                view = view_job(app, handle, reasons=reasons)
            except PASSING as exc:
                _log.warning("the status of a job cannot be read: %s", exc)
                return jsonify(detail=text_of(exc)), 503, {**HEADERS, "Retry-After": "5"}
            if view is None:
                return jsonify(detail=NOT_FOUND), 404, HEADERS
            return jsonify(view), 200, HEADERS

        return blueprint


def _answer_503(error: Exception) -> ResponseReturnValue:
    """If the store did not answer or was full during a request, answer the request with the application's page for
    503."""
    _log.warning("a request is answered with 503: %s", error)
    answer = ServiceUnavailable(text_of(error), retry_after=5 if may_repeat(error) else None)
    return current_app.handle_http_exception(answer)  # type: ignore[no-any-return, attr-defined, unused-ignore]


def _settings(web: Flask) -> Settings:
    names = [*(f"MULTIQ_{key.upper().replace('.', '_')}" for key in KEYS), "MULTIQ_CONFIG"]
    ours = {name: value for name, value in web.config.items() if str(name).startswith("MULTIQ_")}
    given = {name: _text(value) for name, value in ours.items() if value is not None}
    unknown = [name for name in ours if name not in names]
    if unknown:
        close = {name: difflib.get_close_matches(name, names, n=1) for name in unknown}
        raise SettingsInvalid(
            [
                f"app.config: {name}: unknown key" + (f" (did you mean {like[0]}?)" if like else "")
                for name, like in close.items()
            ]
        )
    try:
        return load_settings(environment={**os.environ, **given})
    except SettingsInvalid as exc:
        problems = [problem.replace("environment: ", "app.config, or the environment: ", 1) for problem in exc.problems]
        raise SettingsInvalid(problems) from None


def _text(value: object) -> str:
    """Return a value of the configuration as the text that an environment variable would have."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ",".join(f"{name}={weight}" for name, weight in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


@click.command(
    "multiq",
    short_help="Run jobs, and look at queues: flask multiq worker.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def _command(arguments: tuple[str, ...]) -> None:
    """Call the command line of multiq, with the multiq app of this application."""
    from multiq.cli import cli
    from multiq.cli.framework_app import give_app

    web = click.get_current_context().ensure_object(ScriptInfo).load_app()
    with give_app(web.extensions[_KEY], f"{web.import_name}:(Flask)"):
        # a separate context, because flask has pushed an application context in which all jobs would run
        contextvars.Context().run(cli.main, list(arguments), "flask multiq")
