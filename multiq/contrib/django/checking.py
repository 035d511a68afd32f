"""The checks of ``manage.py check``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.apps import apps as installed_apps
from django.core import checks
from django.db import connections

from multiq.errors import MultiqError
from multiq.settings.url import redact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .apps_of_backends import DjangoApp


def check_app(app: DjangoApp) -> list[Any]:
    """Return the mistakes in the settings of a backend's app. Makes no call of the store."""
    where = f"TASKS[{app.options.alias!r}]"
    try:
        declared = app.backend.declared
    except MultiqError as exc:
        return [checks.Error(f"{where}: {exc}", id="multiq.E001")]
    return [*_app_checks(app, declared, where), *_transaction_checks(app, declared, where)]


def _app_checks(app: DjangoApp, declared: Any, where: str) -> Iterator[Any]:
    if not installed_apps.is_installed("multiq.contrib.django"):
        yield checks.Warning(
            "multiq.contrib.django is not in INSTALLED_APPS",
            hint="Without it there is neither manage.py multiq nor the page of failed jobs.",
            id="multiq.W001",
        )
    if not declared.shared and not hasattr(app.backend, "attach_app"):
        yield checks.Warning(
            f"{where}: the {declared.backend} backend keeps its jobs in this process, so no worker gets them",
            hint="Use sqlite://, redis://, mysql:// or beanstalk://, or sync:// in tests.",
            id="multiq.W002",
        )
    if app.url.startswith("sqlite:///") and not app.url.startswith("sqlite:////"):
        yield checks.Warning(
            f"{where}: {redact(app.url)} is relative to the folder in which a process is started",
            hint="Use an absolute path, which has four slashes: f'sqlite:///{BASE_DIR}/jobs.db'.",
            id="multiq.W003",
        )


def _transaction_checks(app: DjangoApp, declared: Any, where: str) -> Iterator[Any]:
    options = app.options
    if options.database not in connections.settings:
        yield checks.Error(
            f"{where}: database must be an alias of DATABASES, got {options.database!r}", id="multiq.E002"
        )
        return
    connection = connections[options.database]
    is_like = declared.transactional_enqueue and declared.backend == connection.vendor
    if options.transaction == "join" and not is_like:
        yield checks.Error(
            f"{where}: with transaction='join', the jobs must be in the database {options.database!r}, which is "
            f"{connection.vendor}, and the backend is {declared.backend}",
            hint="Name the URL of this database, or use 'auto' or 'on_commit'.",
            id="multiq.E003",
        )
    if is_like and options.transaction in {"auto", "join"} and connection.vendor == "sqlite":
        mode = connection.settings_dict.get("OPTIONS", {}).get("transaction_mode")
        if _is_file_of(app.url, connection.settings_dict.get("NAME")) and str(mode).upper() not in _WRITING:
            yield checks.Warning(
                f"{where}: an enqueue in a transaction that has read before fails if another connection has written "
                "meanwhile, like every other write of Django: 'database is locked'",
                hint="Set OPTIONS = {'transaction_mode': 'IMMEDIATE'} in DATABASES.",
                id="multiq.W004",
            )


_WRITING = {"IMMEDIATE", "EXCLUSIVE"}


def _is_file_of(url: str, name: Any) -> bool:
    path = url.removeprefix("sqlite:///").partition("?")[0]
    try:
        return Path(path).resolve() == Path(str(name)).resolve()
    except OSError:
        return False
