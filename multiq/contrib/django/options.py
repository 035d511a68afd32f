"""The options of a backend in the setting ``TASKS``, and the setting ``MULTIQ``.

A mistake raises ``ImproperlyConfigured``. The message has the value, the rule and a correct alternative.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import msgspec
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured

from multiq.errors import MultiqError, SettingsInvalid
from multiq.formatting import shown
from multiq.settings.loader import load_settings
from multiq.settings.url import redact
from multiq.validation import check_keep, check_queue

from .task_options import NAMES as TASK_OPTIONS
from .task_options import check_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiq.settings.model import Settings

Transaction: TypeAlias = Literal["auto", "join", "on_commit", "now"]

TRANSACTIONS: tuple[Transaction, ...] = ("auto", "join", "on_commit", "now")

KEEP_DEFAULT = 86400.0
"""Seconds for which results are kept, if the backend can keep them."""

MAX_ATTEMPTS_DEFAULT = 1
"""Django's tasks fail with their first error."""

_NAMES = ("url", "transaction", "database", "include", *TASK_OPTIONS)
_PARAMETERS = frozenset({"BACKEND", "QUEUES", "OPTIONS"})


class BackendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The checked parameters of a backend."""

    alias: str
    queues: tuple[str, ...] | None
    """None: tasks may name any queue."""
    url: str | None
    """A URL, or the name of a connection. None: the URL in the settings."""
    transaction: Transaction
    database: str
    """The alias in ``DATABASES`` of the database whose transaction an enqueue joins, or for whose commit it waits."""
    include: tuple[str, ...]
    """Modules with tasks, besides the modules ``tasks`` of the installed apps."""
    keep: float | None
    """Seconds for which results are kept. None: the default, if the backend can keep them."""
    tasks: dict[str, Any]
    """The defaults of all tasks, as for ``App.task``. Without *keep*."""


def read_options(alias: str, parameters: Mapping[str, Any]) -> BackendOptions:
    """Return the checked parameters of the backend *alias*. Raises ``ImproperlyConfigured``."""
    where = f"TASKS[{alias!r}]"
    for name in parameters:
        if name not in _PARAMETERS:
            raise ImproperlyConfigured(f"{where}: unknown key {name!r}: there are BACKEND, QUEUES and OPTIONS")
    options = parameters.get("OPTIONS") or {}
    if not isinstance(options, dict):
        raise ImproperlyConfigured(f"{where}: OPTIONS must be a dict, got {shown(options)}")
    for name in options:
        if name not in _NAMES:
            close = difflib.get_close_matches(str(name), _NAMES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(_NAMES)}"
            raise ImproperlyConfigured(f"{where}: unknown option {name!r}: {hint}")
    tasks = {name: options[name] for name in TASK_OPTIONS if name in options and name != "keep"}
    try:
        check_options(tasks)
        keep = check_keep(options["keep"]) if options.get("keep") is not None else None
    except MultiqError as exc:
        raise ImproperlyConfigured(f"{where}: OPTIONS: {exc}") from exc
    return BackendOptions(
        alias=alias,
        queues=_queues(parameters.get("QUEUES", ["default"]), where),
        url=_url(options.get("url"), where),
        transaction=_transaction(options.get("transaction", "auto"), where),
        database=_database(options.get("database", "default"), where),
        include=_modules(options.get("include", ()), where),
        keep=keep,
        tasks=tasks,
    )


def project_settings() -> Settings:
    """Return the settings of the project: from the environment, then from the setting ``MULTIQ``. Without this setting:
    from the environment, then from multiq's own file.

    Raises ``ImproperlyConfigured``.
    """
    table = getattr(django_settings, "MULTIQ", None)
    if table is not None and not isinstance(table, dict):
        raise ImproperlyConfigured(f"MULTIQ must be a dict with the keys of multiq.toml, got {shown(table)}")
    try:
        return load_settings(table=table, source="settings.MULTIQ")
    except SettingsInvalid as exc:
        raise ImproperlyConfigured(str(exc)) from exc


def _queues(names: Any, where: str) -> tuple[str, ...] | None:
    if isinstance(names, str) or not hasattr(names, "__iter__"):
        raise ImproperlyConfigured(f"{where}: QUEUES must be a list of names, got {shown(names)}")
    try:
        return tuple(dict.fromkeys(check_queue(name) for name in names)) or None
    except MultiqError as exc:
        raise ImproperlyConfigured(f"{where}: QUEUES: {exc}") from exc


def _url(url: Any, where: str) -> str | None:
    if url is None or (isinstance(url, str) and url.strip()):
        return url
    raise ImproperlyConfigured(
        f"{where}: url must be a URL like 'redis://localhost', or the name of a connection, got "
        f"{redact(url) if isinstance(url, str) else shown(url)!r}"
    )


def _transaction(value: Any, where: str) -> Transaction:
    if value not in TRANSACTIONS:
        raise ImproperlyConfigured(f"{where}: transaction must be one of {', '.join(TRANSACTIONS)}, got {shown(value)}")
    return cast("Transaction", value)


def _database(alias: Any, where: str) -> str:
    known = getattr(django_settings, "DATABASES", {})
    if not isinstance(alias, str) or (alias not in known and alias != "default"):
        raise ImproperlyConfigured(
            f"{where}: database must be an alias of DATABASES ({', '.join(known) or 'none'}), got {shown(alias)}"
        )
    return alias


def _modules(names: Any, where: str) -> tuple[str, ...]:
    if (
        isinstance(names, list | tuple)
        and all(isinstance(name, str) for name in names)
        and all(part.isidentifier() for name in names for part in name.split("."))
    ):
        return tuple(names)
    raise ImproperlyConfigured(f"{where}: include must be a list of modules, like ['shop.mail'], got {shown(names)}")
