"""The self-pipe that ends a driver's wait, and that another thread may close at any moment."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from multiq.driverkit.wakeup import Wakeup

if TYPE_CHECKING:
    import pytest


def test_a_notice_is_written_into_no_other_file_than_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a thread that is about to write a notice
    wakeup, is_writing, may_write, write = Wakeup(), threading.Event(), threading.Event(), os.write
    wakeup.open()

    def write_late(end: int, data: bytes) -> int:
        is_writing.set()
        assert may_write.wait(10)
        return write(end, data)

    monkeypatch.setattr(os, "write", write_late)
    with ThreadPoolExecutor(2) as threads:
        notifying = threads.submit(wakeup.notify)
        assert is_writing.wait(10)
        # when another thread closes the pipe, whose number the next file of the process gets
        closing = threads.submit(wakeup.close)
        threading.Event().wait(0.02)
        may_write.set()
        # then the notice has come before the end of the pipe
        notifying.result(10)
        closing.result(10)
    assert not wakeup.is_open


def test_a_signal_handler_does_not_wait_for_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    wakeup, write = Wakeup(), os.write
    written: list[bytes] = []
    reader = wakeup.open()

    def write_and_be_interrupted(end: int, data: bytes) -> int:
        if not written:
            written.append(data)
            wakeup.notify()  # as a signal handler may, in the middle of the first notice
        return write(end, data)

    monkeypatch.setattr(os, "write", write_and_be_interrupted)
    wakeup.notify()
    assert os.read(reader, 10) == b"!"
    wakeup.close()
