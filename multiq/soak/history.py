"""The history of a soak. Each process appends events to its own file, with one write for each event.

A written line is kept even if its process is killed. All processes run on one machine, so their times of
``time.monotonic_ns`` can be compared.

A missing event would look like a fault of the tested system. For this reason, ``read`` raises an error if a process
could not write a line, for instance on a full disk.
"""

from __future__ import annotations

import gzip
import itertools
import operator
import os
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from multiq.errors import MultiqError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path
    from typing import Any

INVOKE: Literal["invoke"] = "invoke"
OK: Literal["ok"] = "ok"
FAIL: Literal["fail"] = "fail"
INFO: Literal["info"] = "info"


class HistoryDamaged(MultiqError):
    """Events are missing in a history, so its jobs cannot be judged."""


class Event(msgspec.Struct, gc=False, omit_defaults=True, kw_only=True):
    """One line of a history."""

    t: int
    """``time.monotonic_ns()``."""
    proc: str
    """The process that writes the event: its name and its pid."""
    type: Literal["invoke", "ok", "fail", "info"]
    """The event's place in a call:

    - ``invoke``: the call begins.
    - ``ok``: the call succeeded.
    - ``fail``: the call certainly had no effect.
    - ``info``: the effect of the call is unknown.
    """
    f: str
    """The name of the call or the event.

    Examples: enqueue, claim (a reserve), ack, start and end (of a run), fault, audit (a list of the store's last jobs).
    """
    op: int = 0
    """The number of a call or a run. The number is unique in its process. A call and its answer have the same number,
    as do the start and the end of a run."""
    jobs: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    attempts: tuple[int, ...] = ()
    """The attempt numbers of the jobs. A job's first attempt is 1."""
    digests: tuple[str, ...] = ()
    """Digests of the payloads that were enqueued or received."""
    queue: str = ""
    priority: int = 0
    delay: float = 0.0
    """The delay of an enqueue, a release or a reschedule, in seconds."""
    ttr: float = 0.0
    """The duration of a lease, in seconds."""
    max_attempts: int = 0
    max_crashes: int = 0
    deadline: float = 0.0
    """The time limit of the call, in seconds. 0.0 means no limit."""
    seconds: float = 0.0
    """In an answer: the duration of the call without the writing of its events, which can wait for a busy disk. 0.0
    means that the duration was not measured."""
    outcome: str = ""
    """How a run ended: done or raised."""
    err: str = ""
    """The exception's class and text."""
    is_typed: bool = True
    """Whether *err* is one of the errors that the library documents."""
    kind: str = ""
    """The kind of a fault: kill, stop, cut, freeze, restart, ... For a measurement: the measured quantity."""
    target: str = ""
    """The target of a fault: the name of a process in the history, ``store`` or ``link``."""
    value: float = 0.0
    states: tuple[str, ...] = ()
    """For an audit: the states of its jobs."""


_OF_NO_JOB = frozenset(
    {"begun", "fault", "struck", "missed", "back", "healed", "drained", "count", "residue", "untyped"}
)

_decode = msgspec.json.Decoder(Event).decode
_encode = msgspec.json.Encoder().encode


_FAILED = ".failed"


class Recorder:
    """Writes the events of one process. Threads may share a recorder, because each line is one write.

    If a process gets the pid of an earlier process, it appends to the file of the earlier process.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.proc = f"{name}.{os.getpid()}"
        self._path = folder / f"{self.proc}.jsonl"
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._append(b"\n")  # the earlier process was killed in the middle of a line

    def invoke(self, f: str, **fields: Any) -> int:
        """Record that a call begins. Returns the number for the call's answer."""
        op = time.monotonic_ns()
        self._write(Event(t=op, proc=self.proc, type=INVOKE, f=f, op=op, **fields))
        return op

    def answer(self, type_: Literal["ok", "fail", "info"], f: str, op: int, **fields: Any) -> None:
        self._write(Event(t=time.monotonic_ns(), proc=self.proc, type=type_, f=f, op=op, **fields))

    def note(self, f: str, **fields: Any) -> None:
        """Record an event that is not a call: a fault, a measurement or an audit."""
        self._write(Event(t=time.monotonic_ns(), proc=self.proc, type=INFO, f=f, **fields))

    def close(self) -> None:
        os.close(self._file)

    def _write(self, event: Event) -> None:
        self._append(_encode(event) + b"\n")

    def _append(self, line: bytes) -> None:
        why = ""
        try:
            written = os.write(self._file, line)
        except OSError as exc:
            why = str(exc.strerror)
        else:
            if written < len(line):
                why = f"{written} of {len(line)} bytes were written"
        if why:  # an empty file needs no disk space; by the file's name, ``read`` knows that events are missing
            os.close(os.open(self._path.with_suffix(_FAILED), os.O_WRONLY | os.O_CREAT, 0o600))
            raise HistoryDamaged(f"{self._path} cannot be written: {why}")


def read(folder: Path) -> list[Event]:
    """All events of a folder's files, in the order of time.

    A killed process may leave an incomplete line. The function ignores incomplete lines. The call of an incomplete line
    was never made, because a call is recorded before it is made. Raises ``HistoryDamaged`` if a line could not be
    written, or cannot be read.
    """
    for path in sorted(folder.glob(f"*{_FAILED}")):
        raise HistoryDamaged(
            f"{path.stem} could not write down what it did: is the disk of {folder} full? This soak cannot be judged"
        )
    events: list[Event] = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        events += filter(None, itertools.starmap(_event, ((path, line) for line in lines[:-1] if line)))
    events.sort(key=operator.attrgetter("t"))
    return events


def _event(path: Path, line: bytes) -> Event | None:
    """The event of a line. If the result is None, the line is incomplete.

    An incomplete line belongs to a process that was killed while it wrote. A later process with the same pid continued
    the file.
    """
    try:
        return _decode(line)
    except msgspec.DecodeError as exc:
        if line.endswith(b"}"):
            raise HistoryDamaged(f"{path} has a line that is not an event: {exc}: {line[:80]!r}") from exc
        return None


def write(path: Path, events: Iterable[Event]) -> None:
    """Write the given events, compressed, into a file that ``replay`` reads."""
    path.write_bytes(gzip.compress(b"".join(_encode(event) + b"\n" for event in events), mtime=0))


def replay(path: Path) -> list[Event]:
    """The events of a file that ``write`` made."""
    return [_decode(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def cut(events: Sequence[Event], numbers: AbstractSet[int]) -> list[Event]:
    """The events about the given jobs, without the data of other jobs.

    Events that do not concern a single job, such as faults, measurements and counts, are included.
    """
    calls = {(event.proc, event.op) for event in events if event.op and not numbers.isdisjoint(event.jobs)}
    kept = []
    for event in events:
        if (event.proc, event.op) in calls or event.f == "audit" or not numbers.isdisjoint(event.jobs):
            kept.append(_of(event, [at for at, number in enumerate(event.jobs) if number in numbers]))
        elif not event.jobs and event.f in _OF_NO_JOB:
            kept.append(event)
    return kept


def _of(event: Event, places: Sequence[int]) -> Event:
    """An event with only the jobs at the given positions."""
    fields = {}
    for field in ("jobs", "tokens", "attempts", "digests", "states"):
        values = getattr(event, field)
        fields[field] = tuple(values[at] for at in places if at < len(values))
    return msgspec.structs.replace(event, **fields)


def about(events: Sequence[Event], number: int) -> list[Event]:
    """The events about one job, without the data of other jobs. Answers to calls about the job are included."""
    found = []
    calls: set[tuple[str, int]] = set()
    for event in events:
        if not event.jobs and (event.proc, event.op) in calls:
            found.append(event)
        elif number in event.jobs:
            if event.op:
                calls.add((event.proc, event.op))
            found.append(_of(event, [event.jobs.index(number)]))
    return found
