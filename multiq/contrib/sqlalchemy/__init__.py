"""multiq in applications with SQLAlchemy: an outbox for jobs that exist if a transaction commits.

``docs/sqlalchemy.md``.
"""

from __future__ import annotations

from multiq.errors import ExtraNotInstalled

try:
    import sqlalchemy  # noqa: F401 - in one place, so that the error names the extra
except ImportError as exc:
    raise ExtraNotInstalled("multiq.contrib.sqlalchemy needs SQLAlchemy 2: pip install 'multiq[sqlalchemy]'") from exc

from .outbox import Outbox

__all__ = ["Outbox"]
