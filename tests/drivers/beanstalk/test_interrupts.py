"""Interrupts: an exception of a signal handler in the middle of a call leaves no reply for the next call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import Ack, NewJob, Touch
from multiq.errors import EnqueueUncertain
from multiq.ids import new_id
from multiq_beanstalk.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.beanstalk import BareClient

    from multiq.backend import Backend

QUEUE = "interrupted"


class Ctrl(BaseException):
    """Raised after a request was sent and before its reply is read."""


def new(body: bytes = b"x") -> NewJob:
    return NewJob(body, new_id())


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Makes a call, and interrupts it when it first waits for a reply."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise Ctrl

    def call(what: Callable[[], Any]) -> None:
        with monkeypatch.context() as patch:
            for name in ("read", "read_line", "read_lines", "read_many"):
                patch.setattr(Connection, name, interrupt)
            with pytest.raises(Ctrl):
                what()

    return call


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("call", ["enqueue", "enqueue many", "stats"])
def test_call_after_an_interrupt_gets_its_own_replies(
    backend: Backend, client: BareClient, interrupted: Callable[[Callable[[], Any]], None], call: str, count: int
) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "enqueue": lambda: backend.enqueue(QUEUE, [new(b"before")]),
        "enqueue many": lambda: backend.enqueue(QUEUE, [new(b"before"), new(b"before")]),
        "stats": lambda: backend.stats(QUEUE),
    }
    backend.enqueue(QUEUE, [new(b"first")])
    interrupted(calls[call])
    ids = backend.enqueue(QUEUE, [new(b"after") for _ in range(count)])
    assert all(client.ask(b"peek " + job_id.encode()).endswith(b"\r\nafter") for job_id in ids)


def test_lease_ends_with_its_connection_after_an_interrupted_verdict(
    backend: Backend, client: BareClient, interrupted: Callable[[Callable[[], Any]], None]
) -> None:
    backend.enqueue(QUEUE, [new(), new()])
    with backend.consumer([QUEUE]) as consumer:
        first, second = consumer.reserve(1, 0) + consumer.reserve(1, 0)
        main = consumer._main  # type: ignore[attr-defined]
        interrupted(lambda: consumer.settle([Ack(first)]))
        assert main.is_closed
        assert consumer.settle([Touch(second)])[0] is not None


def test_unexpected_reply_to_a_put_ends_the_connection(
    backend: Backend, client: BareClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.enqueue(QUEUE, [new()])
    send = Connection.send
    with monkeypatch.context() as patch:
        patch.setattr(
            Connection, "send", lambda self, packet, deadline: send(self, b"list-tube-used\r\n" + packet, deadline)
        )
        with pytest.raises(EnqueueUncertain):  # the reply to the other command does not say whether the job is stored
            backend.enqueue(QUEUE, [new(b"before")])
    (job_id,) = backend.enqueue(QUEUE, [new(b"after")])
    assert client.ask(b"peek " + job_id.encode()).endswith(b"\r\nafter")
