"""Tests of programs that use multiq: ``docs/testing.md`` shows how.

``sync://`` runs each job within its enqueue, and ``null://`` drops all jobs. Both are connections like any other.
``fake`` keeps jobs for assertions, and lets a test move the time. ``sync://``, ``null://`` and ``fake`` need no server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backends import FakeBackend, NullBackend, SyncBackend
    from .enqueued import Enqueued
    from .fakes import Fake, fake, sync

__all__ = ["Enqueued", "Fake", "FakeBackend", "NullBackend", "SyncBackend", "fake", "sync"]

_BACKENDS = {"FakeBackend", "NullBackend", "SyncBackend"}


def __getattr__(name: str) -> object:
    """Import the rest at its first use, because pytest imports this package in every run."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import backends, enqueued, fakes

    if name in _BACKENDS:
        return getattr(backends, name)
    return enqueued.Enqueued if name == "Enqueued" else getattr(fakes, name)
