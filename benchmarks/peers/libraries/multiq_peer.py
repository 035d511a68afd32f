"""multiq on the store that the URL names."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from peers.marks import mark
from peers.protocol import BROKER, Peer

import multiq

app = multiq.App(os.environ[BROKER])


@app.task
def job(number: int) -> None:
    mark(number)


_CLIENTS = {"redis": ("redis", "hiredis"), "mysql": ("PyMySQL",)}
_CAVEATS = {
    "redis": (),
    "mysql": ("polls, less and less often, every 47 ms when idle",),
    "sqlite": ("synchronous=full, the default",),
}
_SCHEME = urlsplit(os.environ[BROKER]).scheme

PEER = Peer(
    packages=("multiq", *_CLIENTS.get(_SCHEME, ())),
    workers=[["multiq", "worker", "peers.libraries.multiq_peer:app", "--processes", "2"]],
    one=job.enqueue,
    many=lambda numbers: job.enqueue_many([(number,) for number in numbers]),
    later=lambda number, delay: job.options(delay=delay).enqueue(number),
    settings="2 processes (default: 1), all else as installed, the log too",
    killed="run again at once, counted as a crash",
    caveats=_CAVEATS.get(_SCHEME, ()),
)
