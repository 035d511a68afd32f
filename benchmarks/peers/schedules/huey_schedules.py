"""Huey's consumer, whose scheduler thread runs the periodic tasks."""

from __future__ import annotations

import os

from huey import RedisHuey, SqliteHuey, crontab
from peers.marks import mark
from peers.protocol import BROKER
from peers.schedules import SCHEDULES

_URL = os.environ[BROKER]
if _URL.startswith("redis"):
    huey = RedisHuey(url=_URL, results=False)
else:
    huey = SqliteHuey(filename=_URL.removeprefix("sqlite:///"), fsync=True, results=False)


def _register(number: int) -> None:
    def job() -> None:
        mark(number)

    huey.periodic_task(crontab(), name=f"schedule-{number}")(job)


for each in range(SCHEDULES):
    _register(each)

PROGRAMS = [["huey_consumer", "peers.schedules.huey_schedules.huey", "--workers", "2", "--quiet"]]
