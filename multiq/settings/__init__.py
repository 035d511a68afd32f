"""The settings, the sources of their values, and the URLs of backends."""

from __future__ import annotations

from .model import LogSettings, PayloadSettings, Settings, WorkerSettings

__all__ = ["LogSettings", "PayloadSettings", "Settings", "WorkerSettings"]
