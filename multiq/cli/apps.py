"""Makes the app that a command works with: the app of ``shop.tasks:app``, or an app without tasks on the chosen
connection.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import click

from multiq.app import App
from multiq.errors import JobNotFound, MultiqError, OptionInvalid
from multiq.settings.loader import find_file, load_settings

from .options import chosen_connection

if TYPE_CHECKING:
    from types import ModuleType


class AppNotFound(MultiqError, ValueError):
    """There is no app at ``module:attribute``."""


class JobNowhere(JobNotFound):
    """No queue has the job. The error's ``queue`` is empty."""

    sentence = "no queue has job {job_id}: it is done, was deleted, or was never there"


def open_app(*, create: bool = False) -> App:
    """An app without tasks on the chosen connection.

    *create*: whether to create a missing store. Only commands that add jobs create one. The other commands report a
    missing store as an error, because they were probably called in the wrong folder.

    Raises ``SettingsInvalid``, ``UrlInvalid``, ``BackendNotInstalled``.
    """
    app = App(chosen_connection(), create=create)
    _ = app.backend  # reports a wrong URL before any other error
    return app


def load_app(path: str) -> App:
    """Import the app that *path* (``module:attribute``) names. Python searches the current folder for the module first.

    With ``-c``, the app works on the given connection instead of its own.

    Raises ``AppNotFound``. An error of multiq that the import raises is passed on.
    """
    name, colon, attribute = path.partition(":")
    if not colon or not name or not attribute:
        like = f"{name or 'shop.tasks'}:{attribute or 'app'}"
        raise AppNotFound(f"{path!r} names no app: write module:attribute, like {like}")
    app = _attribute(_module(name), attribute, path)
    connection = chosen_connection()
    if connection is not None:
        _move(app, app.settings.resolve(connection), path)
    return app


def default_app() -> str:
    """The app that the settings name. The app's module may also be in the folder of the settings file.

    Raises ``SettingsInvalid``.
    """
    path = load_settings().app
    if path is None:
        raise click.UsageError("Missing argument 'APP': give it like shop.tasks:app, or set app in multiq.toml.")
    source = find_file(None, os.environ)
    if source is not None:
        sys.path.append(str(source.absolute().parent))
    return path


def find_queue(app: App, job_id: str, queue: str | None) -> str:
    """Find the queue that holds a job. Returns *queue* if it is given, and searches all queues otherwise.

    Raises ``JobNotFound``, or ``OptionInvalid`` if several queues have a job with this id.
    """
    from multiq.control.flags import visible_queues

    if queue is not None:
        return queue
    found = [name for name in visible_queues(app.backend) if _has(app, name, job_id)]
    if not found:
        raise JobNowhere("", job_id)
    if len(found) > 1:
        raise OptionInvalid(f"queues {', '.join(found)} each have a job {job_id}: say which one with -q QUEUE")
    return found[0]


def _move(app: App, url: str, path: str) -> None:
    """Make *app* use another connection. The app must not have used its own connection before."""
    if app._backend is not None and app.url != url:  # noqa: SLF001 - the only use of this attribute outside of App
        raise OptionInvalid(
            f"-c comes too late: {path} was given a backend=, or used its connection while it was imported. "
            "Move the calls that use the connection out of the module's top level"
        )
    app.url = url


def _has(app: App, queue: str, job_id: str) -> bool:
    try:
        app.backend.peek(queue, job_id)
    except JobNotFound:
        return False
    return True


def _module(name: str) -> ModuleType:
    folder = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except MultiqError:
        raise
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(f"{exc.name}.")):
            raise AppNotFound(f"there is no module {exc.name!r} in {folder} or among what is installed") from exc
        raise AppNotFound(f"module {name!r} cannot be imported: {exc}") from exc
    except (Exception, SystemExit) as exc:
        raise AppNotFound(f"module {name!r} cannot be imported: {_describe(exc)}") from exc


def _attribute(module: ModuleType, attribute: str, path: str) -> App:
    value: object = module
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as exc:
            raise AppNotFound(f"{path!r}: module {module.__name__!r} has no {attribute!r}{_apps_of(module)}") from exc
    if not isinstance(value, App):
        raise AppNotFound(f"{path!r} is of type {type(value).__name__}, not a multiq.App{_apps_of(module)}")
    return value


def _apps_of(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, App)]
    return f"; the apps in it: {', '.join(names)}" if names else "; there is no app in it"


def _describe(error: BaseException) -> str:
    kind = "it called sys.exit" if isinstance(error, SystemExit) else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{kind}: {error.msg} ({error.filename}, line {error.lineno})"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})" if trace is not None else ""
    return f"{kind}: {error}{place}"
