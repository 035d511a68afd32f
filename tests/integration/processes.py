"""Worker processes for tests: they are started, waited for and signalled, and always ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from worker_app import read_diary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent


class WorkerProcess:
    """``python -c`` that runs a ``Worker`` of ``worker_app``, or *code* instead of that, its log in a file."""

    def __init__(self, folder: Path, url: str, arguments: str = "", *, code: str | None = None) -> None:
        self.diary = folder / "diary"
        self._log = folder / f"worker-{time.monotonic_ns()}.log"
        self._is_gone = False
        code = code or (
            "import sys, multiq, worker_app; from multiq.logging import setup_logging; setup_logging('info');"
            f"worker = multiq.Worker(worker_app.app, {arguments}); worker.owns_process = True; sys.exit(worker.run())"
        )
        environment = {
            **os.environ,
            "MULTIQ_URL": url,
            "MULTIQ_LOG_JOBS": "true",  # shown by a failed test, and read by some tests
            "WORKER_TEST_DIARY": str(self.diary),
            "PYTHONPATH": str(HERE),
        }
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 60) -> int:
        """The exit code; a worker that hangs fails the test with its log."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the worker did not end within {timeout} s; its log:\n{self.log}") from None
        self._signal(0)  # to find out whether the worker has left a child behind
        return code

    def kill(self) -> None:
        """SIGKILL for the whole group: supervisor and children."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        self._is_gone = True

    def _signal(self, number: int) -> None:
        """Signal the whole group, unless it has ended and been reaped: its id may then be another group's."""
        if self._is_gone:
            return
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            self._is_gone = True

    def wait_until_working(self) -> None:
        until(lambda: "working" in self.log, what=lambda: f"the worker works; its log:\n{self.log}")


@contextlib.contextmanager
def worker(folder: Path, url: str, arguments: str = "", *, code: str | None = None) -> Iterator[WorkerProcess]:
    """A worker that is ended with the block, even if the block raises."""
    process = WorkerProcess(folder, url, arguments, code=code)
    try:
        yield process
    except BaseException as exc:
        exc.add_note(f"the worker's log:\n{process.log}\nits diary:\n{read_diary(process.diary)}")
        raise
    finally:
        process.kill()


def until(condition: Callable[[], object], *, timeout: float = 60, what: Callable[[], str] | None = None) -> None:
    """Wait for a condition; a hang fails the test."""
    give_up_at = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {timeout} s in vain until {what() if what else condition}")
        time.sleep(0.01)
