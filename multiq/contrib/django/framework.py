"""Django's tasks: ``django.tasks`` of Django 6, or the package django-tasks, which has the same interface for earlier
versions."""

from __future__ import annotations

import importlib
from typing import Any

from django.core.exceptions import ImproperlyConfigured


def _package() -> str:
    for name in ("django.tasks", "django_tasks"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if exc.name is None or not name.startswith(exc.name):
                raise
        else:
            return name
    import django

    raise ImproperlyConfigured(
        f"Django must have django.tasks, got Django {django.get_version()} without it: install Django 6, or the "
        "package django-tasks"
    )


PACKAGE = _package()
"""``django.tasks`` or ``django_tasks``."""

_tasks: Any = importlib.import_module(PACKAGE)
_base: Any = importlib.import_module(f"{PACKAGE}.base")
_exceptions: Any = importlib.import_module(f"{PACKAGE}.exceptions")
_signals: Any = importlib.import_module(f"{PACKAGE}.signals")

BaseTaskBackend: Any = importlib.import_module(f"{PACKAGE}.backends.base").BaseTaskBackend
Task: Any = _base.Task
TaskContext: Any = _base.TaskContext
TaskError: Any = _base.TaskError
TaskResult: Any = _base.TaskResult
Status: Any = _base.TaskResultStatus
TaskResultDoesNotExist: Any = _exceptions.TaskResultDoesNotExist
InvalidTask: Any = getattr(_exceptions, "InvalidTask", None) or _exceptions.InvalidTaskError
task: Any = _tasks.task
task_backends: Any = _tasks.task_backends
task_enqueued: Any = _signals.task_enqueued
task_started: Any = _signals.task_started
task_finished: Any = _signals.task_finished

normalize_json: Any = importlib.import_module(
    "django.utils.json" if PACKAGE == "django.tasks" else "django_tasks.utils"
).normalize_json
