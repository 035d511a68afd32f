"""The runner's side of the protocol: sends requests to a library's program, one per line."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from peers import marks, protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

_BENCHMARKS = Path(__file__).parents[1]
_SHOWN = 400  # the largest number of characters of a log's end
_GOODBYE = 10.0  # seconds for a program to stop its workers and end


class ProgramError(Exception):
    """A library's program ended, or did not answer in time. The message shows the end of the program's output."""


class Client:
    """A program in a library's environment, which runs until the end of the ``with`` block. The program's workers end
    with the program."""

    def __init__(self, python: Path, module: str, url: str, folder: Path, *, patience: float) -> None:
        self._patience = patience
        self.marks = folder / "marks"
        self.marks.mkdir()
        self._log = folder / "log"
        self._pids: list[int] = []
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MULTIQ_")},
            "PYTHONPATH": str(_BENCHMARKS),
            protocol.BROKER: url,
            marks.FOLDER: str(self.marks),
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a program of this repository
                [str(python), "-m", "peers.protocol", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env=environment,
                text=True,
                start_new_session=True,  # Ctrl-C reaches only the runner, which then ends this program
            )
        self._input = cast("IO[str]", self._process.stdin)
        self._output = cast("IO[str]", self._process.stdout)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, do: str, **arguments: Any) -> Mapping[str, Any]:
        """The answer to one request line. Raises ``ProgramError``."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(json.dumps({"do": do, **arguments}) + "\n")
            self._input.flush()
        try:
            line = self._answers.get(timeout=self._patience)
        except queue.Empty:
            raise ProgramError(f"{do}: no answer within {self._patience:g} s. {self.log_end()}") from None
        if not line:
            raise ProgramError(f"{do}: the program ended. {self.log_end()}")
        answer: dict[str, Any] = json.loads(line)
        self._pids += answer.get("pids", [])
        return answer

    def log_end(self) -> str:
        """The end of the output of the program and its workers, in one line."""
        text = " ".join(self._log.read_text(errors="replace").split())
        return f"Its last words: ...{text[-_SHOWN:]}" if text else "It printed nothing."

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with contextlib.suppress(BrokenPipeError):
                self._input.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GOODBYE)
        finally:
            if self._process.returncode is None:  # the program did not end, so its workers may still run
                for pid in (self._process.pid, *self._pids):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                self._process.wait()
            self._output.close()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in self._output:
                self._answers.put(line)
        self._answers.put("")
