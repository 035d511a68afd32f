"""The app that the examples share: one connection, and the tasks that are registered on it.

``App()`` takes its connection from ``MULTIQ_URL`` or ``multiq.toml``, so that a web process, a worker and a test of
the same program differ in configuration only.
"""

from __future__ import annotations

import os
from pathlib import Path

import multiq

from .diary import keep_diary

app = multiq.App()

if "EXAMPLES_DIARY" in os.environ:
    keep_diary(app, Path(os.environ["EXAMPLES_DIARY"]))
