"""Celery beat beside one worker."""

from __future__ import annotations

import os

from celery import Celery
from celery.schedules import crontab
from peers.marks import mark
from peers.protocol import BROKER
from peers.schedules import SCHEDULES

app = Celery("schedules", broker=os.environ[BROKER])
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True, timezone="UTC")
job = app.task(name="job")(mark)
app.conf.beat_schedule = {
    f"schedule-{number}": {"task": "job", "schedule": crontab(), "args": (number,)} for number in range(SCHEDULES)
}

_APP = ["celery", "-A", "peers.schedules.celery_schedules"]
PROGRAMS = [
    [*_APP, "worker", "--pool", "solo", "--loglevel", "WARNING"],
    [*_APP, "beat", "--loglevel", "WARNING", "--schedule", "beat.db"],
]
