"""Django's connection to a database, without a Django project."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING, Any

import django
from django.conf import settings
from django.db import connections

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def connected(**database: Any) -> Iterator[Any]:
    """A connection with these settings, under an alias of its own; closed at the end."""
    if not settings.configured:
        settings.configure(DATABASES={}, LOGGING_CONFIG=None)
        django.setup()
    alias = f"shop_{uuid.uuid4().hex}"
    configured = connections.configure_settings({"default": {}, alias: database})
    connections.databases[alias] = configured[alias]
    try:
        yield connections[alias]
    finally:
        connections[alias].close()
        del connections[alias], connections.databases[alias]
