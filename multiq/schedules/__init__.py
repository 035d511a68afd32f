"""Schedules: jobs that are due by a cron expression, at times of day, or at an interval in seconds.

A schedule is a note beside its target queue. Each worker makes the jobs of the next minute in advance. One step
enqueues the job and changes the schedule's note. So each job is made once, even if many workers make jobs.
"""

from __future__ import annotations

from .managing import NextRun, ScheduleInfo, Schedules
from .record import Definition
from .scheduler import Scheduler

__all__ = ["Definition", "NextRun", "ScheduleInfo", "Scheduler", "Schedules"]
