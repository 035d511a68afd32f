"""One multiq worker, which also runs the scheduler."""

from __future__ import annotations

import os

from peers.marks import mark
from peers.protocol import BROKER
from peers.schedules import SCHEDULES

import multiq

app = multiq.App(os.environ[BROKER])
job = app.task(name="job")(mark)
for number in range(SCHEDULES):
    app.schedule("* * * * *", job.s(number), name=f"schedule-{number}")

PROGRAMS = [["multiq", "worker", "peers.schedules.multiq_schedules:app", "--processes", "1"]]
