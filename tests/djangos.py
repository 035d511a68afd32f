"""Django in the tests' process: the settings of ``django_shop``, and connections to databases."""

from __future__ import annotations

import contextlib
import importlib
import uuid
from typing import TYPE_CHECKING, Any

import django
import django_shop.settings
from django.conf import settings
from django.db import connections
from django.test import override_settings

import multiq

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.contrib.django import TaskBackend


def configure() -> None:
    """Configure Django with the settings of ``django_shop``, unless that was done."""
    if not settings.configured:
        settings.configure(**{name: value for name, value in vars(django_shop.settings).items() if name.isupper()})
        django.setup()


@contextlib.contextmanager
def connected(name: str | None = None, **database: Any) -> Iterator[Any]:
    """A connection with these settings, under *name* or an alias of its own; closed at the end."""
    configure()
    alias = name or f"shop_{uuid.uuid4().hex}"
    configured = connections.configure_settings({"default": {}, alias: database})
    before = connections.databases.get(alias)
    connections.databases[alias] = configured[alias]
    with contextlib.suppress(AttributeError):  # this alias has no connection yet
        del connections[alias]
    try:
        yield connections[alias]
    finally:
        connections[alias].close()
        del connections[alias], connections.databases[alias]
        if before is not None:
            connections.databases[alias] = before


@contextlib.contextmanager
def tasks(url: str | None, alias: str = "default", queues: Any = (), **options: Any) -> Iterator[TaskBackend]:
    """The only backend of ``TASKS``, with these options."""
    configure()
    if url is not None:
        options["url"] = url
    backend = {"BACKEND": "multiq.contrib.django.TaskBackend", "QUEUES": list(queues), "OPTIONS": options}
    with override_settings(TASKS={alias: backend}):
        yield task_backends()[alias]


def task_backends() -> Any:
    """Django's backends of ``TASKS``."""
    return importlib.import_module("multiq.contrib.django.framework").task_backends


def work(backend: TaskBackend, **options: Any) -> None:
    """Run the jobs that are due, in this process."""
    multiq.Worker(backend.app, **{"stop_when_empty": True, **options}).run()
