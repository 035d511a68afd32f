"""Backends with one planted bug each. The backends show which mistakes the suite finds.

Each backend is the memory backend with a few lines changed. Each bug has occurred in a real queue. The backends with
planted bugs are complete: ``PLANTED["late ack"].open()`` returns a backend that can be used and measured like any other
backend.
"""

from __future__ import annotations

from . import flows, jobs, limits, memos, outcomes, schedules, unique  # noqa: F401 - they add their bugs to PLANTED
from .registry import PLANTED, PlantedBug

__all__ = ["PLANTED", "PlantedBug"]
