"""Tests of programs that use multiq: ``docs/testing.md`` shows how.

``sync://`` runs each job within its enqueue, and ``null://`` drops all jobs. Both are connections like any other.
``fake`` keeps jobs for assertions, and lets a test move the time. ``sync://``, ``null://`` and ``fake`` need no server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .enqueued import Enqueued
    from .fakes import Fake, FakeBackend, fake, sync
    from .null_backend import NullBackend
    from .sync_backend import SyncBackend

__all__ = ["Enqueued", "Fake", "FakeBackend", "NullBackend", "SyncBackend", "fake", "sync"]

_MODULES = {
    "Enqueued": "enqueued",
    "Fake": "fakes",
    "FakeBackend": "fakes",
    "NullBackend": "null_backend",
    "SyncBackend": "sync_backend",
    "fake": "fakes",
    "sync": "fakes",
}


def __getattr__(name: str) -> object:
    """Import the rest at its first use, because pytest imports this package in every run."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
