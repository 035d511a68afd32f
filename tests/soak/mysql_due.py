"""Many jobs become due, the link is slow, and another session has locked a due row: no other queue may wait for them.

    python tests/soak/mysql_due.py --seconds 30

A thousand jobs a second become due in one queue, whose consumer also has a queue in front of it and one behind; the
server's replies take 3 ms longer. Jobs that are ready in the queue in front must be handed out within 0.2 s, and the
ready jobs in the queue behind must be handed out as soon as the stream ends. Exits with 1 if a job waited longer.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

from multiq.backend import Ack, NewJob
from multiq.backend.registry import open_backend
from multiq.ids import new_id, new_ids

sys.path.append(str(Path(__file__).parent.parent))

from proxy import Latency, Proxy
from servers.mysql import MysqlServer

RATE = 1000  # jobs that become due per second
EACH = 0.05  # seconds between two batches of these jobs
LATENCY = 0.003  # seconds
LIMIT = 0.2  # seconds
PROBE = 0.25  # seconds between two jobs whose waiting time is measured


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    waits, taken = run(given.seconds)
    waits.sort()
    print(
        f"{len(waits)} ready jobs of another queue waited {waits[len(waits) // 2] * 1000:.0f} ms in the middle and "
        f"{waits[-1] * 1000:.0f} ms at worst, while {taken:,} due jobs were worked off"
    )
    return 0 if waits[-1] <= LIMIT and taken else 1


def run(seconds: float) -> tuple[list[float], int]:
    """How long each probe waited, and how many due jobs were taken meanwhile."""
    with (
        MysqlServer(innodb_flush_log_at_trx_commit=2) as server,
        server.database() as place,
        Proxy((server.host, server.port)) as proxy,
        open_backend(place.url) as near,
        open_backend(server.url(place.name, port=proxy.port)) as far,
        server.client(place.name, autocommit=False) as holder,
        holder.cursor() as cursor,
    ):
        proxy.mode = Latency(LATENCY)
        # a due row that another connection has locked
        near.enqueue("stream", [NewJob(b"x", new_id(), delay=0.001)])
        time.sleep(0.01)
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute("SELECT seq FROM multiq_jobs FOR UPDATE")
        end = threading.Event()
        feeder = threading.Thread(target=_feed, args=(place.url, end))
        feeder.start()
        waits: list[float] = []
        taken = 0
        try:
            with far.consumer(["front", "stream"]) as consumer:
                until, probe_at = time.monotonic() + seconds, 0.0
                asked: dict[str, float] = {}
                leases = consumer.reserve(100, 1)
                while time.monotonic() < until:
                    for lease in leases:
                        if lease.queue == "front":
                            waits.append(time.monotonic() - asked.pop(lease.id))
                        else:
                            taken += 1
                    if not asked and time.monotonic() >= probe_at:
                        probe_at, probe = time.monotonic() + PROBE, new_id()
                        near.enqueue("front", [NewJob(b"x", probe)])
                        asked[probe] = time.monotonic()
                    _, leases = consumer.exchange([Ack(lease) for lease in leases], 100, 0.1)
                waits += [time.monotonic() - since for since in asked.values()]
        finally:
            end.set()
            feeder.join()
        return waits, taken


def _feed(url: str, end: threading.Event) -> None:
    """Enqueue jobs that become due a moment later."""
    with open_backend(url) as backend:
        while not end.wait(EACH):
            backend.enqueue("stream", [NewJob(b"x", job_id, delay=0.2) for job_id in new_ids(int(RATE * EACH))])


if __name__ == "__main__":
    sys.exit(main())
