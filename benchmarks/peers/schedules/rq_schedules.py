"""RQ's cron scheduler beside one ``SimpleWorker``."""

from __future__ import annotations

import os

from peers.marks import mark
from peers.protocol import BROKER
from peers.schedules import SCHEDULES
from rq import cron

for number in range(SCHEDULES):
    cron.register(mark, queue_name="default", args=(number,), cron="* * * * *", result_ttl=0, name=f"schedule-{number}")

_URL = os.environ[BROKER]
PROGRAMS = [
    ["rq", "worker", "--url", _URL, "--worker-class", "rq.SimpleWorker", "--quiet"],
    ["rq", "cron", "--url", _URL, "--logging-level", "WARNING", "peers.schedules.rq_schedules"],
]
