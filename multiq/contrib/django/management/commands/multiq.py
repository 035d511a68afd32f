"""``manage.py multiq``: the commands of multiq, with the project's apps and settings."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import msgspec
from django.conf import ENVIRONMENT_VARIABLE
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from multiq.cli import cli
from multiq.cli.framework_app import give_app
from multiq.contrib.django.apps_of_backends import app_of, our_aliases
from multiq.contrib.django.framework import PACKAGE

if TYPE_CHECKING:
    from multiq.contrib.django.apps_of_backends import DjangoApp


class Command(BaseCommand):
    """Passes its arguments on to multiq's command line."""

    help = "Runs multiq's commands with this project's TASKS: manage.py multiq worker. See manage.py multiq --help."
    requires_system_checks: ClassVar[list[str]] = []  # with checks, a worker would start more slowly
    suppressed_base_arguments: ClassVar[set[str]] = {
        "--version", "--verbosity", "--settings", "--pythonpath", "--traceback", "--no-color", "--force-color",
        "--skip-checks",
    }  # fmt: skip

    def run_from_argv(self, argv: list[str]) -> NoReturn:
        """Run a command, and exit with its code."""
        program = os.path.basename(argv[0]) or "manage.py"  # noqa: PTH119 - argv[0] may be no path
        try:
            app, name, arguments = _app_and_others(_without_djangos(argv[2:]))
        except (CommandError, ImproperlyConfigured) as exc:
            self.stderr.write(f"error: {exc}")
            sys.exit(2)
        _run(app, name, arguments, f"{program} {argv[1]}")

    def add_arguments(self, parser: Any) -> None:
        """For ``call_command("multiq", "stats")``."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *arguments: str, **options: Any) -> None:
        """Run a command. Raises ``CommandError`` unless its code is 0."""
        try:
            _run(*_app_and_others([*options["arguments"], *arguments]), "manage.py multiq")
        except SystemExit as exc:
            if exc.code:
                raise CommandError(f"multiq ended with code {exc.code}", returncode=int(exc.code)) from exc


def _app_and_others(arguments: list[str]) -> tuple[DjangoApp, str, list[str]]:
    """Return the app of ``--backend``, its name for messages, and the other arguments.

    Raises ``CommandError``, ``ImproperlyConfigured``.
    """
    alias, others = _alias_of(arguments)
    module = os.environ.get(ENVIRONMENT_VARIABLE) or "multiq.contrib.django"
    return app_of(alias), f"{module}:TASKS[{alias!r}]", others


def _run(app: DjangoApp, name: str, arguments: list[str], program: str) -> NoReturn:
    known = {alias: app_of(alias).url for alias in our_aliases()}
    app.settings = msgspec.structs.replace(app.settings, connections={**known, **app.settings.connections})
    connections.close_all()  # before the worker forks
    _log_failures_only()
    with give_app(app, name):
        cli.main(arguments, program)


def _without_djangos(arguments: list[str]) -> list[str]:
    """Leave out ``--settings`` and ``--pythonpath``, which Django has carried out already."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--settings")
    parser.add_argument("--pythonpath")
    _, others = parser.parse_known_args(arguments)
    return others


def _log_failures_only() -> None:
    """Django logs the start and the end of each task. If the project has set no level for this, log only failures."""
    logger = logging.getLogger(PACKAGE)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)


def _alias_of(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the alias of ``--backend ALIAS`` before the command, and the other arguments."""
    if arguments[:1] == ["--backend"] and len(arguments) > 1:
        return arguments[1], arguments[2:]
    if arguments and arguments[0].startswith("--backend="):
        return arguments[0].partition("=")[2], arguments[1:]
    ours = our_aliases()
    if not ours:
        raise CommandError(
            "TASKS must have a backend of multiq: TASKS = {'default': {'BACKEND': 'multiq.contrib.django.TaskBackend', "
            "'OPTIONS': {'url': 'redis://localhost'}}}"
        )
    return ("default" if "default" in ours else ours[0]), arguments
