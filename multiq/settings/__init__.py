"""Settings: what can be configured, where it is read from, and the URLs of backends."""

from __future__ import annotations

from .model import LogSettings, Settings, WorkerSettings

__all__ = ["LogSettings", "Settings", "WorkerSettings"]
