"""A replaced server: an id is valid on its connection only; on another one it may be another queue's job.

Two servers stand behind one address, as after a restart without a log, or behind one name; the connection changes from
one to the other at the worst moment. Whatever the call, no job of the other server's may be touched.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from proxy import Proxy, _Ended
from servers.beanstalk import BareClient
from servers.process import HOST

from multiq.backend import State
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, MultiqError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.beanstalk import BeanstalkServer

    from multiq.backend import Backend

QUEUE = "ours"
OTHER = "theirs"
TOMORROW = 86400


class Switch(Proxy):
    """Goes on to another server, before a request with these bytes, or with the reply that has them."""

    request = reply = b""

    def __init__(self, first: Any, second: Any) -> None:
        self.second = second
        self.switched = 0
        super().__init__(first)

    def _switch(self) -> None:
        self._upstream = self.second
        self.request = self.reply = b""
        self.switched += 1

    def _of_request(self, data: bytes) -> Any:
        if self.request and self.request in data:
            self._switch()
            self.cut()
            raise _Ended
        return super()._of_request(data)

    def _deliver(self, client: socket.socket, data: bytes) -> None:
        if not (self.reply and self.reply in data):
            super()._deliver(client, data)
            return
        time.sleep(0.03)  # until its client looks at a connection before it uses it again
        self._switch()
        client.sendall(data, socket.MSG_MORE)  # so that the end comes with it
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
        raise _Ended


@pytest.fixture
def switch(server: BeanstalkServer, new_beanstalk: Callable[..., BeanstalkServer]) -> Iterator[Switch]:
    with Switch(server.address, new_beanstalk().address) as switch:
        yield switch


@pytest.fixture
def theirs(switch: Switch) -> Iterator[BareClient]:
    """The other server, with jobs of another queue under the ids that ours has, too."""
    with contextlib.closing(BareClient(switch.second)) as theirs:
        yield theirs


@pytest.fixture
def backend(switch: Switch) -> Iterator[Backend]:
    with open_backend(f"beanstalk://{HOST}:{switch.port}") as backend:
        yield backend


def put(client: BareClient, tube: str, state: str, count: int = 4, ttr: int = 60) -> list[str]:
    delay = TOMORROW if state == "delayed" else 0
    ids = [str(client.put(b"x", tube=tube, delay=delay, ttr=ttr)) for _ in range(count)]
    if state == "buried":
        client.watch(tube)
        for job_id in ids:
            assert client.reserve() == (int(job_id), b"x")
            client.ask(b"bury %b 1024" % job_id.encode())
        client.watch("default")
        client.ask(b"ignore " + tube.encode())
    return ids


def everything(client: BareClient, ids: list[str]) -> list[dict[str, str]]:
    return [{k: v for k, v in client.stats("job", i).items() if k not in {"age", "time-left"}} for i in ids]


#: call, what our jobs are, what theirs are, the call, and where the connection changes
CASES: dict[str, tuple[str, str, Callable[[Backend], object], dict[str, bytes]]] = {
    "purge ready": ("ready", "ready", lambda b: b.purge(QUEUE, [State.READY]), {"reply": b"FOUND "}),
    "purge delayed": ("delayed", "delayed", lambda b: b.purge(QUEUE, [State.DELAYED]), {"reply": b"FOUND "}),
    "purge buried": ("buried", "buried", lambda b: b.purge(QUEUE, [State.BURIED]), {"reply": b"FOUND "}),
    "purge, later": ("ready", "ready", lambda b: b.purge(QUEUE, [State.READY]), {"reply": b"FOUND 3 "}),
    "kick": ("buried", "buried", lambda b: b.kick(QUEUE, 9), {"reply": b"FOUND "}),
    "kick, theirs are delayed": ("buried", "delayed", lambda b: b.kick(QUEUE, 9), {"reply": b"FOUND 2 "}),
    "kick_job": ("delayed", "delayed", lambda b: b.kick_job(QUEUE, "1"), {"request": b"kick-job"}),
    "delete": ("ready", "ready", lambda b: b.delete(QUEUE, "1"), {"request": b"delete"}),
    "reschedule, its peek": ("delayed", "delayed", lambda b: b.reschedule(QUEUE, "1", 9), {"request": b"peek"}),
    "reschedule, its put": ("delayed", "delayed", lambda b: b.reschedule(QUEUE, "1", 9), {"request": b"put"}),
    "reschedule, its delete": ("delayed", "delayed", lambda b: b.reschedule(QUEUE, "1", 9), {"request": b"delete"}),
    "reschedule, its kick": ("ready", "delayed", lambda b: b.reschedule(QUEUE, "1", 0), {"request": b"kick-job"}),
}


@pytest.mark.parametrize(("ours", "their", "call", "when"), CASES.values(), ids=CASES.keys())
def test_job_of_another_server_is_not_changed(  # noqa: PLR0917 - a scene's
    switch: Switch,
    backend: Backend,
    client: BareClient,
    theirs: BareClient,
    ours: str,
    their: str,
    call: Callable[[Backend], object],
    when: dict[str, bytes],
) -> None:
    # Given the same ids on both, of different queues
    put(client, QUEUE, ours)
    ids = put(theirs, OTHER, their, 8)
    before = everything(theirs, ids)
    backend.stats(QUEUE)  # connected
    # When the connection changes in the middle of the call
    switch.request, switch.reply = when.get("request", b""), when.get("reply", b"")
    with contextlib.suppress(MultiqError):
        call(backend)
    # Then nothing was done to theirs, and the next call goes its way
    assert switch.switched == 1
    assert everything(theirs, ids) == before
    assert theirs.stats("tube", QUEUE).get("current-jobs-delayed", "0") == "0"
    assert backend.stats(OTHER).queue == OTHER


def test_first_job_of_a_listing_is_of_one_server(
    switch: Switch, backend: Backend, client: BareClient, theirs: BareClient
) -> None:
    put(client, QUEUE, "delayed", 1)
    put(theirs, OTHER, "delayed", 8, ttr=99)
    backend.stats(QUEUE)
    switch.reply = b"FOUND "
    assert [job.ttr for job in backend.jobs(QUEUE, State.DELAYED, limit=1).jobs] in ([], [60])
    assert backend.jobs(QUEUE, State.DELAYED, limit=1).jobs == []


def test_cut_reschedule_reports_both_jobs(switch: Switch, backend: Backend, client: BareClient) -> None:
    put(client, QUEUE, "ready", 1)
    switch.request = b"delete"
    with pytest.raises(BackendUnavailable, match=r"job 1 .* by job 2"):
        backend.reschedule(QUEUE, "1", 0)
    # until it is sure that the old one is gone, the new one is not handed out
    assert client.stats("job", "1")["state"] == "ready"
    assert client.stats("job", "2")["state"] == "delayed"
