"""What the worker of the demo runs: ``multiq worker examples.demo_app:app``. Importing the tasks registers them."""

from __future__ import annotations

from .alarm import tasks as _alarm
from .app import app
from .order_timeout import tasks as _order_timeout
from .reset_mail import tasks as _reset_mail

__all__ = ["app"]

_registered = (_alarm, _order_timeout, _reset_mail)
