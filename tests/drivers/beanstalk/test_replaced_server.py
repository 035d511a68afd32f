"""A replaced server: an id is valid on its connection only, because another server may have a job of another queue with
this id.

The two servers share an address, as after a restart without a log, or a host name. The connection changes from one
server to the other at the worst moment. In no call may a job of the other server be changed.
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
    """Connects the client to another server before the *request*, or after the *reply*, that contains these bytes."""

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
        time.sleep(0.03)  # so long that the client checks the connection before it uses it again
        self._switch()
        client.sendall(data, socket.MSG_MORE)  # so that the data and the end arrive together
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
        raise _Ended


@pytest.fixture
def switch(server: BeanstalkServer, new_beanstalk: Callable[..., BeanstalkServer]) -> Iterator[Switch]:
    with Switch(server.address, new_beanstalk().address) as switch:
        yield switch


@pytest.fixture
def theirs(switch: Switch) -> Iterator[BareClient]:
    """The other server, which has jobs of another queue under the same ids."""
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


#: name -> state of the jobs on the first server, state of the jobs on the second one, the call, the point at which the
#: server changes
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
    # Given the same ids on both servers, of different queues
    put(client, QUEUE, ours)
    ids = put(theirs, OTHER, their, 8)
    before = everything(theirs, ids)
    backend.stats(QUEUE)  # connected
    # When the connection changes to the other server in the middle of the call
    switch.request, switch.reply = when.get("request", b""), when.get("reply", b"")
    with contextlib.suppress(MultiqError):
        call(backend)
    # Then the jobs of the other server are unchanged, and the next call succeeds
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
    # the new job stays delayed until the old one is certainly deleted
    assert client.stats("job", "1")["state"] == "ready"
    assert client.stats("job", "2")["state"] == "delayed"
