"""Makes the app for a command. The app is imported, like ``shop.tasks:app``, or is an app without tasks on the chosen
connection."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from multiq.app import App
from multiq.errors import MultiqError, OptionInvalid
from multiq.settings.loader import find_file, load_settings

from .connection import chosen_connection
from .framework_app import current_settings, given_app, given_apps

if TYPE_CHECKING:
    from types import ModuleType


class AppNotFound(MultiqError, ValueError):
    """No app was found at ``module:attribute``."""


def open_app(*, create: bool = False) -> App:
    """Return an app without tasks on the chosen connection.

    *create*: whether to create a missing file or missing tables. Commands that write to the store set *create*. A
    command that only reads reports an error instead, because it was probably called in the wrong folder.

    Raises ``SettingsInvalid``, ``UrlInvalid``, ``BackendNotInstalled``.
    """
    settings = current_settings()
    if settings.include:  # some commands need the tasks, and import the modules of include
        _search_here()
    app = App(chosen_connection(), settings=settings, create=create)
    _ = app.backend  # reports a wrong URL before any other error
    return app


WITHOUT_APP = "the tasks of the setting include"
"""Replaces an app's path, and means an app on the chosen connection with the tasks of the setting ``include``."""


def load_app(path: str) -> App:
    """Import the app that *path* (``module:attribute``) names. Python searches for the module in the current folder
    first, and in the folder of the settings file last.

    With ``-c``, the app uses the given connection instead of its own connection.

    Raises ``AppNotFound``. Errors of multiq that the import raises are not caught.
    """
    _search_here()
    if path == WITHOUT_APP:
        return App(chosen_connection())
    return _on_chosen_connection(given_apps.get(path) or _find(path), path)


def find_default_app() -> str | None:
    """Return the path of the app that ``give_app`` was called with. Without ``give_app``, return the path of the app
    that the settings name. If the settings name only modules with tasks, return ``WITHOUT_APP``. If the settings name
    no tasks, return None.

    Raises ``SettingsInvalid``.
    """
    given = given_app()
    if given is not None:
        return given
    settings = load_settings()
    return settings.app or (WITHOUT_APP if settings.include else None)


def default_app() -> str:
    """Like ``find_default_app``, but raises ``click.UsageError`` instead of returning None."""
    path = find_default_app()
    if path is None:
        raise click.UsageError(
            "Missing argument 'APP': give it like shop.tasks:app, or set app or include in multiq.toml."
        )
    return path


def _find(path: str) -> App:
    name, colon, attribute = path.partition(":")
    if not colon or not name or not attribute:
        like = f"{name or 'shop.tasks'}:{attribute or 'app'}"
        raise AppNotFound(f"{path!r} names no app: write module:attribute, like {like}")
    return _attribute(_module(name), attribute, path)


def _on_chosen_connection(app: App, path: str) -> App:
    connection = chosen_connection()
    if connection is not None:
        _move(app, app.settings.resolve(connection), path)
    return app


def _move(app: App, url: str, path: str) -> None:
    """Make *app* use another connection. The app must not have used its own connection before."""
    if app._backend is not None and app.url != url:  # noqa: SLF001 - the only use of this attribute outside of App
        raise OptionInvalid(
            f"-c comes too late: {path} was given a backend=, or used its connection while it was imported. "
            "Move the calls that use the connection out of the module's top level"
        )
    app.url = url


def _search_here() -> None:
    """Let Python search the current folder first, and the folder of the settings file last."""
    folder = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if folder not in sys.path:
        sys.path.insert(0, folder)
    source = find_file(None, os.environ)
    if source is not None and (of_settings := str(source.absolute().parent)) not in sys.path:
        sys.path.append(of_settings)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except MultiqError:
        raise
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(f"{exc.name}.")):
            raise AppNotFound(f"there is no module {exc.name!r} in {Path.cwd()} or among what is installed") from exc
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
