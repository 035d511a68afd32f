"""Huey on Redis, on an SQLite file, or on a database through peewee."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from huey import RedisHuey, SqliteHuey
from huey.contrib.sql_huey import SqlHuey
from peers.marks import mark
from peers.protocol import BROKER, Peer

_URL = os.environ[BROKER]
_SCHEME = urlsplit(_URL).scheme

match _SCHEME:
    case "redis":
        huey = RedisHuey(url=_URL, results=False)
    case "sqlite":
        huey = SqliteHuey(filename=_URL.removeprefix("sqlite:///"), fsync=True, results=False)
    case _:
        huey = SqlHuey(database=_URL, results=False)

job = huey.task(name="job")(mark)

_OWN = {
    "redis": ["redis"],
    "sqlite": [],
    "mysql": ["peewee", "PyMySQL"],
}
_POLLS = "polls, every 0.1 to 10 s as it backs off"

PEER = Peer(
    packages=("huey", *_OWN[_SCHEME]),
    workers=[["huey_consumer", "peers.libraries.huey_peer.huey", "--workers", "2", "--quiet"]] * 2,
    one=job,
    later=lambda number, delay: job.schedule(args=(number,), delay=delay),
    settings="2 processes of 2 threads (default: one thread), no results"
    + (", fsync=True: synchronous=full as multiq (default: as SQLite was built)" if _SCHEME == "sqlite" else ""),
    killed="lost: no ack",
    caveats=["no bulk", "delays are checked once per second", *([] if _SCHEME == "redis" else [_POLLS])],
)
