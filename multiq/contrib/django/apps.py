"""The app for ``INSTALLED_APPS``: ``"multiq.contrib.django"``."""

from __future__ import annotations

from django.apps import AppConfig


class MultiqConfig(AppConfig):
    """Brings ``manage.py multiq``, the page of failed jobs, and the apps of the backends in ``TASKS``."""

    name = "multiq.contrib.django"
    label = "multiq"
    verbose_name = "multiq"
    default_auto_field = "django.db.models.AutoField"

    def ready(self) -> None:
        """Make the apps, so that a ``multiq.Tasks`` in a module ``tasks`` finds the app that includes it."""
        from .apps_of_backends import app_of, our_aliases
        from .framework import PACKAGE

        for alias in our_aliases():
            app_of(alias)
        if PACKAGE == "django_tasks":
            import_checks()


def import_checks() -> None:
    """Let ``manage.py check`` check the backends, even if ``django_tasks`` is not in ``INSTALLED_APPS``."""
    import django_tasks.checks  # noqa: F401 - registers the check
