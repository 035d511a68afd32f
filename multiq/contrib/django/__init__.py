"""multiq as the task backend of Django: ``multiq.contrib.django.TaskBackend``. ``docs/django.md`` describes this
backend.

This module imports no part of Django that needs the settings, because it is imported while Django starts.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from multiq.errors import ExtraNotInstalled

from .task_options import task_options

if find_spec("django") is None:
    raise ExtraNotInstalled("multiq.contrib.django needs Django: pip install 'multiq[django]'")

if TYPE_CHECKING:
    from multiq.app import App

    from .backend import TaskBackend

    TaskResultDoesNotExist: Any
    task: Any
    """Django's decorator: ``django.tasks.task`` of Django 6, or ``django_tasks.task`` of the package django-tasks."""

__all__ = ["TaskBackend", "TaskResultDoesNotExist", "get_app", "task", "task_options"]


def get_app(alias: str = "default") -> App:
    """Return the multiq app of a backend in the setting ``TASKS``.

    Raises ``ImproperlyConfigured`` if the backend is not multiq's, or if its options are wrong.
    """
    from .apps_of_backends import app_of

    return app_of(alias)


def __getattr__(name: str) -> Any:
    if name == "TaskBackend":
        from .backend import TaskBackend

        return TaskBackend
    if name in {"TaskResultDoesNotExist", "task"}:
        from . import framework

        return getattr(framework, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
