"""Imports redis-py at its first use. redis-py logs in (``opening.py``), and the application may pass one of its clients
(``redis_py_client.py``)."""

from __future__ import annotations

import threading
from typing import Any

from multiq.driverkit.fork import forks
from multiq.errors import BackendNotInstalled

_import_lock = threading.RLock()
"""Held during the import of redis-py and during a fork. Without this lock, a child could be forked during an import,
and in the child this import would never end."""

forks.hold(_import_lock)


def redis_py() -> Any:
    """The module ``redis``. The first call imports it, which takes 100 to 400 ms. Raises ``BackendNotInstalled``."""
    with _import_lock:
        try:
            import redis
        except ImportError as exc:
            raise BackendNotInstalled(f"redis-py cannot be imported: {exc}; pip install 'multiq[redis]'") from exc
    return redis
